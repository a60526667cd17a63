"""Coverage: disjoint source tiles with their holders, and for every reader which tiles feed which segment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from syncline.errors import CoverageError
from syncline.layout.box import Box
from syncline.layout.dtype import ITEMSIZE
from syncline.plan.columns import BoxIndex, changes, expand, lex_order, overlaps, pointers, sum_by
from syncline.plan.grid import Grid

if TYPE_CHECKING:
    from syncline.layout import Layout
    from syncline.plan.classes import Classes
    from syncline.plan.columns import I32, I64, U8, Ints
    from syncline.plan.joint import Held, Joint
    from syncline.plan.match import Matched

_DENSE = 1 << 18


@dataclass(frozen=True, slots=True)
class Sources:
    """All that writers hold of the classes' first tensors, in one table.

    Attributes:
        tensor: i32[M], the class; ascending.
        manifest: i32[M], whose segment it is, ascending within a class.
        dtype: u8[M]; offset, size: i64[M, D].
        local: i64[M], number of the row within its tensor: row ``first[t] + local`` of `Held` is like it.
    """

    tensor: I32
    manifest: I32
    dtype: U8
    offset: I64
    size: I64
    local: I64

    @classmethod
    def of(cls, held: Held, classes: Classes) -> Sources:
        """Take the rows of the classes' first tensors."""
        number, local = expand(np.diff(held.first)[classes.first])
        row = held.first[classes.first[number]] + local
        boxes = held.offset.take(row, axis=0), held.size.take(row, axis=0)
        return cls(number.astype(np.int32), held.manifest[row], held.dtype[row], *boxes, local)


@dataclass(frozen=True, eq=False)
class Tiles:
    """Disjoint boxes, each with everybody who holds it, sorted by tensor, then by offset.

    Attributes:
        tensor: i32[N].
        offset, size: i64[N, D].
        holder_ptr: i64[N + 1]; tile i is held by ``holder_ptr[i]:holder_ptr[i + 1]``.
        holder: i64[E], row of `Sources` that contains the tile, sorted by manifest within a tile.
        holder_manifest: i32[E], the manifest of that row.
    """

    tensor: I32
    offset: I64
    size: I64
    holder_ptr: I64
    holder: I64
    holder_manifest: I32

    def __len__(self) -> int:
        return len(self.tensor)

    def find(self, tile: Ints, manifest: Ints) -> I64:
        """Return i64: the `Sources` row by which each manifest holds each tile (the first of several)."""
        wanted = tile.astype(np.int64) * self._manifests + manifest
        if self._dense is not None:
            return self._dense[wanted]
        return self.holder[np.searchsorted(self._holder_keys, wanted)]

    @cached_property
    def _manifests(self) -> int:
        return int(self.holder_manifest.max(initial=0)) + 1

    @cached_property
    def _dense(self) -> I64 | None:
        """i64[N * manifests]: the row by which a manifest holds a tile, if that is a small table."""
        if len(self) * self._manifests > _DENSE:
            return None
        found = np.zeros(len(self) * self._manifests, np.int64)
        found[self._holder_keys[::-1]] = self.holder[::-1]
        return found

    @cached_property
    def _holder_keys(self) -> I64:
        tile = np.repeat(np.arange(len(self)), np.diff(self.holder_ptr))
        return tile * self._manifests + self.holder_manifest

    def held_by(self, manifest: int) -> tuple[I64, I64]:
        """Return (tile, row of `Sources`) of everything a manifest holds."""
        at = np.nonzero(self.holder_manifest == manifest)[0]
        return np.searchsorted(self.holder_ptr, at, side="right") - 1, self.holder[at]

    def split(self, parts: I64) -> Tiles:
        """Cut each tile into ``parts`` i64[N] nearly equal ones along its first long enough dimension."""
        rows = np.arange(len(self))
        enough = self.size >= parts[:, None]
        dim = np.where(enough.any(axis=1), np.argmax(enough, axis=1), np.argmax(self.size, axis=1))
        length = self.size[rows, dim]
        tile, place = expand(np.minimum(parts, length))
        count, at, d = np.minimum(parts, length)[tile], length[tile], dim[tile]
        low, high = at * place // count, at * (place + 1) // count
        offset, size = self.offset[tile], self.size[tile]
        new = np.arange(len(tile))
        offset[new, d] += low
        size[new, d] = high - low
        order = lex_order(self.tensor[tile], offset)
        holders, at_holder = expand(np.diff(self.holder_ptr)[tile[order]])
        taken = self.holder_ptr[tile[order]][holders] + at_holder
        return Tiles(
            self.tensor[tile[order]],
            offset[order],
            size[order],
            pointers(np.diff(self.holder_ptr)[tile[order]]),
            self.holder[taken],
            self.holder_manifest[taken],
        )


