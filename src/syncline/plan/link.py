"""Rows of one rank: what a class of tensors does, written out for every tensor of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from syncline.errors import PlanError
from syncline.plan.columns import expand, pointers
from syncline.plan.hops import DigestRows, Hops
from syncline.plan.meshed import MeshHeld

if TYPE_CHECKING:
    from syncline.plan.balance import Assignment, Shares
    from syncline.plan.classes import Classes
    from syncline.plan.columns import I32, I64, U8, Ints
    from syncline.plan.cover import Feed, Sources, Tiles
    from syncline.plan.joint import Held, Joint
    from syncline.plan.match import Matched
    from syncline.plan.pieces import Numbering
    from syncline.plan.tables import Table


@dataclass(frozen=True)
class Links:
    """Writes out rows of ranks. A pair is a row of `Feed`: a segment of a class, and a tile that feeds it.

    Attributes:
        matched: all tensors. classes: of them.
        held: all that writers hold; sources: of the classes' first tensors; tiles: of those.
        readers: what readers take of the classes' first tensors; feed: from which tiles.
        assigned: who sends.
        pieces: of all tensors.
    """

    matched: Matched
    classes: Classes
    held: Held | MeshHeld
    sources: Sources
    tiles: Tiles
    readers: Joint
    feed: Feed
    assigned: Assignment
    pieces: Numbering

    def received(self, number: int, instance: str, rank: int, first: int) -> Hops:
        """Return what a reader rank receives, the writer rank ``first`` first.

        Args:
            number: of the instance.
            instance: its name.
            rank: the reader's rank.
            first: the writer rank to begin with.
        """
        m = int(self.matched.reader_of[instance][rank])
        table = self.matched.readers[m]
        ptr = self._pairs_of_segment
        segment = self._segments(m, table)
        row, place = expand((ptr[1:] - ptr[:-1])[segment])
        pair = ptr[segment[row]] + place
        tensor = table.tensor[row]
        src = self.assigned.sender(number, self.feed.tile[pair], self.classes.place[tensor])
        writers = len(self.matched.writer_of)
        turn = (src - np.int32(first)) % np.int32(writers)
        order = np.argsort(turn.astype(np.uint16) if writers < 1 << 16 else turn, kind="stable")
        row, pair, src = row[order], pair[order], src[order]
        ends = np.full(len(row), number, np.int32), np.full(len(row), rank, np.int32)
        tensor = tensor[order]
        return self._columns(tensor, pair, src, ends, self._views(table, row, pair, tensor))

    def sent(self, rank: int, shares: Shares) -> Hops:
        """Return what a writer rank sends of some of its shares: by instance, reader rank, tensor, place."""
        share, pair = self.pairs_of_shares(shares)
        which, place = expand((shares.high - shares.low)[share])
        share, pair = share[which], pair[which]
        member = self.classes.ptr[self.tiles.tensor[self.feed.tile[pair]]] + shares.low[share] + place
        tensor, owner = self.classes.members[member], self.readers.owner[self.feed.segment[pair]]
        instance = self.assigned.instance[shares.item[share]]
        at, dst = self.ranks_with(instance, owner)
        order = np.lexsort((pair[at], tensor[at], dst, instance[at]))
        at, dst = at[order], dst[order].astype(np.int32)
        tensor, pair, owner = tensor[at], pair[at], owner[at]
        src, ends = np.full(len(at), rank, np.int32), (instance[at].astype(np.int32), dst)
        return self._columns(tensor, pair, src, ends, self._views_of(owner, tensor, pair))

    def held_rows(self, manifest: int) -> DigestRows:
        """Return the pieces that the ranks with a writer manifest hold, by number."""
        tile, source = self.tiles.held_by(manifest)
        at, piece = self.pieces.grid.of_tiles(tile)
        kind = self.tiles.tensor[tile[at]]
        which, place = expand(self.classes.sizes[kind])
        tensor = self.classes.members[self.classes.ptr[kind[which]] + place]
        number = self.pieces.numbers(tensor, piece[which])
        order = np.argsort(number, kind="stable")
        which, tensor, number = which[order], tensor[order], number[order]
        rows = self.pieces.grid.rows(piece)
        offset, size = rows.offset.take(which, axis=0), rows.size.take(which, axis=0)
        storage, base, stride, dtype = self._source(tensor, source[at[which]], offset)
        return DigestRows(
            piece=number,
            tensor=tensor,
            offset=offset,
            size=size,
            src_storage=storage,
            src_base=base,
            src_stride=stride,
            src_dtype=dtype,
            dtype=rows.dtype[which],
            nbytes=rows.nbytes[which],
        )

    def written_out(self, tensor: I32, pair: I64, src: I32, ends: tuple[I32, I32]) -> Hops:
        """Return hops: tensors [N], pairs of their classes, writer ranks, and (instances, reader ranks)."""
        owner = self.readers.owner[self.feed.segment[pair]]
        return self._columns(tensor, pair, src, ends, self._views_of(owner, tensor, pair))

    @cached_property
    def segment_strides(self) -> I64:
        """i64[segments, D]: strides of the rows of ``readers``: the first tensor's of each class."""
        found = np.empty_like(self.readers.offset)
        for m, table in enumerate(self.matched.readers):
            a, b = int(self.readers.ptr[m]), int(self.readers.ptr[m + 1])
            if a == b:  # a rank that holds nothing
                continue
            first = table.first_rows(self.classes.first[self.readers.tensor[a:b]])
            found[a:b] = table.views(first + self.readers.place[a:b])[2]
        return found

    @cached_property
    def _pairs_of_segment(self) -> I64:
        """i64[segments + 1], the pairs of each row of ``readers``."""
        return pointers(np.bincount(self.feed.segment, minlength=len(self.readers)))

    @cached_property
    def _pieces_of_pair(self) -> tuple[I64, I32]:
        fed = self.feed
        dtype = self.readers.dtype[fed.segment]
        return self.pieces.grid.of_boxes(fed.tile, dtype, fed.low, fed.low + fed.size)

    @cached_property
    def _kinds(self) -> I64:
        """i64[R, C + 1]: the first row of each class in ``readers``, for each reader manifest."""
        classes = np.arange(len(self.classes.first) + 1)
        starts = [
            a + np.searchsorted(self.readers.tensor[a:b], classes)
            for a, b in itertools.pairwise(self.readers.ptr.tolist())
        ]
        return np.stack(starts)

    def _segments(self, m: int, table: Table) -> I64:
        """Return i64[M]: the row of ``readers`` that each row of a reader's table is like."""
        kind = self.classes.of[table.tensor]
        found = self._kinds[m][kind]
        if not table.single:
            found = found + table.places()
        past = found >= self._kinds[m][kind + 1]
        if past.any():
            raise self._differs(table.tensor, ~past)
        return found

    def pairs_of_shares(self, shares: Shares) -> tuple[I64, I64]:
        """Return (share, pair): which pairs need something of each share's tile, in any instance."""
        by_tile = np.argsort(self.feed.tile, kind="stable")
        ptr = pointers(np.bincount(self.feed.tile, minlength=len(self.tiles)))
        tile = self.assigned.tile[shares.item]
        share, place = expand((ptr[1:] - ptr[:-1])[tile])
        return share, by_tile[ptr[tile[share]] + place]

    def ranks_with(self, instance: I64, owner: I32) -> tuple[I64, I64]:
        """Return (row, rank): the ranks of each row's instance that have its reader manifest."""
        manifests = len(self.matched.readers)
        listed = list(self.matched.reader_of.values())
        counts = np.array([np.bincount(ranks, minlength=manifests) for ranks in listed])
        ranks = np.concatenate([np.argsort(ranks, kind="stable") for ranks in listed])
        start = pointers(counts.ravel())[:-1].reshape(counts.shape)
        row, place = expand(counts[instance, owner])
        return row, ranks[start[instance[row], owner[row]] + place]

    def _views_of(self, owner: I32, tensor: I32, pair: I64) -> tuple[I32, I64, I64]:
        """Return destination views of pairs of several reader manifests."""
        storage, base = np.empty(len(owner), np.int32), np.empty(len(owner), np.int64)
        stride = np.empty((len(owner), self.readers.offset.shape[1]), np.int64)
        order = np.argsort(owner, kind="stable")
        ptr = pointers(np.bincount(owner, minlength=len(self.matched.readers)))
        for m in np.unique(owner).tolist():
            at = order[ptr[m] : ptr[m + 1]]
            table = self.matched.readers[m]
            row = table.first_rows(tensor[at]) + self.readers.place[self.feed.segment[pair[at]]]
            storage[at], base[at], stride[at] = self._views(table, row, pair[at], tensor[at])
        return storage, base, stride

    def _views(self, table: Table, row: I64, pair: I64, tensor: I32) -> tuple[I32, I64, I64]:
        """Return (storage, base, stride) of a reader's rows, from where pairs begin."""
        segment = self.feed.segment[pair]
        corner = table.offset.take(row, axis=0, mode="clip")
        same = corner == self.readers.offset.take(segment, axis=0)
        same &= table.size.take(row, axis=0, mode="clip") == self.readers.size.take(segment, axis=0)
        same &= (table.tensor.take(row, mode="clip") == tensor)[:, None]
        if not same.all():
            raise self._differs(tensor, same.all(axis=1))
        storage, base, stride = table.views(row)
        return storage, base + _dot(self.feed.low.take(pair, axis=0) - corner, stride), stride

    def _source(self, tensor: Ints, holder: I64, low: I64) -> tuple[I32, I64, I64, U8]:
        """Return (storage, base, stride, dtype) of boxes from ``low`` on, held like rows of `Sources`."""
        held, like = self.held, self.sources
        if isinstance(held, MeshHeld):
            return held.located(like, tensor, holder, low)
        row = held.first[tensor] + like.local[holder]
        corner = held.offset.take(row, axis=0, mode="clip")
        same = corner == like.offset.take(holder, axis=0)
        same &= held.size.take(row, axis=0, mode="clip") == like.size.take(holder, axis=0)
        owned = held.manifest.take(row, mode="clip") == like.manifest[holder]
        same &= (owned & (row < held.first[1:][tensor]))[:, None]
        if not same.all():
            raise self._differs(tensor, same.all(axis=1))
        stride = held.stride.take(row, axis=0)
        return held.storage[row], held.base[row] + _dot(low - corner, stride), stride, held.dtype[row]

    def _columns(
        self, tensor: I32, pair: I64, src: I32, ends: tuple[I32, I32], views: tuple[I32, I64, I64]
    ) -> Hops:
        """Return hops; ``ends`` are instances and ranks, ``views`` where they write."""
        fed = self.feed
        low, tile = fed.low.take(pair, axis=0), fed.tile[pair]
        source = self._source(tensor, self.tiles.find(tile, self.matched.writer_of[src]), low)
        ptr, pieces = self._pieces_of_pair
        counts = (ptr[1:] - ptr[:-1])[pair]
        at, place = expand(counts)
        piece = pieces[ptr[pair[at]] + place]
        return Hops(
            src=src,
            dst=ends[1],
            instance=ends[0],
            tensor=tensor,
            offset=low,
            size=fed.size.take(pair, axis=0),
            src_storage=source[0],
            src_base=source[1],
            src_stride=source[2],
            src_dtype=source[3],
            dst_storage=views[0],
            dst_base=views[1],
            dst_stride=views[2],
            dst_dtype=self.readers.dtype[fed.segment[pair]],
            piece_ptr=pointers(counts),
            piece=self.pieces.numbers(tensor[at], piece),
            nbytes=fed.nbytes[pair],
        )

    def _differs(self, tensor: Ints, same: Any) -> PlanError:
        name = self.matched.names[int(tensor[int(np.argmin(same))])]
        return PlanError(
            "a tensor that is not cut like its class",
            tensor=name,
            hint="two hashes of boxes collide: report it",
        )


def _dot(a: I64, b: I64) -> I64:
    """Return i64[N]: the inner product of rows."""
    out = a[:, 0] * b[:, 0]
    for d in range(1, a.shape[1]):
        out += a[:, d] * b[:, d]
    return out
