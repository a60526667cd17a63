"""Grids: boxes cut by the boundaries of others, cell by cell, one grid a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from syncline.plan.columns import Line, distinct, expand, pointers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncline.plan.columns import I64, Ints


@dataclass(frozen=True, slots=True)
class Grid:
    """For each group, the cells between the cuts of every dimension, numbered row-major, group after group.

    Attributes:
        line: places of (group, coordinate).
        cuts: one i64[C] a dimension: places of the cuts, ascending.
        first: i64[D, G + 1]: index in ``cuts[d]`` of each group's first cut.
        cell_ptr: i64[G + 1]: number of each group's first cell.
    """

    line: tuple[Line, ...]
    cuts: tuple[I64, ...]
    first: I64
    cell_ptr: I64

    @classmethod
    def of(cls, extents: I64, boxes: Iterable[tuple[Ints, I64, I64]]) -> Grid:
        """Cut groups by boxes.

        Args:
            extents: i64[G, D], bounds of the coordinates; not cuts themselves.
            boxes: chunks of (group [N], low i64[N, D], high i64[N, D]).
        """
        groups, dims = extents.shape
        line = tuple(Line.of(extents[:, d]) for d in range(dims))
        found: list[list[I64]] = [[] for _ in range(dims)]
        for group, low, high in boxes:
            for d in range(dims):
                for edge in (low, high):
                    found[d].append(distinct(line[d].at(group, edge[:, d])))
        cuts = tuple(_union(places) for places in found)
        first = np.zeros((dims, groups + 1), np.int64)
        for d in range(dims):
            first[d, :groups] = np.searchsorted(cuts[d], line[d].start)
            first[d, groups] = len(cuts[d])
        cells = np.prod(np.maximum(np.diff(first, axis=1) - 1, 0), axis=0)
        return cls(line, cuts, first, pointers(cells))

    @property
    def total(self) -> int:
        """Number of cells."""
        return int(self.cell_ptr[-1])

    def cells(self, group: Ints, low: I64, high: I64) -> tuple[I64, I64]:
        """Return (box, cell): the cells whose union is each box, in order. Boxes must end at cuts."""
        starts: list[I64] = []
        counts: list[I64] = []
        for d, line in enumerate(self.line):
            a = np.searchsorted(self.cuts[d], line.at(group, low[:, d]))
            b = np.searchsorted(self.cuts[d], line.at(group, high[:, d]))
            starts.append(a - self.first[d][group])
            counts.append(b - a)
        total = np.prod(counts, axis=0) if counts else np.zeros(0, np.int64)
        wide = self._widths(group)
        if len(total) and bool((total == 1).all()):
            return np.arange(len(total)), self.cell_ptr[group] + _ravel(starts, wide)
        box, place = expand(total)
        digits: list[I64] = []
        for d in range(len(starts) - 1, -1, -1):
            count = counts[d][box]
            digits.append(starts[d][box] + place % count)
            place //= count
        return box, self.cell_ptr[group][box] + _ravel(digits[::-1], [w[box] for w in wide])

    def boxes(self, cell: I64) -> tuple[I64, I64, I64]:
        """Return (group, low, high) of cells by number."""
        group = np.searchsorted(self.cell_ptr, cell, side="right") - 1
        place = cell - self.cell_ptr[group]
        low = np.empty((len(cell), len(self.line)), np.int64)
        high = np.empty_like(low)
        wide = self._widths(group)
        for d in range(len(self.line) - 1, -1, -1):
            at = self.first[d][group] + place % wide[d]
            place = place // wide[d]
            start = self.line[d].start[group]
            low[:, d], high[:, d] = self.cuts[d][at] - start, self.cuts[d][at + 1] - start
        return group, low, high

    def _widths(self, group: Ints) -> list[I64]:
        return [np.diff(first)[group] - 1 for first in self.first]


def _union(places: Sequence[I64]) -> I64:
    return distinct(np.concatenate(places)) if places else np.zeros(0, np.int64)


def _ravel(digits: Sequence[I64], wide: Sequence[I64]) -> I64:
    number = np.zeros_like(digits[0])
    for digit, width in zip(digits, wide, strict=True):
        number = number * width + digit
    return number
