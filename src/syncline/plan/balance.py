"""Balance: one sender for every (tile, instance), so that the busiest sender has little to send.

A tile is one of a class of tensors and stands for as many equal ones as the class has tensors. Tiles are
aggregated by the set of ranks that hold them. The most constrained go first, among those the longest, each to
the least loaded holder: for equal tiles of one set this is a water level, computed at once. Where a few large
tiles leave the senders unequal, they are cut into parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from syncline.plan.columns import changes, expand, group_sets, pointers, sum_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncline.plan.columns import I32, I64, Bools, Ints
    from syncline.plan.cover import Tiles

#: A plan whose busiest sender is within this factor of the bound is balanced.
TOLERANCE = 1.02
#: Tiles are not cut into parts of fewer bytes than this.
MIN_PART = 1 << 20
#: Sets are compared with each other for the bound up to this many.
_MAX_SETS = 1024
_FEW = 8


@dataclass(frozen=True, slots=True)
class HolderSets:
    """The distinct sets of writer ranks that hold a tile.

    Attributes:
        of_tile: i64[N], set of each tile.
        ranks: a sorted i64[n] a set.
        size: i64[S], ranks of each set.
    """

    of_tile: I64
    ranks: tuple[I64, ...]
    size: I64

    @classmethod
    def of(cls, tiles: Tiles, writer_of: I32) -> HolderSets:
        """Return the sets of the ranks whose manifests hold the tiles; ``writer_of`` i32[ranks]."""
        tile = np.repeat(np.arange(len(tiles)), np.diff(tiles.holder_ptr))
        once = changes(tile, tiles.holder_manifest)
        tile, manifest = tile[once], tiles.holder_manifest[once]
        ptr = pointers(np.bincount(tile, minlength=len(tiles)))
        of_tile, sample = group_sets(ptr, manifest)
        ranks = []
        for t in sample.tolist():
            holds = np.zeros(int(writer_of.max()) + 1, np.bool_)
            holds[manifest[ptr[t] : ptr[t + 1]]] = True
            ranks.append(np.nonzero(holds[writer_of])[0])
        return cls(of_tile, tuple(ranks), np.array([len(r) for r in ranks], np.int64))


@dataclass(frozen=True, slots=True)
class Demand:
    """What one instance wants of every tile.

    Attributes:
        nbytes: i64[N], wire bytes of one tile of the class, over all the instance's ranks.
        host: i64[N], number of the host whose holders should send, -1 where any holder may.
    """

    nbytes: I64
    host: I64


@dataclass(frozen=True, slots=True)
class Shares:
    """Intervals of equal tiles that one rank sends to one instance.

    Attributes:
        item: i64[K], the (instance, tile) of each interval.
        low, high: i64[K], which tensors of the class, by number within it.
        rank: i32[K], the writer rank.
    """

    item: I64
    low: I64
    high: I64
    rank: I32

    def take(self, rows: I64) -> Shares:
        """Return some of the intervals."""
        return Shares(self.item[rows], self.low[rows], self.high[rows], self.rank[rows])


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who sends what.

    All (instance, tile, tensor of the class) with something to send lie on one line, item after item; the
    line is cut into stretches, each sent by one rank.

    Attributes:
        instance, tile: i64[K], the items.
        start: i64[K], place of each item on the line; times: i64[K], its length.
        item: i64[I, N], the item of an instance and a tile; -1 where the instance wants nothing of the tile.
        end: i64[S], where each stretch ends, ascending; rank: i32[S], who sends it.
        load: i64[ranks], bytes each writer rank sends.
        bound: bytes; no assignment of these tiles, however cut, has a busiest sender below it.
    """

    instance: I64
    tile: I64
    start: I64
    times: I64
    item: I64
    end: I64
    rank: I32
    load: I64
    bound: int

    @property
    def busiest(self) -> int:
        """Bytes of the busiest sender."""
        return int(self.load.max(initial=0))

    @property
    def balanced(self) -> bool:
        """Whether the busiest sender is close to the bound."""
        return self.busiest <= TOLERANCE * self.bound

    def sender(self, instance: int, tile: Ints, place: Ints) -> I32:
        """Return i32: who sends tensor number ``place`` of each tile's class to an instance."""
        item = self.item[instance, tile]
        return self.rank[np.searchsorted(self.end, self.start[item] + place, side="right")]

    def shares(self, items: I64) -> Shares:
        """Return who sends which tensors of some items, by item, then by place."""
        low = self.start[items]
        first = np.searchsorted(self.end, low, side="right")
        last = np.searchsorted(self.end, low + self.times[items] - 1, side="right")
        which, at = expand(last - first + 1)
        stretch = first[which] + at
        return self._cut(items[which], stretch)

    def shares_of(self, rank: int) -> Shares:
        """Return what one rank sends, by instance, then by tile."""
        stretch = np.nonzero(self.rank == rank)[0]
        low = self.end[stretch - 1] * (stretch > 0)
        order = np.argsort(self.start, kind="stable")
        place = self.start[order]
        first = np.searchsorted(place, low, side="right") - 1
        last = np.searchsorted(place, self.end[stretch] - 1, side="right")
        which, at = expand(last - first)
        found = self._cut(order[first[which] + at], stretch[which])
        kept = np.lexsort((found.low, self.tile[found.item], self.instance[found.item]))
        return found.take(kept)

    def _cut(self, item: I64, stretch: I64) -> Shares:
        begin = np.where(stretch > 0, self.end[stretch - 1], 0)
        low = np.maximum(begin - self.start[item], 0)
        high = np.minimum(self.end[stretch] - self.start[item], self.times[item])
        return Shares(item, low, high, self.rank[stretch])


