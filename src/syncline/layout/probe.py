"""The coordinate probe: numbers through any loader or exporter on real memory, and where each one lands.

Nothing is assumed of the loader but that it runs: what it moves is read off the memory that it wrote. That
makes the probe slow, and the oracle of the loader trace, which is fast. Memory is bounded by slabs of
targets; each slab costs another round of passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from syncline import faults
from syncline.errors import LayoutError
from syncline.layout.content import UNWRITTEN, Content, Piece, merged
from syncline.layout.coordinates import Code, Landed, Pass, encoded, fill
from syncline.layout.export import dtype_name
from syncline.layout.lattice import Axis, Map, split
from syncline.layout.pieces import boxes
from syncline.layout.probe_compare import compare
from syncline.layout.recorded import Weight
from syncline.layout.runs import compress
from syncline.layout.view import row_major
from syncline.layout.written import Spec, Write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from syncline.layout.box import Box
    from syncline.layout.loader import Loader

__all__ = ["Probe", "compare", "probe_exporter", "probe_loader"]

LIMIT = 1 << 16  # regular pieces of one target: beyond it a layout of single elements helps nobody
SLAB = 1 << 24  # target elements looked at in one round of passes: some 300 MiB


@dataclass(frozen=True, eq=False)
class Probe:
    """Where the elements of sources landed. A loader's sources are the checkpoint, its targets live tensors.

    Attributes:
        writes: by target name, boxes of sources that stand there; views are of the target's elements.
        holes: by target name, boxes that were not touched.
        computed: by target name, boxes that were written with something else than elements of a source.
        unused: by source name, boxes that landed nowhere as they are.
        duplicates: by source name, boxes that landed more than once.
        passes: how often the loader ran.
    """

    writes: Mapping[str, tuple[Write, ...]]
    holes: Mapping[str, tuple[Box, ...]]
    computed: Mapping[str, tuple[Box, ...]]
    unused: Mapping[str, tuple[Box, ...]]
    duplicates: Mapping[str, tuple[Box, ...]]
    passes: int


def probe_loader(
    live: Mapping[str, torch.Tensor],
    load: Loader,
    checkpoint: Mapping[str, Spec],
    *,
    state: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    slab: int = SLAB,
) -> Probe:
    """Run a loader on coordinates, several times, and return where they landed.

    Args:
        live: the tensors of a real twin on the CPU; their contents are destroyed. Two names of one view count
            as the first.
        load: its loader; gets (name, tensor) with real contents.
        checkpoint: the checkpoint's tensors.
        state: returns the twin's tensors after loading, where the loader replaces them.
        slab: most target elements looked at in one round; bounds the extra memory to about 20 bytes each.

    Raises:
        LayoutError: what landed is so scattered that no views describe it; the target is named.
    """
    faults.point("layout.probe")
    first, total = _numbered({name: spec.shape for name, spec in checkpoint.items()})
    kinds = [getattr(torch, spec.dtype) for spec in checkpoint.values()] + [t.dtype for t in live.values()]
    code = Code.of(kinds, total)

    def sources(which: Pass) -> Iterator[tuple[str, torch.Tensor]]:
        for name, spec in checkpoint.items():
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            yield name, fill(tensor, code, which, first[name])

    def run(which: Pass) -> Mapping[str, torch.Tensor]:
        with torch.no_grad():
            for tensor in _distinct(live if state is None else state()).values():
                tensor.detach().copy_(encoded(torch.tensor(which.poison), tensor.dtype).expand(tensor.shape))
            load(sources(which))
        return _distinct(live if state is None else state())

    return _Prober(code, run, first, checkpoint, slab).probe()


def probe_exporter(
    live: Mapping[str, torch.Tensor],
    export: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    *,
    slab: int = SLAB,
) -> Probe:
    """Run an exporter on coordinates, several times, and return which live elements make up each tensor.

    Args:
        live: real CPU tensors; their contents are destroyed. Two names of one view count as the first.
        export: gets the live tensors, returns checkpoint tensors by name.
        slab: as for `probe_loader`.

    Raises:
        LayoutError: as `probe_loader`.
    """
    faults.point("layout.probe")
    sources = _distinct(live)
    specs = {name: Spec(tuple(t.shape), dtype_name(t.dtype)) for name, t in sources.items()}
    first, total = _numbered({name: spec.shape for name, spec in specs.items()})
    with torch.no_grad():
        kinds = [t.dtype for t in export(live).values()] + [t.dtype for t in sources.values()]
    code = Code.of(kinds, total)

    def run(which: Pass) -> Mapping[str, torch.Tensor]:
        with torch.no_grad():
            for name, tensor in sources.items():
                fill(tensor, code, which, first[name])
            return export(live)

    return _Prober(code, run, first, specs, slab).probe()


def _numbered(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, int], int]:
    first, total = {}, 0
    for name, shape in shapes.items():
        first[name] = total
        total += torch.Size(shape).numel()
    return first, total


def _distinct(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors without second names of one view."""
    seen: set[tuple[object, ...]] = set()
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        if key not in seen or tensor.numel() == 0:
            found[name] = tensor
        seen.add(key)
    return found


