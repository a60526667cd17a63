"""Several tables in one, so that a few calls do for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from syncline.layout.hashing import constants
from syncline.plan.columns import changes, pointers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncline.plan.columns import I32, I64, U8, Ints
    from syncline.plan.tables import Table


@dataclass(frozen=True, slots=True)
class Joint:
    """The rows of several tables, table by table.

    Attributes:
        ptr: i64[tables + 1], where each table begins.
        owner: i32[M], number of the table.
        tensor: i32[M]; dtype: u8[M]; offset, size: i64[M, D], as in `Table`.
        place: i64[M], number of the row within its tensor and table.
    """

    ptr: I64
    owner: I32
    tensor: I32
    dtype: U8
    offset: I64
    size: I64
    place: I64

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def of(cls, tables: Sequence[Table]) -> Joint:
        """Join tables; there must be at least one."""
        counts = np.array([len(t) for t in tables], np.int64)
        place = np.concatenate([t.places() for t in tables])
        return cls(
            ptr=pointers(counts),
            owner=np.repeat(np.arange(len(tables), dtype=np.int32), counts),
            tensor=np.concatenate([t.tensor for t in tables]),
            dtype=np.concatenate([t.dtype for t in tables]),
            offset=np.concatenate([t.offset for t in tables]),
            size=np.concatenate([t.size for t in tables]),
            place=place,
        )


@dataclass(frozen=True, slots=True)
class Held:
    """All segments of all writer manifests, by tensor, then by manifest, then by place.

    Attributes:
        first: i64[T + 1], the first row of each tensor.
        manifest: i32[M].
        dtype: u8[M]; offset, size: i64[M, D]: the box.
        storage: i32[M]; base: i64[M]; stride: i64[M, D]: as in `Segments`.
        hashes: u64[M], of the boxes.
    """

    first: I64
    manifest: I32
    dtype: U8
    offset: I64
    size: I64
    storage: I32
    base: I64
    stride: I64
    hashes: np.ndarray

    #: Rows of one class may lie in memory in different ways.
    strided_alike = False

    @classmethod
    def of(cls, tables: Sequence[Table], tensors: int) -> Held:
        """Join the tables of the writers' manifests."""
        tensor = np.concatenate([t.tensor for t in tables])
        order = np.argsort(tensor, kind="stable")
        owner = np.repeat(np.arange(len(tables), dtype=np.int32), [len(t) for t in tables])
        storage, base, stride = _views(tables)
        storage, base, stride = storage[order], base[order], stride.take(order, axis=0)
        dtype, offset, size = (
            np.concatenate([getattr(t, name) for t in tables]).take(order, axis=0)
            for name in ("dtype", "offset", "size")
        )
        hashes = np.concatenate([t.hashes() for t in tables])[order]
        first = pointers(np.bincount(tensor, minlength=tensors))
        return cls(first, owner[order], dtype, offset, size, storage, base, stride, hashes)

    def sums(self) -> np.ndarray:
        """Return u64[T]: for each tensor the sum of its rows' hashes, each times a factor of its manifest.

        Rows of one tensor and manifest count in their order.
        """
        factors = constants(0, int(self.manifest.max(initial=-1)) + 1, 5)
        tensor = np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))
        place = self.places(tensor)
        weight = factors[self.manifest] + np.uint64(2) * place.astype(np.uint64) * np.uint64(
            0xC2B2AE3D27D4EB4F
        )
        total = np.zeros(len(self.first) - 1, np.uint64)
        np.add.at(total, tensor, self.hashes * weight)
        return total

    def places(self, tensor: Ints) -> I64:
        """Return i64[M]: the number of each row within its tensor and manifest."""
        begin = np.nonzero(changes(tensor, self.manifest))[0]
        return np.arange(len(tensor)) - np.repeat(begin, np.diff(np.append(begin, len(tensor))))


def _views(tables: Sequence[Table]) -> tuple[I32, I64, I64]:
    """Return (storage, base, stride) of all rows of all tables."""
    depth = tables[0].offset.shape[1]
    simple = all(
        t.segment is None and t.manifest.plain and t.manifest.ndim.max(initial=0) <= depth for t in tables
    )
    if not simple:
        storage, base, stride = (
            np.concatenate(parts) for parts in zip(*[t.views() for t in tables], strict=True)
        )
        return storage, base, stride
    manifests = [t.manifest for t in tables]
    axes = np.concatenate([*(m.axis_stride for m in manifests), np.zeros(depth, np.int64)])
    count = np.concatenate([np.diff(m.axis_ptr) for m in manifests])
    start = np.cumsum(count) - count
    stride = np.empty((len(count), depth), np.int64)
    for d in range(depth):
        np.multiply(axes.take(start + d), count > d, out=stride[:, d])
    stride *= np.concatenate([t.size for t in tables]) != 1
    return (
        np.concatenate([m.storage for m in manifests]),
        np.concatenate([m.view_offset for m in manifests]),
        stride,
    )
