"""Pieces: the common refinement of everybody's cuts, the unit of digests.

Each (tile, wire dtype) that a reader wants is cut by the boundaries of all readers' boxes inside it, and by
nothing else. Digests are additive, so a box made of several pieces has the sum of their digests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from syncline.layout.dtype import ITEMSIZE
from syncline.plan.columns import distinct, expand, pointers
from syncline.plan.grid import Grid

if TYPE_CHECKING:
    from syncline.plan.classes import Classes
    from syncline.plan.columns import I32, I64, U8, Bools, Ints
    from syncline.plan.cover import Tiles


@dataclass(frozen=True, slots=True)
class Pieces:
    """P pieces, sorted by tensor, then tile, then wire dtype, then place.

    Attributes:
        tensor: i32[P].
        offset, size: i64[P, D].
        dtype: u8[P], wire dtype.
        nbytes: i64[P], bytes in the wire dtype.
    """

    tensor: I32
    offset: I64
    size: I64
    dtype: U8
    nbytes: I64

    def __len__(self) -> int:
        return len(self.tensor)


@dataclass(frozen=True, slots=True)
class PieceGrid:
    """The pieces as a grid a (tile, wire dtype): numbers are computed, rows only on demand.

    Attributes:
        key: i64[G], tile * 256 + wire dtype, ascending.
        grid: coordinates are relative to the tile's corner.
        wanted: bool[cells], or None where every cell is wanted.
        cell: i64[P], the cell of each piece, or None where they are the same.
    """

    tiles: Tiles
    key: I64
    grid: Grid
    wanted: Bools | None
    cell: I64 | None

    @classmethod
    def of(cls, tiles: Tiles, tile: Ints, dtype: U8, low: I64, high: I64) -> PieceGrid:
        """Cut the wanted tiles by the wanted boxes: tile [N], wire dtype u8[N], low and high i64[N, D]."""
        wanted_key = _key(tile, dtype)
        key = distinct(wanted_key)
        extents = tiles.size[key >> 8]
        corner = tiles.offset.take(tile, axis=0)
        part = np.nonzero(((high - low) < tiles.size.take(tile, axis=0)).any(axis=1))[0]
        group = np.searchsorted(key, wanted_key)
        whole = (np.arange(len(key)), np.zeros_like(extents), extents)
        smaller = (group[part], low[part] - corner[part], high[part] - corner[part])
        grid = Grid.of(extents, [whole, smaller])
        made = cls(tiles, key, grid, None, None)
        wanted = np.zeros(grid.total, np.bool_)
        wanted[grid.cells(group, low - corner, high - corner)[1]] = True
        if wanted.all():
            return made
        return cls(tiles, key, grid, wanted, np.nonzero(wanted)[0])

    def __len__(self) -> int:
        return self.grid.total if self.cell is None else len(self.cell)

    def of_boxes(self, tile: Ints, dtype: U8, low: I64, high: I64) -> tuple[I64, I32]:
        """Return (piece_ptr i64[N + 1], piece i32): the pieces of boxes i64[N, D] within their tiles."""
        box, cell = self._cells(tile, dtype, low, high)
        return pointers(np.bincount(box, minlength=len(tile))), self._number(cell)

    def of_tiles(self, tile: Ints) -> tuple[I64, I32]:
        """Return (row, piece i32) of all pieces of the tiles, row by row."""
        first = np.searchsorted(self.key, tile.astype(np.int64) << 8)
        last = np.searchsorted(self.key, (tile.astype(np.int64) + 1) << 8)
        start, stop = self.grid.cell_ptr[first], self.grid.cell_ptr[last]
        row, place = expand(stop - start)
        cell = start[row] + place
        if self.wanted is not None:
            kept = self.wanted[cell]
            row, cell = row[kept], cell[kept]
        return row, self._number(cell)

    def counted(self, cell: I64) -> I64:
        """Return i64: how many pieces lie before each cell."""
        return cell if self.cell is None else np.searchsorted(self.cell, cell)

    def rows(self, piece: Ints) -> Pieces:
        """Return pieces by number."""
        number = piece.astype(np.int64, copy=False)
        group, low, high = self.grid.boxes(number if self.cell is None else self.cell[number])
        tile, dtype = self.key[group] >> 8, (self.key[group] & 255).astype(np.uint8)
        size = high - low
        nbytes = np.prod(size, axis=1) * ITEMSIZE[dtype]
        return Pieces(self.tiles.tensor[tile], low + self.tiles.offset[tile], size, dtype, nbytes)

    def _number(self, cell: I64) -> I32:
        number = cell if self.cell is None else np.searchsorted(self.cell, cell)
        return number.astype(np.int32)

    def _cells(self, tile: Ints, dtype: U8, low: I64, high: I64) -> tuple[I64, I64]:
        group = np.searchsorted(self.key, _key(tile, dtype))
        corner = self.tiles.offset[tile]
        return self.grid.cells(group, low - corner, high - corner)


@dataclass(frozen=True, slots=True)
class Numbering:
    """The pieces of all tensors by number: those of a tensor are those of its class, from its own number on.

    Attributes:
        grid: the pieces of the classes' first tensors, numbered by class.
        classes: of the tensors.
        start: i64[C + 1], the first piece of each class in ``grid``.
        base: i64[T + 1], the number of each tensor's first piece.
    """

    grid: PieceGrid
    classes: Classes
    start: I64
    base: I64

    @classmethod
    def of(cls, grid: PieceGrid, classes: Classes) -> Numbering:
        """Return the numbers of the pieces of all tensors, by tensor."""
        tile = grid.tiles.tensor[grid.key >> 8]
        edges = np.searchsorted(tile, np.arange(len(classes.first) + 1))
        start = grid.counted(grid.grid.cell_ptr[edges])
        return cls(grid, classes, start, pointers(np.diff(start)[classes.of]))

    def __len__(self) -> int:
        return int(self.base[-1])

    def numbers(self, tensor: Ints, piece: Ints) -> I32:
        """Return i32: the number of a class's piece in the tensor ``tensor`` of it."""
        return (piece + (self.base[tensor] - self.start[self.classes.of[tensor]])).astype(np.int32)

    def rows(self, piece: I64) -> Pieces:
        """Return pieces by number."""
        tensor = np.searchsorted(self.base, piece, side="right") - 1
        of_class = piece - self.base[tensor] + self.start[self.classes.of[tensor]]
        found = self.grid.rows(of_class)
        return replace(found, tensor=tensor.astype(np.int32))


def _key(tile: Ints, dtype: U8) -> I64:
    return (tile.astype(np.int64) << 8) + dtype
