"""Balance: one sender for every (tile, instance), so that the busiest sender has little to send.

Tiles are aggregated by the set of ranks that hold them. The most constrained go first, among those the
longest, each to the least loaded holder: for equal tiles of one set this is a water level, computed at once.
Where a few large tiles leave the senders unequal, they are cut into parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from syncline.plan.columns import changes, group_sets, pointers, sum_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncline.plan.columns import I32, I64, Bools
    from syncline.plan.cover import Tiles

#: A plan whose busiest sender is within this factor of the bound is balanced.
TOLERANCE = 1.02
#: Tiles are not cut into parts of fewer bytes than this.
MIN_PART = 1 << 20
#: Sets are compared with each other for the bound up to this many.
_MAX_SETS = 1024


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
        ranks = tuple(
            np.nonzero(np.isin(writer_of, manifest[ptr[t] : ptr[t + 1]]))[0] for t in sample.tolist()
        )
        return cls(of_tile, ranks, np.array([len(r) for r in ranks], np.int64))


@dataclass(frozen=True, slots=True)
class Demand:
    """What one instance wants of every tile.

    Attributes:
        nbytes: i64[N], wire bytes, over all its ranks.
        host: i64[N], number of the host whose holders should send, -1 where any holder may.
    """

    nbytes: I64
    host: I64


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who sends what.

    Attributes:
        sender: i32[I, N], writer rank; -1 where the instance wants nothing of the tile.
        load: i64[ranks], bytes each writer rank sends.
        bound: bytes; no assignment of these tiles, however cut, has a busiest sender below it.
    """

    sender: I32
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


@dataclass(frozen=True, slots=True)
class _Items:
    """One row for each (instance, tile) with something to send; ``group`` says which ranks may."""

    instance: I64
    tile: I64
    nbytes: I64
    group: I64
    candidates: tuple[I64, ...]


def assign(sets: HolderSets, demands: Sequence[Demand], hosts: I64) -> Assignment:
    """Choose the senders.

    Args:
        sets: holders of the tiles.
        demands: one an instance, in the order of the instances' names.
        hosts: i64[ranks], number of each writer rank's host.
    """
    items = _items(sets, demands, hosts)
    chosen = np.zeros(len(items.tile), np.int64)
    load = np.zeros(len(hosts), np.int64)
    count = np.array([len(c) for c in items.candidates], np.int64)
    alone = count[items.group] == 1
    if alone.any():
        only = np.array([int(c[0]) for c in items.candidates], np.int64)
        chosen[alone] = only[items.group[alone]]
        load += sum_by(chosen[alone], items.nbytes[alone], len(load))
    for group, rows in _runs(items, count, np.nonzero(~alone)[0]):
        ranks = items.candidates[group]
        size = int(items.nbytes[rows[0]])
        dealt = deal(load[ranks], size, len(rows))
        chosen[rows] = ranks[dealt]
        load[ranks] += np.bincount(dealt, minlength=len(ranks)) * size
    sender = np.full((len(demands), len(sets.of_tile)), -1, np.int32)
    sender[items.instance, items.tile] = chosen
    return Assignment(sender, load, _bound(items, len(hosts)))


def _items(sets: HolderSets, demands: Sequence[Demand], hosts: I64) -> _Items:
    wanted = [np.nonzero(d.nbytes > 0)[0] for d in demands]
    instance = np.repeat(np.arange(len(demands)), [len(w) for w in wanted])
    tile = np.concatenate(wanted)
    nbytes = np.concatenate([d.nbytes[w] for d, w in zip(demands, wanted, strict=True)])
    host = np.concatenate([d.host[w] for d, w in zip(demands, wanted, strict=True)])
    spread = int(hosts.max(initial=0)) + 2
    kind, group = np.unique(sets.of_tile[tile] * spread + host + 1, return_inverse=True)
    candidates = tuple(_local(sets.ranks[k // spread], hosts, k % spread - 1) for k in kind.tolist())
    return _Items(instance, tile, nbytes, group, candidates)


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


def deal(load: I64, size: int, count: int) -> I64:
    """Return i64[count]: for ``count`` items of ``size`` bytes in turn, the place of the least loaded.

    The same as giving each item to the first of the least loaded and adding it to that load, i64[k].
    """
    if count == 1:
        return np.array([int(np.argmin(load))])
    low, high = int(load.min()), int(load.min()) + size * count
    while low < high:  # the highest level below which at most ``count`` items start
        level = (low + high + 1) // 2
        if int(_started(load, size, level).sum()) <= count:
            low = level
        else:
            high = level - 1
    given = _started(load, size, low)
    at_level = np.nonzero((load <= low) & ((low - load) % size == 0))[0]
    given[at_level[: count - int(given.sum())]] += 1
    place = np.repeat(np.arange(len(load)), given)
    turn = np.arange(len(place)) - np.repeat(np.cumsum(given) - given, given)
    return place[np.lexsort((place, load[place] + turn * size))]


def _started(load: I64, size: int, level: int) -> I64:
    return np.maximum(level - load + size - 1, 0) // size


def _bound(items: _Items, ranks: int) -> int:
    """Return a lower bound: some set of ranks has to send all that only its ranks hold."""
    groups = len(items.candidates)
    demand = sum_by(items.group, items.nbytes, groups)
    holds = np.zeros((groups, ranks), np.bool_)
    for g, candidates in enumerate(items.candidates):
        holds[g, candidates] = True
    size = holds.sum(axis=1)
    inside: I64 = demand
    if groups <= _MAX_SETS:
        within: Bools = (holds.astype(np.float32) @ (~holds).T.astype(np.float32)) == 0
        inside = within.T.astype(np.int64) @ demand
    bounds = -(-inside // np.maximum(size, 1))
    everyone = int(holds.any(axis=0).sum())
    total = -(-int(demand.sum()) // max(everyone, 1))
    return max(int(bounds.max(initial=0)), total)


def parts(sets: HolderSets, demands: Sequence[Demand], bound: int) -> I64:
    """Return i64[N]: into how many tiles to cut each one, so that no item is large beside the bound."""
    largest = np.max([d.nbytes for d in demands], axis=0)
    small = max(int((TOLERANCE - 1) * bound), MIN_PART)
    return np.clip(largest // small, 1, sets.size[sets.of_tile])