@dataclass(frozen=True, slots=True)
class _Items:
    """One row for each (instance, tile) with something to send; ``group`` says which ranks may."""

    instance: I64
    tile: I64
    nbytes: I64
    times: I64
    group: I64
    candidates: tuple[I64, ...]


def assign(sets: HolderSets, demands: Sequence[Demand], hosts: I64, times: I64) -> Assignment:
    """Choose the senders.

    Args:
        sets: holders of the tiles.
        demands: one an instance, in the order of the instances' names.
        hosts: i64[ranks], number of each writer rank's host.
        times: i64[N], how many tensors each tile stands for.
    """
    items = _items(sets, demands, hosts, times)
    load = np.zeros(len(hosts), np.int64)
    count = np.array([len(c) for c in items.candidates], np.int64)
    only = np.array([int(c[0]) for c in items.candidates], np.int64)
    alone = np.nonzero(count[items.group] == 1)[0]
    load += sum_by(only[items.group[alone]], items.nbytes[alone] * items.times[alone], len(load))
    orders, lengths, ranks = [alone], [items.times[alone]], [only[items.group[alone]]]
    for group, rows in _runs(items, count, np.nonzero(count[items.group] > 1)[0]):
        able = items.candidates[group]
        size = int(items.nbytes[rows[0]])
        given = level(load[able], size, int(items.times[rows].sum()))
        load[able] += given * size
        orders.append(rows)
        lengths.append(given[given > 0])
        ranks.append(able[given > 0])
    order = np.concatenate(orders)
    start = np.empty(len(order), np.int64)
    start[order] = pointers(items.times[order])[:-1]
    number = np.full((len(demands), len(sets.of_tile)), -1, np.int64)
    number[items.instance, items.tile] = np.arange(len(order))
    return Assignment(
        instance=items.instance,
        tile=items.tile,
        start=start,
        times=items.times,
        item=number,
        end=np.cumsum(np.concatenate(lengths)),
        rank=np.concatenate(ranks).astype(np.int32),
        load=load,
        bound=_bound(items, len(hosts)),
    )


