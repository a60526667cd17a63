"""The loader trace: learning a layout by running an engine's own loader on tensors without weights.

The loader fills a twin of the model on the meta device from weightless checkpoint tensors. Every write into
the twin's storages is followed (`syncline.layout.loader_trace`): copies become boxes and views, anything
computed becomes a `Replay`, and what can be neither is refused by name. Live memory is never touched, and
nothing here knows a model.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

from syncline import faults
from syncline.errors import LayoutError
from syncline.layout.content import UNWRITTEN, Piece, merged
from syncline.layout.export import dtype_name
from syncline.layout.lattice import Map, disjoint, split
from syncline.layout.loader_modes import watching
from syncline.layout.loader_threads import Carrier, carried
from syncline.layout.loader_trace import Tracer, storage_key
from syncline.layout.pieces import Known, boxes, lattice
from syncline.layout.recorded import Before, Weight
from syncline.layout.recording import record
from syncline.layout.replay import Output, Replay
from syncline.layout.transform import has_cast
from syncline.layout.written import LiveSpec, LoaderTrace, Spec, Write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch

    from syncline.layout.box import Box

    Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

__all__ = ["LoaderTrace", "Replay", "Spec", "Write", "trace_loader"]

_THREAD_SECONDS = 60.0  # how long threads of a loader may run on after it returned


def trace_loader(
    live: Mapping[str, torch.Tensor],
    load: Loader,
    checkpoint: Mapping[str, Spec],
    *,
    state: Callable[[], Mapping[str, torch.Tensor]] | None = None,
) -> LoaderTrace:
    """Run ``load`` on weightless tensors and return what it does.

    The loader may cut, reshape, transpose, join, repeat, pad and cast, compute, write in place, fill from
    ``item()`` of a one-element tensor, rebind ``.data``, and work in threads: those that it starts, and tasks
    that it gives to a pool, are traced as well. It runs without gradients. It must not look at values.

    Args:
        live: every parameter and buffer of the twin by name, on the meta device; names of one storage are
            one place. A tensor with memory may be read (an index table that the loader consults), not
            written.
        load: the twin's own loader; gets (name, weightless tensor) of the checkpoint, in its order.
        checkpoint: the checkpoint's tensors by name.
        state: returns the twin's tensors after loading. What the loader replaced is followed to its new
            tensor; without ``state``, only tensors whose ``.data`` was rebound are.

    Raises:
        LayoutError: the loader consults values, writes what cannot be described, leaves the meta device,
            loses a live tensor, or leaves in one what depends on more than the checkpoint; the tensor is
            named.
    """
    faults.point("layout.trace_loader")
    with _without_collection():
        return _traced(live, load, checkpoint, state)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Hold back the garbage collector: what a trace makes it keeps, and passes over it would only cost."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _traced(
    live: Mapping[str, torch.Tensor],
    load: Loader,
    checkpoint: Mapping[str, Spec],
    state: Callable[[], Mapping[str, torch.Tensor]] | None,
) -> LoaderTrace:
    tracer = Tracer(live)
    before = {name: (storage_key(t), t.storage_offset(), tuple(t.shape)) for name, t in live.items()}
    carrier = Carrier(lambda: watching(tracer))
    try:
        weights = tracer.weights(checkpoint)
        with carried(), carrier.here():
            load(weights)
            late = carrier.unfinished(_THREAD_SECONDS)
        _refuse_late(late)
    except LayoutError:
        raise
    except Exception as error:
        if tracer.refusal is not None:
            raise tracer.refusal from error
        raise LayoutError(
            "the loader cannot be traced on weightless tensors",
            expected="a loader that moves weights without looking at their values",
            found=f"{type(error).__name__}: {error}",
            tensor=tracer.current,
        ) from error
    finally:
        tracer.closed = True
    if tracer.refusal is not None:
        raise tracer.refusal
    after = _after(live, None if state is None else state())
    rebound = tuple(
        name for name, t in after.items()
        if name not in before or (storage_key(t), t.storage_offset(), tuple(t.shape)) != before[name]
    )  # fmt: skip
    return _Harvest(tracer, checkpoint).gather(after, rebound)


def _refuse_late(threads: list[str]) -> None:
    if threads:
        raise LayoutError("threads of a loader still run after it returned", found=threads)


def _after(
    live: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    after = dict(live if state is None else state)
    for name, tensor in live.items():
        if name not in after:
            raise LayoutError("the loader removes a live tensor", expected="the twin keeps it", tensor=name)
        if tensor.device.type == "meta" and after[name].device.type != "meta":
            raise LayoutError(
                "the loader replaces a weightless tensor by one with memory",
                expected="a tensor on the meta device",
                found=f"{after[name].device}, {tuple(after[name].shape)}",
                tensor=name,
                hint="build the twin, and run its loader, with the meta device as the default device",
            )
    return after


class _Harvest:
    """Reads off, after a load, what every live tensor holds."""

    def __init__(self, tracer: Tracer, checkpoint: Mapping[str, Spec]) -> None:
        self._tracer, self._checkpoint = tracer, checkpoint
        self._writes: dict[str, tuple[Write, ...]] = {}
        self._outputs: list[Output] = []
        self._holes: dict[str, tuple[Box, ...]] = {}
        self._live: dict[str, LiveSpec] = {}
        self._known: Known = {}

    def gather(self, after: Mapping[str, torch.Tensor], rebound: tuple[str, ...]) -> LoaderTrace:
        """Return the trace, live tensors in their own order."""
        claims: dict[int, list[tuple[str, Map]]] = {}
        ties: dict[str, str] = {}
        order = sorted(after, key=lambda name: -after[name].numel())  # a whole before its parts
        for name in order:
            tensor = after[name]
            if tensor.device.type != "meta":
                continue
            self._live[name] = LiveSpec(tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype))
            view = Map.between(
                tensor.shape, (int(tensor.storage_offset()), tensor.stride()), (0, tensor.stride())
            )
            taken = claims.setdefault(storage_key(tensor), [])
            owner = _owner(name, view, taken) if tensor.numel() else None
            if owner is not None:
                ties[name] = owner
                del self._live[name]
                continue
            taken.append((name, view))
            self._harvest(name, tensor, view)
        replays = record(self._outputs)
        used = {write.name for writes in self._writes.values() for write in writes}
        used.update(name for replay in replays for name in replay.inputs)
        unused = tuple(name for name in self._checkpoint if name not in used)
        names = [name for name in after if name in self._live]
        return LoaderTrace(
            {name: self._writes[name] for name in names if name in self._writes},
            tuple(replays),
            unused,
            {name: self._reason(name) for name in unused},
            {name: self._holes[name] for name in names if name in self._holes},
            {name: self._live[name] for name in names},
            {name: ties[name] for name in after if name in ties},
            rebound,
        )

    def _reason(self, name: str) -> str:
        if name in self._tracer.replaced:
            return f"overwritten while loading {self._tracer.replaced[name]!r}"
        if name in self._tracer.read:
            return "read, but nothing of it reached a live tensor"
        return "never read"

    def _harvest(self, name: str, tensor: torch.Tensor, view: Map) -> None:
        pieces = merged(self._tracer.content(tensor).read(view.flipped())) if tensor.numel() else []
        writes: list[Write] = []
        holes: list[Map] = []
        for piece in pieces:
            if piece.origin is UNWRITTEN or isinstance(piece.origin, Before):
                holes.append(piece.map)
            elif (dtype := _stored(piece, dtype_name(tensor.dtype))) is not None:
                writes += _writes(name, piece, dtype, self._known)
            else:
                self._outputs.append(Output(name, tensor.dtype, piece))
        if writes:
            self._writes[name] = tuple(sorted(writes, key=lambda write: write.view.offset))
        if holes:
            self._holes[name] = tuple(_hole_boxes(name, tensor, holes))


def _owner(name: str, view: Map, taken: list[tuple[str, Map]]) -> str | None:
    """Return the live tensor that a view is a part of, or None where it stands alone."""
    for owner, other in taken:
        if view == other:
            return owner
        if not other.nested() or disjoint(view, other):
            continue
        hits, misses = split(view, other)
        if not misses:
            return owner
        if hits:
            raise LayoutError(
                "two live tensors share some of their elements",
                expected="tensors that are apart, or one a part of the other",
                found=f"{owner!r} and {name!r}",
                tensor=name,
            )
    return None


def _stored(piece: Piece, live: str) -> str | None:
    """Return the dtype that a copied piece is stored as; None where it has to be replayed."""
    if not isinstance(piece.origin, Weight):
        return None
    if piece.cast is None:
        return piece.origin.dtype
    return live if piece.cast == live and has_cast(piece.origin.dtype, live) else None


def _writes(live: str, piece: Piece, dtype: str, known: Known) -> list[Write]:
    weight = piece.origin
    if not isinstance(weight, Weight):
        raise LayoutError("a piece of no checkpoint tensor is no write", tensor=live)
    try:
        found = list(boxes(piece.map, weight.shape, known))
    except LayoutError as error:
        raise LayoutError(
            f"{error.what}: {weight.name!r} in {live!r}", expected=error.expected, tensor=live
        ) from error
    return [Write(weight.name, weight.shape, box, view, weight.dtype, dtype) for box, view in found]


def _hole_boxes(name: str, tensor: torch.Tensor, holes: list[Map]) -> list[Box]:
    """Return holes, given by element from the tensor's first one on side a, as boxes of its shape."""
    moving = [(n, s) if s else (1, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    places = lattice([n for n, _ in moving], 0, [s for _, s in moving])
    if not places.nested():
        raise LayoutError("a live tensor overlaps itself", found=tuple(tensor.stride()), tensor=name)
    found: list[Box] = []
    for hole in holes:
        for part in split(Map.of(hole.a, hole.a, [(n, a, a) for n, a, _ in hole.axes]), places)[0]:
            found += (box for box, _ in boxes(part, tuple(n for n, _ in moving)))
    return sorted(found, key=lambda box: box.offset)
