"""Column helpers: ragged expansion, exact sums by key, joins and overlaps of boxes; no loops over rows.

Boxes come as two arrays i64[N, D], offset and size, grouped by an integer key (a tensor, a tile, a storage).
One dimension of all groups is laid on one number line, group after group (`Line`), so that one binary search
serves every group at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from syncline.errors import LayoutError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]
    I32 = NDArray[np.int32]
    U8 = NDArray[np.uint8]
    Bools = NDArray[np.bool_]
    Ints = NDArray[np.integer[Any]]

#: Coordinates on a `Line` stay below this, so that sums of two of them do not wrap.
_LINE_LIMIT = 1 << 62


def expand(counts: Ints) -> tuple[I64, I64]:
    """Return (row, place) of a ragged table: row i appears ``counts[i]`` times, with places 0, 1, ... ."""
    counts = counts.astype(np.int64, copy=False)
    row = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return row, np.arange(len(row)) - np.repeat(starts, counts)


def pointers(counts: Ints) -> I64:
    """Return i64[N + 1]: where each row of a ragged table starts, and its end."""
    ptr = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ptr[1:])
    return ptr


def sum_by(key: Ints, values: Ints, n: int) -> I64:
    """Return i64[n]: the exact sum of the values of each key."""
    out = np.zeros(n, np.int64)
    np.add.at(out, key, values)
    return out


def row_major(shape: I64) -> I64:
    """Return i64[N, D]: row-major strides, in elements, of shapes i64[N, D]."""
    stride = np.ones_like(shape)
    for d in range(shape.shape[1] - 2, -1, -1):
        stride[:, d] = stride[:, d + 1] * shape[:, d + 1]
    return stride


def changes(*columns: NDArray[Any]) -> Bools:
    """Return bool[N]: where a row differs from the one before it in any column; the first row does."""
    n = len(columns[0])
    new = np.zeros(n, np.bool_)
    new[:1] = True
    for column in columns:
        differs = column[1:] != column[:-1]
        new[1:] |= differs.any(axis=1) if differs.ndim > 1 else differs
    return new


def distinct(values: Ints) -> I64:
    """Return the sorted distinct values. By sorting: `numpy.unique` hashes, at fifty times the cost."""
    ordered = np.sort(values.astype(np.int64, copy=False))
    return ordered[changes(ordered)]


def lex_order(*keys: NDArray[Any]) -> I64:
    """Return the stable order by the given keys, the first one leading; a 2-d key counts column by column."""
    flat: list[NDArray[Any]] = []
    for key in keys:
        flat += [key[:, d] for d in range(key.shape[1])] if key.ndim > 1 else [key]
    return np.lexsort(flat[::-1])


@dataclass(frozen=True, slots=True)
class Line:
    """The coordinates 0..extent of every group, on one number line.

    Attributes:
        start: i64[G], place of each group's coordinate 0. Neighbouring groups do not touch.
    """

    start: I64

    @classmethod
    def of(cls, extents: I64) -> Line:
        """Return the line of groups with coordinates 0..extents[g], both included.

        Raises:
            LayoutError: the extents add up to more than 2**62.
        """
        total = float(extents.sum(dtype=np.float64)) + 2.0 * len(extents)
        if total >= _LINE_LIMIT:
            raise LayoutError(
                "tensor shapes too large to plan", expected="extents summing below 2**62", found=total
            )
        return cls(np.cumsum(extents + 2) - (extents + 2))

    def at(self, group: Ints, coordinate: I64) -> I64:
        """Return the place of each (group, coordinate)."""
        return self.start[group] + coordinate


@dataclass(frozen=True, slots=True)
class BoxIndex:
    """Boxes i64[N, D] grouped by key, ready to be joined with others of the same groups.

    In each group the boxes are ordered along the dimension in which they are cut most, so that a query meets
    few boxes that it does not overlap.
    """

    offset: I64
    end: I64
    dim: I64
    order: I64
    line: Line
    starts: I64
    reach: I64

    @classmethod
    def of(cls, group: Ints, offset: I64, size: I64, extents: I64) -> BoxIndex:
        """Index boxes by group; ``extents`` i64[G, D] bounds every coordinate, of queries too."""
        end = offset + size
        dim = _most_cut(group, offset, len(extents))
        rows = np.arange(len(group))
        line = Line.of(extents.max(axis=1) if len(extents) else np.zeros(0, np.int64))
        start = line.at(group, offset[rows, dim[group]])
        order = np.argsort(start, kind="stable")
        stop = line.at(group, end[rows, dim[group]])[order]
        reach = np.maximum.accumulate(stop) if len(stop) else stop
        return cls(offset, end, dim, order, line, start[order], reach)

    def join(self, group: Ints, offset: I64, size: I64) -> tuple[I64, I64]:
        """Return (query, box): every pair that has an element in common, by query, then by box number."""
        end = offset + size
        rows, dim = np.arange(len(group)), self.dim[group]
        low = np.searchsorted(self.reach, self.line.at(group, offset[rows, dim]), side="right")
        high = np.searchsorted(self.starts, self.line.at(group, end[rows, dim]), side="left")
        query, place = expand(np.maximum(high - low, 0))
        box = self.order[low[query] + place]
        meets = np.ones(len(query), np.bool_)
        for d in range(offset.shape[1]):
            meets &= self.offset[box, d] < end[query, d]
            meets &= offset[query, d] < self.end[box, d]
        if not meets.all():
            query, box = query[meets], box[meets]
        if len(query) > 1 and bool(((query[1:] == query[:-1]) & (box[1:] < box[:-1])).any()):
            order = np.lexsort((box, query))
            query, box = query[order], box[order]
        return query, box


def _most_cut(group: Ints, offset: I64, groups: int) -> I64:
    """Return i64[groups]: the dimension in which each group's boxes have the most different offsets."""
    best, most = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    shared = np.bincount(group, minlength=groups)[group] > 1
    g = group[shared]
    for d in range(offset.shape[1]):
        c = offset[shared, d]
        order = np.lexsort((c, g))
        distinct = np.bincount(g[order][changes(g[order], c[order])], minlength=groups)
        best[distinct > most] = d
        most = np.maximum(most, distinct)
    return best


