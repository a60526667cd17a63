"""Blocks of scales that several ranks hold: who tells whom what, and who publishes them.

A block's scale follows from its largest magnitude alone. Holders of a block tell each other the largest of
what they hold, compare, and quantise their own elements with the scale that comes of it: the payload is cut
as the weight is, and nothing is approximated. Every rank works out its own part from the claims of all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from syncline.kernels.fp8 import BLOCK
from syncline.layout.box import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from syncline.adapters.megatron.owners import Claims

Key = tuple[str, Box]
"""A checkpoint name, and a held box of it."""


def blocks_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor's scales: one a block in the last two dimensions."""
    return (*shape[:-2], *(math.ceil(n / BLOCK) for n in shape[-2:]))


def touched(box: Box) -> Box:
    """Return the blocks of which a box holds elements, as a box of the scales."""
    low = (*box.offset[:-2], *(n // BLOCK for n in box.offset[-2:]))
    high = (*box.end[:-2], *(math.ceil(n / BLOCK) for n in box.end[-2:]))
    return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))


@dataclass(frozen=True, slots=True)
class Span:
    """Some blocks of a held box.

    Attributes:
        key: the box.
        blocks: which, relative to the first block that the box touches.
    """

    key: Key
    blocks: Box

    def of(self, values: Mapping[Key, NDArray[np.uint32]]) -> NDArray[np.uint32]:
        """Return a view of these blocks' values, of the shape of ``blocks``."""
        offset, end = self.blocks.offset, self.blocks.end
        return values[self.key][tuple(slice(a, b) for a, b in zip(offset, end, strict=True))]


@dataclass(slots=True)
class Lane:
    """What one rank tells another and hears from it, in an order that both know.

    Attributes:
        sends: blocks of which the largest magnitudes are told.
        receives: blocks of own boxes with which what is heard is compared.
    """

    sends: list[Span] = field(default_factory=list)
    receives: list[Span] = field(default_factory=list)


@dataclass(slots=True)
class Halo:
    """What one rank does about the blocks that it shares.

    Attributes:
        shares: wanted boxes that share a block with another box.
        publishes: by wanted box, the blocks whose scales its holders publish, as boxes of the scales. Each
            block is published by the holders of one box.
        lanes: by the other rank.
        local: pairs of spans of own boxes that hold parts of the same blocks.
    """

    shares: set[Key] = field(default_factory=set)
    publishes: dict[Key, tuple[Box, ...]] = field(default_factory=dict)
    lanes: dict[int, Lane] = field(default_factory=dict)
    local: list[tuple[Span, Span]] = field(default_factory=list)


@dataclass(frozen=True)
class _Cuts:
    """The distinct boxes of one tensor in order, and the ranks that hold each."""

    boxes: tuple[Box, ...]
    holders: tuple[tuple[int, ...], ...]

    @cached_property
    def blocks(self) -> tuple[Box, ...]:
        return tuple(touched(box) for box in self.boxes)

    @cached_property
    def _edges(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.array([b.offset for b in self.blocks]), np.array([b.end for b in self.blocks])

    def beside(self, index: int) -> list[int]:
        """Return the boxes that share a block with one."""
        low, high = self._edges
        common = np.minimum(high, high[index]) > np.maximum(low, low[index])
        return [int(i) for i in np.flatnonzero(common.all(axis=1)) if i != index]

    def teller(self, rank: int, mine: int, other: int) -> int:
        """Return who tells a holder of one box about another: replicas are paired in their order."""
        own, others = self.holders[mine], self.holders[other]
        return others[own.index(rank) * len(others) // len(own)]


def plan(everyone: Sequence[Claims], wants: Callable[[str], bool], rank: int) -> Halo:
    """Return what one rank does; the claims have been checked, so distinct boxes of a tensor are disjoint.

    Args:
        everyone: claims of all ranks, in the order of ranks.
        wants: which checkpoint tensors are quantised.
        rank: whose part it is, an index of ``everyone``.
    """
    mine = {claim.name for claim in everyone[rank].claims if wants(claim.name)}
    held: dict[str, dict[Box, list[int]]] = {name: {} for name in sorted(mine)}
    for number, claims in enumerate(everyone):
        for claim in claims.claims:
            if claim.name in mine:
                for box in claim.boxes:
                    ranks = held[claim.name].setdefault(Box(*box), [])
                    if number not in ranks[-1:]:
                        ranks.append(number)
    halo = Halo()
    for name, by_box in held.items():
        boxes = tuple(sorted(by_box, key=lambda box: box.offset))
        _tensor(halo, name, _Cuts(boxes, tuple(tuple(by_box[box]) for box in boxes)), rank)
    return halo


def _tensor(halo: Halo, name: str, cuts: _Cuts, rank: int) -> None:
    own = [i for i, holders in enumerate(cuts.holders) if rank in holders]
    beside = {i: cuts.beside(i) for i in own}
    for i in own:
        key = name, cuts.boxes[i]
        halo.publishes[key] = _published(cuts, i, [j for j in beside[i] if j < i])
        if beside[i]:
            halo.shares.add(key)
    # by pairs of boxes in their order, so that both ends of a lane come to the same sequence
    for low, high in sorted({(min(i, j), max(i, j)) for i in own for j in beside[i]}):
        for i, j in ((low, high), (high, low)):
            _pair(halo, name, cuts, (i, j), rank)


def _pair(halo: Halo, name: str, cuts: _Cuts, pair: tuple[int, int], rank: int) -> None:
    """Add what holders of the first box of a pair hear about the second one."""
    i, j = pair
    common = cuts.blocks[i].intersect(cuts.blocks[j])
    if common is None:
        return
    into, out = (Span((name, cuts.boxes[k]), common.relative_to(cuts.blocks[k])) for k in (i, j))
    if rank in cuts.holders[i]:
        if rank in cuts.holders[j]:
            halo.local.append((into, out))
        else:
            halo.lanes.setdefault(cuts.teller(rank, i, j), Lane()).receives.append(into)
    if rank in cuts.holders[j]:
        for other in cuts.holders[i]:
            if other not in cuts.holders[j] and cuts.teller(other, i, j) == rank:
                halo.lanes.setdefault(other, Lane()).sends.append(out)


def _published(cuts: _Cuts, index: int, before: Sequence[int]) -> tuple[Box, ...]:
    """Return the blocks of a box that no earlier box touches, as disjoint boxes."""
    free = [cuts.blocks[index]]
    for other in before:
        free = [left for box in free for left in box.subtract(cuts.blocks[other])]
    return tuple(free)


def merge(halo: Halo, values: Mapping[Key, NDArray[np.uint32]]) -> None:
    """Compare the largest magnitudes of own boxes that share blocks, in place."""
    for into, out in halo.local:
        mine = into.of(values)
        np.maximum(mine, out.of(values), out=mine)


def message(spans: Sequence[Span], values: Mapping[Key, NDArray[np.uint32]]) -> NDArray[np.uint32]:
    """Return what is told about these blocks, uint32[N]."""
    return np.concatenate([span.of(values).reshape(-1) for span in spans])


def compare(
    spans: Sequence[Span], values: Mapping[Key, NDArray[np.uint32]], heard: NDArray[np.uint32]
) -> None:
    """Compare what was heard about these blocks, uint32[N], in place."""
    ends = np.cumsum([0, *(span.blocks.numel for span in spans)])
    for span, (low, high) in zip(spans, pairwise(ends), strict=True):
        mine = span.of(values)
        np.maximum(mine, heard[low:high].reshape(mine.shape), out=mine)