class _Prober:
    """Runs the passes, slab by slab, and compresses what they show."""

    def __init__(
        self,
        code: Code,
        run: Callable[[Pass], Mapping[str, torch.Tensor]],
        first: Mapping[str, int],
        sources: Mapping[str, Spec],
        slab: int,
    ) -> None:
        self._code, self._run, self._sources, self._slab = code, run, sources, slab
        self._names = [name for name, spec in sources.items() if torch.Size(spec.shape).numel()]
        self._starts = np.array([first[name] for name in self._names], np.int64)
        self._origins = [Weight(n, tuple(sources[n].shape), sources[n].dtype) for n in self._names]
        self._pieces: dict[str, list[Piece]] = {}
        self._holes: dict[str, list[Map]] = {}
        self._computed: dict[str, list[Map]] = {}
        self._passes = 0

    def probe(self) -> Probe:
        """Return the outcome."""
        targets = self._again(self._code.passes[0])
        sizes = {name: t.numel() for name, t in targets.items()}
        for window in _windows(sizes, self._slab):
            landed = Landed(self._code, sum(high - low for _, low, high in window))
            for which in self._code.passes:
                targets = self._again(which)
                landed.see(which, [targets[n].detach().reshape(-1)[lo:hi] for n, lo, hi in window])
            self._read(landed, window)
        writes = {n: tuple(self._writes(n, targets[n])) for n in targets if n in self._pieces}
        unused, duplicates = self._coverage([w for found in writes.values() for w in found])
        return Probe(
            writes,
            {n: _boxes(n, self._holes[n], targets[n]) for n in targets if n in self._holes},
            {n: _boxes(n, self._computed[n], targets[n]) for n in targets if n in self._computed},
            unused,
            duplicates,
            self._passes,
        )

    def _again(self, which: Pass) -> Mapping[str, torch.Tensor]:
        self._passes += 1
        return self._run(which)

    def _read(self, landed: Landed, window: list[tuple[str, int, int]]) -> None:
        moved, computed = (x.numpy() for x in landed.states())
        numbers = landed.numbers.numpy()
        at = 0
        for name, low, high in window:
            part = slice(at, at + high - low)
            at = part.stop
            places = np.flatnonzero(moved[part])
            found = numbers[part][places]
            source = np.searchsorted(self._starts, found, "right") - 1
            for group, m in compress(places + low, found - self._starts[source], source):
                self._pieces.setdefault(name, []).append(Piece(self._origins[group], m))
            _mark(self._computed, name, np.flatnonzero(computed[part]) + low)
            _mark(self._holes, name, np.flatnonzero(~computed[part] & ~moved[part]) + low)

    def _writes(self, name: str, target: torch.Tensor) -> Iterator[Write]:
        dtype = dtype_name(target.dtype)
        found: list[Write] = []
        pieces = merged(list(_joined(self._pieces[name])))
        if len(pieces) > LIMIT:
            raise LayoutError(
                "what a loader moved is too scattered to describe",
                expected=f"at most {LIMIT} regular pieces",
                found=len(pieces),
                tensor=name,
            )
        for piece in pieces:
            weight = piece.origin
            if not isinstance(weight, Weight):
                raise LayoutError("a probe that found no source", tensor=name)
            for m in _placed(piece.map, target):
                for box, view in boxes(m, weight.shape):
                    found.append(Write(weight.name, weight.shape, box, view, weight.dtype, dtype))
        yield from sorted(found, key=lambda write: write.view.offset)

    def _coverage(self, writes: list[Write]) -> tuple[dict[str, tuple[Box, ...]], dict[str, tuple[Box, ...]]]:
        contents = {name: Content(1, 1 << 62) for name in self._names}
        boxes_of: dict[int, Box] = {}
        twice: dict[str, list[Box]] = {}
        for write in writes:
            origin = Weight(write.name, write.shape, write.src_dtype)
            boxes_of[id(origin)] = write.box
            start = Map.between(
                write.box.size, _corner(write.box, write.shape), _corner(write.box, write.shape)
            )
            for old in contents[write.name].write(start, [Piece(origin, start)]):
                common = boxes_of[id(old.origin)].intersect(write.box)
                twice.setdefault(write.name, []).extend([common] if common is not None else [])
        unused: dict[str, tuple[Box, ...]] = {}
        for name, content in contents.items():
            shape = tuple(self._sources[name].shape)
            rest = [
                p.map for p in content.read(Map.run(0, 0, torch.Size(shape).numel())) if p.origin is UNWRITTEN
            ]
            if rest:
                unused[name] = tuple(
                    sorted((b for m in rest for b, _ in boxes(m, shape)), key=lambda b: b.offset)
                )
        return unused, {name: tuple(dict.fromkeys(found)) for name, found in twice.items()}


