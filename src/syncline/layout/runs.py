"""Compression of what a probe read: arrays of element numbers become nested maps, level by level."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from syncline.layout.lattice import Map

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


def compress(a: Ints, b: Ints, group: Ints) -> list[tuple[int, Map]]:
    """Return (group, map) of pairs, few where they progress evenly.

    Args:
        a: i64[N], ascending.
        b: i64[N].
        group: i64[N]; no map spans two groups.
    """
    shape = np.zeros(len(a), np.int64)
    axes: list[tuple[tuple[int, int, int], ...]] = [()]
    while len(a) > 1:
        starts, counts = _greedy(_links(a, b, group, shape))
        if len(starts) == len(a):
            break
        more = np.minimum(starts + 1, len(a) - 1)
        steps = np.stack([counts, a[more] - a[starts], b[more] - b[starts]], axis=1)
        steps[counts == 1, 1:] = 0
        keys = np.concatenate([shape[starts, None], steps], axis=1)
        kinds, shape = np.unique(keys, axis=0, return_inverse=True)
        shape = shape.reshape(-1).astype(np.int64)
        axes = [
            axes[old] if n == 1 else ((int(n), int(x), int(y)), *axes[old]) for old, n, x, y in kinds.tolist()
        ]
        a, b, group = a[starts], b[starts], group[starts]
    rows = zip(group.tolist(), a.tolist(), b.tolist(), shape.tolist(), strict=True)
    return [(g, Map.of(x, y, axes[s])) for g, x, y, s in rows]


def _links(a: Ints, b: Ints, group: Ints, shape: Ints) -> Ints:
    """Return i64[N-1]: equal numbers where neighbours follow by equal steps; -1 where they cannot."""
    step_a, step_b = np.diff(a), np.diff(b)
    broken = (group[1:] != group[:-1]) | (shape[1:] != shape[:-1]) | (step_b < 0)
    change = np.ones(len(step_a), bool)
    change[1:] = (step_a[1:] != step_a[:-1]) | (step_b[1:] != step_b[:-1]) | (broken[1:] != broken[:-1])
    keys = np.cumsum(change)
    keys[broken] = -1
    return keys


def _greedy(links: Ints) -> tuple[Ints, Ints]:
    """Return (first element, count) of runs: as long as links stay equal; the link behind a run is spent."""
    edges = np.flatnonzero(np.append(True, links[1:] != links[:-1])) if len(links) else np.zeros(0, np.int64)
    ends = np.append(edges[1:], len(links))
    starts: list[int] = []
    counts: list[int] = []
    at = 0
    for low, high, key in zip(edges.tolist(), ends.tolist(), links[edges].tolist(), strict=True):
        if key == -1:
            starts += range(at, high)
            counts += [1] * (high - at)
            at = high
        elif at == low or high > at:
            starts.append(at)
            counts.append(high - at + 1)
            at = high + 1
    starts += range(at, len(links) + 1)
    counts += [1] * (len(links) + 1 - at)
    return np.array(starts, np.int64), np.array(counts, np.int64)
