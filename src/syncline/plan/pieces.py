"""Pieces: the common refinement of everybody's cuts, the unit of digests.

Each (tile, wire dtype) that a reader wants is cut by the boundaries of all readers' boxes inside it, and by
nothing else. Digests are additive, so a box made of several pieces has the sum of their digests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from syncline.layout.dtype import ITEMSIZE
from syncline.plan.columns import distinct, expand, pointers
from syncline.plan.grid import Grid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from syncline.plan.columns import I32, I64, U8, Bools, Ints
    from syncline.plan.cover import Tiles

    # Yields (tile [N], wire dtype u8[N], low i64[N, D], high i64[N, D]), a chunk a reader manifest.
    Wanted = Callable[[], Iterator[tuple[Ints, U8, I64, I64]]]


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
    def of(cls, tiles: Tiles, chunks: Wanted) -> PieceGrid:
        """Cut the wanted tiles by the wanted boxes."""
        keys = [distinct(_key(tile, dtype)) for tile, dtype, _, _ in chunks()]
        key = distinct(np.concatenate(keys)) if keys else np.zeros(0, np.int64)
        group_tile = key >> 8
        extents = tiles.size[group_tile]
        everything = (np.arange(len(key)), np.zeros_like(extents), extents)
        grid = Grid.of(extents, _cuts(tiles, key, everything, chunks))
        made = cls(tiles, key, grid, None, None)
        wanted = np.zeros(grid.total, np.bool_)
        for tile, dtype, low, high in chunks():
            wanted[made._cells(tile, dtype, low, high)[1]] = True
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

    def rows(self, piece: Ints | None = None) -> Pieces:
        """Return pieces by number, all of them if left out."""
        number = np.arange(len(self)) if piece is None else piece.astype(np.int64, copy=False)
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


def _key(tile: Ints, dtype: U8) -> I64:
    return (tile.astype(np.int64) << 8) + dtype


def _cuts(
    tiles: Tiles, key: I64, everything: tuple[I64, I64, I64], chunks: Wanted
) -> Iterator[tuple[I64, I64, I64]]:
    """Yield boxes whose boundaries are the cuts: the tiles, and wanted boxes smaller than their tile."""
    yield everything
    for tile, dtype, low, high in chunks():
        corner = tiles.offset[tile]
        part = ((high - low) < tiles.size[tile]).any(axis=1)
        group = np.searchsorted(key, _key(tile[part], dtype[part]))
        yield group, low[part] - corner[part], high[part] - corner[part]