def _corner(box: Box, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return (element of a box's first index, strides) in a row-major tensor."""
    strides = row_major(shape)
    return sum(o * s for o, s in zip(box.offset, strides, strict=True)), strides


def _joined(pieces: list[Piece]) -> Iterator[Piece]:
    """Yield pieces with runs joined that a slab's end had cut."""
    last: Piece | None = None
    for piece in pieces:
        if (
            last is not None
            and last.origin is piece.origin
            and _is_run(last.map)
            and _is_run(piece.map)
            and (last.map.end, last.map.b_end) == (piece.map.a, piece.map.b)
        ):
            last = last._replace(map=Map.run(last.map.a, last.map.b, last.map.numel + piece.map.numel))
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _is_run(m: Map) -> bool:
    return m.axes in ((), (Axis(m.numel, 1, 1),))


def _windows(sizes: Mapping[str, int], slab: int) -> Iterator[list[tuple[str, int, int]]]:
    """Yield lists of (target, first element, end), in order, of at most ``slab`` elements together."""
    window: list[tuple[str, int, int]] = []
    room = slab
    for name, size in sizes.items():
        low = 0
        while low < size:
            high = min(size, low + room)
            window.append((name, low, high))
            room -= high - low
            low = high
            if room == 0:
                yield window
                window, room = [], slab
    if window:
        yield window


def _mark(into: dict[str, list[Map]], name: str, places: np.ndarray) -> None:
    if len(places):
        same = np.zeros(len(places), np.int64)
        into.setdefault(name, []).extend(m for _, m in compress(places, places, same))


def _placed(m: Map, target: torch.Tensor) -> list[Map]:
    """Return a map from row-major elements of a target (side a) as one from elements of its memory."""
    if target.is_contiguous():
        return [m]
    by = Map(0, 0, tuple(
        Axis(n, a, b)
        for n, a, b in zip(target.shape, row_major(target.shape), target.stride(), strict=True) if n != 1
    ))  # fmt: skip
    return [hit.flipped() for hit in split(m, by)[0]]


def _boxes(name: str, maps: list[Map], target: torch.Tensor) -> tuple[Box, ...]:
    try:
        found = [box for m in maps for box, _ in boxes(m, tuple(target.shape))]
    except LayoutError as error:
        raise LayoutError(error.what, expected=error.expected, tensor=name) from error
    return tuple(sorted(found, key=lambda box: box.offset))
