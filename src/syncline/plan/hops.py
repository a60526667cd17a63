"""Hops and digest rows: the columns of a plan that one rank needs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from syncline.layout.dtype import ITEMSIZE
from syncline.plan.columns import expand, pointers
from syncline.plan.lower import Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncline.plan.columns import I32, I64, U8, Bools, Ints


class Frozen:
    """Makes the arrays of a dataclass read-only."""

    def __post_init__(self) -> None:
        for f in fields(self):  # pyright: ignore[reportArgumentType]
            column = getattr(self, f.name)
            if isinstance(column, np.ndarray):
                column.setflags(write=False)


@dataclass(frozen=True, eq=False)
class Hops(Frozen):
    """H boxes, each from one writer rank to one reader rank, as read-only columns.

    Rows are sorted by instance, then reader rank, then writer rank (each reader starts at another writer, so
    that readers do not all pull from the same one first), then tensor and place: both ends of a link see
    their common rows in the same order.

    Attributes:
        src: i32[H], writer rank.
        dst: i32[H], reader rank within its instance.
        instance: i32[H], index into `Plan.instances`.
        tensor: i32[H], index into `Plan.names`.
        offset, size: i64[H, D], the box in the checkpoint tensor.
        src_storage: i32[H]; src_base: i64[H], element of the box's corner; src_stride: i64[H, D], in elements
            of src_dtype: u8[H].
        dst_storage, dst_base, dst_stride, dst_dtype: likewise. The destination's dtype is that of the wire.
        piece_ptr: i64[H + 1]; piece: i32[...]: the pieces ``piece_ptr[i]:piece_ptr[i + 1]`` make up hop i.
        nbytes: i64[H], bytes in the wire dtype.
    """

    src: I32
    dst: I32
    instance: I32
    tensor: I32
    offset: I64
    size: I64
    src_storage: I32
    src_base: I64
    src_stride: I64
    src_dtype: U8
    dst_storage: I32
    dst_base: I64
    dst_stride: I64
    dst_dtype: U8
    piece_ptr: I64
    piece: I32
    nbytes: I64

    def __len__(self) -> int:
        return len(self.src)

    def take(self, rows: Ints | Bools) -> Self:
        """Return some of the hops, by index or mask."""
        rows = np.arange(len(self))[rows]
        at, place = expand(np.diff(self.piece_ptr)[rows])
        plain = {f.name: getattr(self, f.name)[rows] for f in fields(self) if not f.name.startswith("piece")}
        return replace(
            self,
            **plain,
            piece_ptr=pointers(np.diff(self.piece_ptr)[rows]),
            piece=self.piece[self.piece_ptr[rows][at] + place],
        )

    def source_stream(self) -> Stream:
        """Return the bytes of the hops within their source storages, for `lower`."""
        return Stream.of_bytes(self.src_base, self.src_stride, ITEMSIZE[self.src_dtype])

    def destination_stream(self) -> Stream:
        """Return the bytes of the hops within their destination storages, for `lower`."""
        return Stream.of_bytes(self.dst_base, self.dst_stride, ITEMSIZE[self.dst_dtype])

    @classmethod
    def concatenate(cls, parts: Sequence[Hops]) -> Hops:
        """Join tables, in order; there must be at least one."""
        joined: dict[str, Any] = {
            f.name: np.concatenate([getattr(p, f.name) for p in parts])
            for f in fields(cls)
            if f.name != "piece_ptr"
        }
        counts = np.concatenate([np.diff(p.piece_ptr) for p in parts])
        return cls(**joined, piece_ptr=pointers(counts))


@dataclass(frozen=True, eq=False)
class DigestRows(Frozen):
    """The pieces that one writer rank holds and has to digest, as read-only columns.

    Attributes:
        piece: i32[R], number of the piece, ascending; twice where the rank holds a piece in two places.
        tensor: i32[R].
        offset, size: i64[R, D], the piece's box.
        src_storage: i32[R]; src_base: i64[R]; src_stride: i64[R, D], in elements of src_dtype: u8[R].
        dtype: u8[R], wire dtype, of which the digest is taken.
        nbytes: i64[R], bytes in the wire dtype.
    """

    piece: I32
    tensor: I32
    offset: I64
    size: I64
    src_storage: I32
    src_base: I64
    src_stride: I64
    src_dtype: U8
    dtype: U8
    nbytes: I64

    def __len__(self) -> int:
        return len(self.piece)

    def source_stream(self) -> Stream:
        """Return the bytes of the rows within their source storages, for `lower`."""
        return Stream.of_bytes(self.src_base, self.src_stride, ITEMSIZE[self.src_dtype])
