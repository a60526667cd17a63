"""A trace against a probe of the same loader: the probe is the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.errors import LayoutError
from syncline.layout.content import UNWRITTEN, Content, Origin, Piece
from syncline.layout.lattice import Map
from syncline.layout.recorded import Weight
from syncline.layout.view import row_major

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncline.layout.box import Box
    from syncline.layout.probe import Probe
    from syncline.layout.written import LoaderTrace, Write


class _Computed(Origin):
    __slots__ = ()


_COMPUTED = _Computed()


def compare(trace: LoaderTrace, probed: Probe) -> int:
    """Check that a trace and a probe of one loader say the same; return how many live tensors they cover.

    What a trace replays, a probe sees as computed, or (an operation that moves elements) as moved; and so
    it sees elements whose bits are kept under the name of another dtype.

    Raises:
        LayoutError: names the first live tensor that differs, with what either says.
    """
    replayed: dict[str, list[Map]] = {}
    for replay in trace.replays:
        for output in replay.outputs:
            replayed.setdefault(output.live, []).append(output.piece.map)
    for name, spec in trace.live.items():
        origins: dict[str, Weight] = {}
        content = Content(1, 1 << 62)
        for write in trace.writes.get(name, ()):
            # the same bits by the name of another dtype: to a probe, other numbers
            kept = write.dst_dtype == spec.dtype
            origin = origins.setdefault(write.name, Weight(write.name, write.shape, write.src_dtype))
            content.write(_region(write.map), [Piece(origin if kept else _COMPUTED, write.map)])
        for m in replayed.get(name, ()):
            content.write(_region(m), [Piece(_COMPUTED, m)])
        _compare(name, content, probed.writes.get(name, ()))
        for said, found in (("untouched", probed.holes), ("computed", probed.computed)):
            for box in found.get(name, ()):
                _compare_box(name, said, content, box, spec.stride)
    return len(trace.live)


def _region(m: Map) -> Map:
    return Map.of(m.a, m.a, ((n, a, a) for n, a, _ in m.axes))


def _compare(name: str, content: Content, writes: Iterable[Write]) -> None:
    for write in writes:
        for piece in content.read(write.map.flipped()):
            if piece.origin is _COMPUTED:
                continue
            same = isinstance(piece.origin, Weight) and piece.origin.name == write.name
            if not same or not piece.map.identical():
                traced = piece.origin.name if isinstance(piece.origin, Weight) else "nothing"
                raise _differ(name, f"{traced}, by {piece.map.axes}", f"{write.name} {write.box}")


def _compare_box(name: str, said: str, content: Content, box: Box, stride: tuple[int, ...]) -> None:
    start = sum(o * s for o, s in zip(box.offset, stride, strict=True))
    view = Map.of(
        0, start, ((n, b, s) for n, b, s in zip(box.size, row_major(box.size), stride, strict=True))
    )
    wanted = UNWRITTEN if said == "untouched" else _COMPUTED
    for piece in content.read(view):
        if piece.origin is not wanted:
            traced = "nothing" if piece.origin is UNWRITTEN else "a computation"
            traced = piece.origin.name if isinstance(piece.origin, Weight) else traced
            raise _differ(name, traced, f"{box} {said}")


def _differ(name: str, traced: str, probed: str) -> LayoutError:
    return LayoutError(
        "the trace of a loader and its probe differ",
        expected=f"probe: {probed}",
        found=f"trace: {traced}",
        tensor=name,
        hint="the loader depends on values, or on whether tensors have memory",
    )