def overlaps(group: Ints, offset: I64, size: I64) -> tuple[I64, I64]:
    """Return (i, j), i < j: every pair of boxes of one group with an element in common, in order.

    Args:
        group: [N] keys 0..G-1, in any order.
        offset: i64[N, D], not negative.
        size: i64[N, D], positive.
    """
    groups = int(group.max()) + 1 if len(group) else 0
    kept = np.nonzero(np.bincount(group, minlength=groups)[group] > 1)[0]
    if not len(kept):
        return kept, kept
    g, o, n = group[kept], offset[kept], size[kept]
    extents = np.zeros((groups, o.shape[1]), np.int64)
    np.maximum.at(extents, g, o + n)
    first, second = BoxIndex.of(g, o, n, extents).join(g, o, n)
    ahead = first < second
    return kept[first[ahead]], kept[second[ahead]]


def group_sets(ptr: I64, values: Ints) -> tuple[I64, I64]:
    """Group the rows of a ragged table that hold the same values in the same order.

    Args:
        ptr: i64[N + 1].
        values: [ptr[-1]], not negative.

    Returns:
        (group i64[N], representative row of each group i64[G]); groups by number of values, then by values.
    """
    counts = np.diff(ptr)
    group = np.zeros(len(counts), np.int64)
    kinds = int(values.max(initial=0)) + 1
    total = 0
    for n in np.unique(counts).tolist():
        rows = np.nonzero(counts == n)[0]
        number = np.zeros(len(rows), np.int64)
        for k in range(n):
            _, number = np.unique(number * kinds + values[ptr[rows] + k], return_inverse=True)
        group[rows] = total + number
        total += int(number.max()) + 1
    order = np.argsort(group, kind="stable")
    return group, order[changes(group[order])]