def source_tiles(matched: Matched, sources: Sources, writer: Layout, classes: Classes) -> Tiles:
    """Return the writers' boxes as disjoint tiles.

    Boxes of one tensor must be the same (replicas) or disjoint. Replicas that lie in memory in different ways
    are cut where either of them is.

    Raises:
        CoverageError: two different boxes of one tensor overlap.
    """
    order = lex_order(sources.tensor, sources.offset, sources.size, sources.manifest)
    first = np.nonzero(changes(sources.tensor[order], sources.offset[order], sources.size[order]))[0]
    tiles = Tiles(
        tensor=sources.tensor[order][first],
        offset=sources.offset[order][first],
        size=sources.size[order][first],
        holder_ptr=np.append(first, len(order)),
        holder=order,
        holder_manifest=sources.manifest[order],
    )
    one, other = overlaps(tiles.tensor, tiles.offset, tiles.size)
    if all(t.whole for t in matched.writers):
        if len(one):
            raise _overlap(matched, writer, tiles, int(one[0]), int(other[0]))
        return tiles
    _check_shards(matched, writer, classes)
    return _refine(tiles, sources, one, other, matched.global_shape) if len(one) else tiles


def _check_shards(matched: Matched, writer: Layout, classes: Classes) -> None:
    """Check the boxes of whole shards: segments of nested views are smaller."""
    rows: dict[str, list[Any]] = {"tensor": [], "offset": [], "size": []}
    depth = matched.global_shape.shape[1]
    owner = dict(zip(matched.writer_of.tolist(), writer.manifests, strict=True))
    for m, table in enumerate(map(classes.reduce, matched.writers)):
        shard, at = np.unique(table.shards(np.arange(len(table))), return_index=True)
        manifest = owner[m]
        pad = ((0, 0), (0, depth - manifest.box_offset.shape[1]))
        rows["tensor"].append(table.tensor[at])
        rows["offset"].append(np.pad(manifest.box_offset[shard], pad))
        rows["size"].append(np.pad(manifest.box_size[shard], pad, constant_values=1))
    tensor, offset, size = (np.concatenate(parts) for parts in rows.values())
    order = lex_order(tensor, offset, size)
    kept = order[changes(tensor[order], offset[order], size[order])]
    number = np.repeat(np.arange(len(matched.writers), dtype=np.int32), [len(p) for p in rows["tensor"]])
    boxes = Tiles(
        tensor[kept].astype(np.int32),
        offset[kept],
        size[kept],
        np.arange(len(kept) + 1),
        kept,
        number[kept],
    )
    one, other = overlaps(boxes.tensor, boxes.offset, boxes.size)
    if len(one):
        raise _overlap(matched, writer, boxes, int(one[0]), int(other[0]))


def _refine(tiles: Tiles, sources: Sources, one: I64, other: I64, shape: I64) -> Tiles:
    """Cut the tiles of tensors with overlaps by each other's boundaries."""
    affected = np.zeros(len(shape), np.bool_)
    affected[tiles.tensor[one]] = affected[tiles.tensor[other]] = True
    group = np.cumsum(affected) - 1
    cut = np.nonzero(affected[sources.tensor])[0]
    g, low = group[sources.tensor[cut]], sources.offset[cut]
    high = low + sources.size[cut]
    grid = Grid.of(shape[affected], [(g, low, high)])
    row, cell = grid.cells(g, low, high)
    order = np.lexsort((cut[row], cell))
    row, cell = row[order], cell[order]
    first = np.nonzero(changes(cell))[0]
    cell_group, cell_low, cell_high = grid.boxes(cell[first])
    kept = np.nonzero(~affected[tiles.tensor])[0]
    holders, place = expand(np.diff(tiles.holder_ptr)[kept])
    counts = np.concatenate([np.diff(tiles.holder_ptr)[kept], np.diff(np.append(first, len(cell)))])
    holder = np.concatenate([tiles.holder[tiles.holder_ptr[kept][holders] + place], cut[row]])
    tensor = np.concatenate([tiles.tensor[kept], np.nonzero(affected)[0][cell_group]]).astype(np.int32)
    offset = np.concatenate([tiles.offset[kept], cell_low])
    size = np.concatenate([tiles.size[kept], cell_high - cell_low])
    order = lex_order(tensor, offset)
    ptr = pointers(counts)
    at, place = expand(counts[order])
    holder = holder[ptr[order][at] + place]
    return Tiles(
        tensor[order], offset[order], size[order], pointers(counts[order]), holder, sources.manifest[holder]
    )


