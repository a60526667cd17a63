"""Placements without torch: which boxes of a tensor one rank of a mesh holds, and where in its local tensor.

The model is an ordered list of runs per tensor dimension: the global indices that the local tensor holds, in
local order. Each mesh dimension that shards the tensor dimension takes a chunk of that list, by
``torch.chunk``'s rule: pieces of ``ceil(n / parts)``, the last ones shorter or empty. A strided cut first
chunks the list into ``factor`` pieces and takes a chunk of each. The boxes are the products of the runs of
all dimensions.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from syncline.errors import LayoutError
from syncline.layout.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh dimension's share of one tensor dimension.

    Attributes:
        dim: the tensor dimension.
        parts: size of the mesh dimension.
        index: this rank's coordinate in it.
        factor: pieces that the dimension is seen as before each is cut; 1 for an ordinary shard.
    """

    dim: int
    parts: int
    index: int
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Placed:
    """A box of the global tensor, and the same elements' box in the local tensor; both of one size."""

    box: Box
    local: Box


def place(
    shape: Sequence[int],
    cuts: Sequence[Cut],
    local_shape: Sequence[int] | None = None,
    name: str | None = None,
) -> list[Placed]:
    """Return what a rank holds: one box, or several where a dimension is strided; none of them empty.

    Args:
        shape: the global tensor's.
        cuts: in the order in which they apply: that of the mesh dimensions, unless the layout says otherwise.
        local_shape: shape of the real local tensor, if there is one. It is checked, and it tells the two
            readings of a strided cut apart where they differ (see `_readings`).
        name: for the error.

    Raises:
        LayoutError: no reading of the cuts gives the local shape.
    """
    dims: list[tuple[Run, ...]] = []
    for d, size in enumerate(shape):
        mine = tuple(cut for cut in cuts if cut.dim == d)
        wanted = None if local_shape is None else local_shape[d]
        runs = _fit(size, mine, wanted)
        if runs is None:
            raise LayoutError(
                f"the local tensor's dimension {d} is not what its placements say",
                tensor=name,
                expected=" or ".join(sorted({str(_total(runs)) for runs in _readings(size, mine)})),
                found=wanted,
                hint="the tensor was resized, or made by from_local with another shape",
            )
        dims.append(runs)
    return list(_products(dims))


@lru_cache(maxsize=4096)
def _fit(size: int, cuts: tuple[Cut, ...], wanted: int | None) -> tuple[Run, ...] | None:
    """Return the likeliest runs of the wanted total; thousands of tensors share few kinds of cuts."""
    fitting = (runs for runs in _readings(size, cuts) if wanted is None or _total(runs) == wanted)
    return next(map(tuple, fitting), None)


def _readings(size: int, cuts: Sequence[Cut]) -> Iterator[list[Run]]:
    """Yield the runs by the ways in which a strided cut can have come about, the likelier first.

    FSDP2 over a sharded parameter cuts what the later mesh dimensions left, and writes that down as a strided
    cut whose factor is their number of shards. Applying the strided cut first, as torch defines the
    placement, gives the same for even sizes and most uneven ones, but not for all: 7 rows over (3, 2) leave
    row 6 on rank (2, 1), not on (2, 0). Sizes tell such cases apart; and a layout of which some ranks were
    read in the wrong way does not cover the tensor, which every plan checks.
    """
    whole: list[Run] = [(0, size)] if size else []
    yield _inside_out(whole, cuts)
    if any(cut.factor > 1 for cut in cuts):
        runs = whole
        for cut in cuts:
            runs = _take(runs, cut)
        yield runs


def _inside_out(runs: list[Run], cuts: Sequence[Cut]) -> list[Run]:
    if not cuts:
        return runs
    first, later = cuts[0], cuts[1:]
    if first.factor > 1 and first.factor == math.prod(cut.parts for cut in later):
        return _chunk(_inside_out(runs, later), first.parts, first.index)
    return _inside_out(_take(runs, first), later)


def _take(runs: list[Run], cut: Cut) -> list[Run]:
    pieces = (_chunk(runs, cut.factor, i) for i in range(cut.factor))
    return _merge(itertools.chain.from_iterable(_chunk(p, cut.parts, cut.index) for p in pieces))


def _chunk(runs: list[Run], parts: int, index: int) -> list[Run]:
    """Return chunk ``index`` of the listed indices, cut into ``parts`` by torch.chunk's rule."""
    total = _total(runs)
    step = -(-total // parts)
    low, high = min(index * step, total), min((index + 1) * step, total)
    taken: list[Run] = []
    at = 0
    for start, length in runs:
        a, b = max(low, at), min(high, at + length)
        if b > a:
            taken.append((start + a - at, b - a))
        at += length
    return taken


def _merge(runs: Iterator[Run]) -> list[Run]:
    merged: list[Run] = []
    for start, length in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged


def _total(runs: Sequence[Run]) -> int:
    return sum(length for _, length in runs)


def _products(dims: Sequence[Sequence[Run]]) -> Iterator[Placed]:
    placed: list[list[tuple[int, int, int]]] = []
    for runs in dims:
        starts = itertools.accumulate((length for _, length in runs), initial=0)
        placed.append([(start, at, length) for (start, length), at in zip(runs, starts, strict=False)])
    for combination in itertools.product(*placed):
        size = tuple(length for _, _, length in combination)
        box = Box(tuple(start for start, _, _ in combination), size)
        yield Placed(box, Box(tuple(at for _, at, _ in combination), size))