def _items(sets: HolderSets, demands: Sequence[Demand], hosts: I64, times: I64) -> _Items:
    wanted = [np.nonzero(d.nbytes > 0)[0] for d in demands]
    instance = np.repeat(np.arange(len(demands)), [len(w) for w in wanted])
    tile = np.concatenate(wanted)
    nbytes = np.concatenate([d.nbytes[w] for d, w in zip(demands, wanted, strict=True)])
    host = np.concatenate([d.host[w] for d, w in zip(demands, wanted, strict=True)])
    spread = int(hosts.max(initial=0)) + 2
    kind, group = np.unique(sets.of_tile[tile] * spread + host + 1, return_inverse=True)
    candidates = tuple(_local(sets.ranks[k // spread], hosts, k % spread - 1) for k in kind.tolist())
    return _Items(instance, tile, nbytes, times[tile], group, candidates)


def _local(ranks: I64, hosts: I64, host: int) -> I64:
    if host < 0:
        return ranks
    near = ranks[hosts[ranks] == host]
    return near if len(near) else ranks


def _runs(items: _Items, count: I64, rows: I64) -> list[tuple[int, I64]]:
    """Return (group, rows) of equal items: fewest candidates first, then longest; rows in order."""
    if not len(rows):
        return []
    _, size = np.unique(-items.nbytes[rows], return_inverse=True)
    _, width = np.unique(count[items.group[rows]], return_inverse=True)
    group = items.group[rows]
    key = (width * (int(size.max()) + 1) + size) * len(count) + group
    order = np.argsort(key, kind="stable")
    first = np.nonzero(changes(key[order]))[0]
    return [(int(items.group[part[0]]), part) for part in np.split(rows[order], first[1:])]


def level(load: I64, size: int, count: int) -> I64:
    """Return i64[k]: how many of ``count`` items of ``size`` bytes each of k ranks gets.

    The same as giving each item in turn to the first of the least loaded, and adding it to that load, i64[k].
    """
    if len(load) <= _FEW:
        return np.array(_level_of_few(load.tolist(), size, count), np.int64)
    ordered = np.sort(load)
    below = np.cumsum(ordered)
    total = size * count
    # the first k are filled up to a common level before the next one is as low
    filled = int(np.searchsorted(ordered * np.arange(1, len(load) + 1) - below, total, side="right"))
    surface = (total + int(below[filled - 1])) // filled
    given = np.maximum(surface - load, 0) // size
    rest = count - int(given.sum())
    if rest:
        given[np.argsort(load + given * size, kind="stable")[:rest]] += 1
    return given


def _level_of_few(load: list[int], size: int, count: int) -> list[int]:
    """Do the same for a handful of ranks, without arrays."""
    filled, below = 0, 0
    for filled, low in enumerate(sorted(load), 1):
        if low * filled - below - low > size * count:
            filled -= 1  # noqa: PLW2901 (the number of ranks that the level reaches)
            break
        below += low
    surface = (size * count + below) // filled
    given = [max(surface - low, 0) // size for low in load]
    order = sorted(range(len(load)), key=lambda i: load[i] + given[i] * size)
    for i in order[: count - sum(given)]:
        given[i] += 1
    return given


def _bound(items: _Items, ranks: int) -> int:
    """Return a lower bound: some set of ranks has to send all that only its ranks hold."""
    groups = len(items.candidates)
    demand = sum_by(items.group, items.nbytes * items.times, groups)
    holds = np.zeros((groups, ranks), np.bool_)
    for g, candidates in enumerate(items.candidates):
        holds[g, candidates] = True
    size = holds.sum(axis=1)
    inside: I64 = demand
    if groups <= _MAX_SETS:
        inside = _within(holds).T @ demand
    bounds = -(-inside // np.maximum(size, 1))
    everyone = int(holds.any(axis=0).sum())
    total = -(-int(demand.sum()) // max(everyone, 1))
    return max(int(bounds.max(initial=0)), total)


def _within(holds: Bools) -> I64:
    """Return i64[G, G]: 1 where every rank of group i is one of group j, else 0."""
    words = np.packbits(holds, axis=1)
    apart = np.zeros((len(holds), len(holds)), np.bool_)
    for word in words.T:
        apart |= (word[:, None] & ~word[None, :]) != 0
    return (~apart).astype(np.int64)


def parts(sets: HolderSets, demands: Sequence[Demand], bound: int) -> I64:
    """Return i64[N]: into how many tiles to cut each one, so that no item is large beside the bound."""
    largest = np.max([d.nbytes for d in demands], axis=0)
    small = max(int((TOLERANCE - 1) * bound), MIN_PART)
    return np.clip(largest // small, 1, sets.size[sets.of_tile])