def _overlap(matched: Matched, writer: Layout, tiles: Tiles, i: int, j: int) -> CoverageError:
    tensor = int(tiles.tensor[i])
    first, second = (_box(matched, tensor, tiles.offset[k], tiles.size[k]) for k in (i, j))
    common = first.intersect(second)
    holders = [_ranks(matched, writer, int(tiles.holder_manifest[tiles.holder_ptr[k]])) for k in (i, j)]
    return CoverageError(
        "two writers hold different boxes that overlap",
        tensor=matched.names[tensor],
        rank=f"writer {holders[0]} and writer {holders[1]}",
        expected="boxes of one tensor that are the same (replicas) or disjoint",
        found=f"{span(first)} and {span(second)}, both with {span(common or first)}",
    )


def _ranks(matched: Matched, writer: Layout, manifest: int) -> int:
    ranks = range(len(writer.manifests))
    return next(r for r in ranks if int(matched.writer_of[r]) == manifest)


def _box(matched: Matched, tensor: int, offset: I64, size: I64) -> Box:
    n = int(matched.ndim[tensor])
    return Box(tuple(offset[:n].tolist()), tuple(size[:n].tolist()))


def span(box: Box) -> str:
    """Return a box as index ranges, for messages: ``[0:4, 8:16]``."""
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.offset, box.end, strict=True)) + "]"


@dataclass(frozen=True, slots=True)
class Feed:
    """Which tiles feed which segments of all reader manifests, by segment, then by tile.

    Attributes:
        segment: i32[P], row of the readers' joint table.
        tile: i32[P].
        low, size: i64[P, D], what they have in common.
        nbytes: i64[P], its bytes in the reader's dtype.
        ptr: i64[readers + 1], the pairs of each reader manifest.
    """

    segment: I32
    tile: I32
    low: I64
    size: I64
    nbytes: I64
    ptr: I64


def feed(matched: Matched, tiles: Tiles, readers: Joint) -> Feed:
    """Find the tiles of every segment of the readers.

    Raises:
        CoverageError: an element of a segment that no writer holds.
    """
    index = BoxIndex.of(tiles.tensor, tiles.offset, tiles.size, matched.global_shape)
    segment, tile = index.join(readers.tensor, readers.offset, readers.size)
    start, corner = readers.offset.take(segment, axis=0), tiles.offset.take(tile, axis=0)
    low = np.maximum(start, corner)
    size = np.minimum(start + readers.size.take(segment, axis=0), corner + tiles.size.take(tile, axis=0))
    size -= low
    common = np.prod(size, axis=1)
    short = sum_by(segment, common, len(readers)) != np.prod(readers.size, axis=1)
    if short.any():
        row = int(np.argmax(short))
        raise _gap(matched, tiles, readers, tile[segment == row], row)
    nbytes = common * ITEMSIZE[readers.dtype[segment]]
    ptr = np.searchsorted(segment, readers.ptr)
    return Feed(segment.astype(np.int32), tile.astype(np.int32), low, size, nbytes, ptr)


def _gap(matched: Matched, tiles: Tiles, readers: Joint, fed: I64, row: int) -> CoverageError:
    tensor = int(readers.tensor[row])
    wanted = _box(matched, tensor, readers.offset[row], readers.size[row])
    rest = [wanted]
    for t in fed.tolist():
        held = _box(matched, tensor, tiles.offset[t], tiles.size[t])
        rest = [part for box in rest for part in box.subtract(held)]
    first = min(rest, key=lambda box: box.offset)
    return CoverageError(
        f"elements that no writer holds: {sum(box.numel for box in rest)} of {wanted.numel}",
        tensor=matched.names[tensor],
        rank=matched.readers[int(readers.owner[row])].label,
        expected=f"a source for every element of {span(wanted)}",
        found=f"none for {span(first)}",
    )
