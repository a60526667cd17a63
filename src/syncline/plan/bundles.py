"""Bundles: one row for all tensors of a class that are cut, sent and placed alike.

A rank of a large fleet can have millions of copies, and few kinds of them: the same box of every expert of a
model, from the same peer. A bundle says it once. Where each tensor begins in the two ranks' storages stays in
what they hold anyway (a manifest); the bundle's streams are relative to that. So a bundle is one more nest
level around a strided copy, with a table of starts instead of a stride.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Self, cast

import numpy as np

from syncline.layout.dtype import ITEMSIZE
from syncline.plan.columns import expand
from syncline.plan.hops import Frozen
from syncline.plan.lower import Runs, Stream, lower

if TYPE_CHECKING:
    from syncline.plan.columns import I32, I64, U8, Bools, Ints
    from syncline.plan.hops import Hops
    from syncline.plan.link import Links
    from syncline.plan.meshed import MeshHeld


@dataclass(frozen=True, eq=False)
class Bundles(Frozen):
    """B bundles as read-only columns; those of a reader begin with the writer rank that it turns to first.

    Attributes:
        src: i32[B], writer rank. dst: i32[B], reader rank. instance: i32[B], index into `Plan.instances`.
        kind: i32[B], class of tensors; of its members those numbered ``first`` i64[B] and the ``count``
            i64[B] from there on.
        pair: i64[B], which box of the class; place: i64[B], number of the reader's segment within its tensor.
        offset, size: i64[B, D], the box in each of the checkpoint tensors.
        src_base: i64[B], element of the box's corner behind the start of the tensor's piece at the writer;
            src_stride: i64[B, D], in elements of src_dtype: u8[B].
        dst_base, dst_stride, dst_dtype: likewise, behind the start of the reader's segment.
        nbytes: i64[B], of one tensor, in the wire dtype.
    """

    src: I32
    dst: I32
    instance: I32
    kind: I32
    first: I64
    count: I64
    pair: I64
    place: I64
    offset: I64
    size: I64
    src_base: I64
    src_stride: I64
    src_dtype: U8
    dst_base: I64
    dst_stride: I64
    dst_dtype: U8
    nbytes: I64

    def __len__(self) -> int:
        return len(self.src)

    @property
    def copies(self) -> int:
        """Number of hops that these are."""
        return int(self.count.sum())

    def take(self, rows: Ints | Bools) -> Self:
        """Return some of the bundles, by index or mask."""
        return replace(self, **{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def runs(self) -> Runs:
        """Return the descriptors of one tensor of each bundle, in bytes behind its start at both ends."""
        source = Stream.of_bytes(self.src_base, self.src_stride, ITEMSIZE[self.src_dtype])
        target = Stream.of_bytes(self.dst_base, self.dst_stride, ITEMSIZE[self.dst_dtype])
        return lower(self.size, [source, target])


def received(links: Links, number: int, instance: str, rank: int, first: int) -> Bundles:
    """Return what a reader rank receives, the writer rank ``first`` first; see `Links.received`."""
    m = int(links.matched.reader_of[instance][rank])
    pair = np.arange(int(links.feed.ptr[m]), int(links.feed.ptr[m + 1]))
    item = links.assigned.item[number, links.feed.tile[pair]]
    wanted, which = np.unique(item, return_inverse=True)
    shares = links.assigned.shares(wanted)
    ptr = np.searchsorted(shares.item, np.append(wanted, links.assigned.start.size))
    at, place = expand(np.diff(ptr)[which])
    share = ptr[which[at]] + place
    src = shares.rank[share]
    turn = (src - np.int32(first)) % np.int32(len(links.matched.writer_of))
    order = np.argsort(turn, kind="stable")
    share, pair, src = share[order], pair[at[order]], src[order]
    ends = np.full(len(src), number, np.int32), np.full(len(src), rank, np.int32)
    return _columns(links, pair, src, ends, (shares.low[share], shares.high[share]))


def sent(links: Links, rank: int) -> Bundles:
    """Return what a writer rank sends: by instance, reader rank, pair."""
    shares = links.assigned.shares_of(rank)
    share, pair = links.pairs_of_shares(shares)
    instance = links.assigned.instance[shares.item[share]]
    at, dst = links.ranks_with(instance, links.readers.owner[links.feed.segment[pair]])
    order = np.lexsort((pair[at], dst, instance[at]))
    at, dst = at[order], dst[order].astype(np.int32)
    share, pair, instance = share[at], pair[at], instance[at].astype(np.int32)
    src = np.full(len(at), rank, np.int32)
    return _columns(links, pair, src, (instance, dst), (shares.low[share], shares.high[share]))


def hops(links: Links, bundles: Bundles) -> Hops:
    """Return every copy of some bundles, bundle by bundle."""
    which, place = expand(bundles.count)
    kind = bundles.kind[which]
    tensor = links.classes.members[links.classes.ptr[kind] + bundles.first[which] + place]
    ends = bundles.instance[which], bundles.dst[which]
    return links.written_out(tensor, bundles.pair[which], bundles.src[which], ends)


def _columns(links: Links, pair: I64, src: I32, ends: tuple[I32, I32], members: tuple[I64, I64]) -> Bundles:
    fed, held, like = links.feed, cast("MeshHeld", links.held), links.sources
    segment, tile = fed.segment[pair], fed.tile[pair]
    kind = links.tiles.tensor[tile]
    low = fed.low.take(pair, axis=0)
    holder = links.tiles.find(tile, links.matched.writer_of[src])
    src_stride = held.strides(like, holder)
    dst_stride = links.segment_strides.take(segment, axis=0)
    return Bundles(
        src=src,
        dst=ends[1],
        instance=ends[0],
        kind=kind,
        first=members[0],
        count=members[1] - members[0],
        pair=pair,
        place=links.readers.place[segment],
        offset=low,
        size=fed.size.take(pair, axis=0),
        src_base=((low - like.offset.take(holder, axis=0)) * src_stride).sum(axis=1),
        src_stride=src_stride,
        src_dtype=like.dtype[holder],
        dst_base=((low - links.readers.offset.take(segment, axis=0)) * dst_stride).sum(axis=1),
        dst_stride=dst_stride,
        dst_dtype=links.readers.dtype[segment],
        nbytes=fed.nbytes[pair],
    )
