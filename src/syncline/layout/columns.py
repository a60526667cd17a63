"""The columns of a manifest, their canonical order, and the checks that make them safe to use.

Everything is vectorised over rows. All sizes, offsets and strides are int64; products and spans are first
bounded in floating point (see `syncline.layout.check`), so that no integer can wrap.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import NDArray

    I64 = NDArray[np.int64]
    I32 = NDArray[np.int32]
    U8 = NDArray[np.uint8]

#: Largest number of bytes, elements or element steps that a layout may speak of.
LIMIT = float(2**62)

DTYPES: dict[str, type] = {
    "ndim": np.uint8,
    "global_shape": np.int64,
    "tensor": np.int32,
    "dtype": np.uint8,
    "box_offset": np.int64,
    "box_size": np.int64,
    "storage": np.int32,
    "view_offset": np.int64,
    "axis_ptr": np.int64,
    "axis_dim": np.uint8,
    "axis_extent": np.int64,
    "axis_stride": np.int64,
    "storage_nbytes": np.int64,
    "transforms": np.int32,
}


@dataclass(frozen=True, eq=False)
class Columns:
    """N shards of T tensors in S storages as read-only arrays; D = max(1, largest number of dimensions).

    Attributes:
        names: checkpoint names, sorted and unique; every one has a shard.
        ndim: u8[T], dimensions of the checkpoint tensor.
        global_shape: i64[T, D], its shape, padded with 1.
        tensor: i32[N], index into ``names``. Rows are sorted by tensor, box offset, box size.
        dtype: u8[N], code of the stored dtype.
        box_offset: i64[N, D], in elements of the checkpoint tensor, padded with 0.
        box_size: i64[N, D], padded with 1.
        storage: i32[N], index into ``storage_nbytes``.
        view_offset: i64[N], storage element of the box's first element, in elements of the shard's dtype.
        axis_ptr: i64[N+1], the axes of row i are ``axis_ptr[i]:axis_ptr[i + 1]``.
        axis_dim: u8[A], box dimension of an axis; ascending within a row, nests outermost first.
        axis_extent: i64[A].
        axis_stride: i64[A], in elements.
        storage_nbytes: i64[S], size of each storage in bytes.
        transforms: i32[N], index into ``transform_names``.
        transform_names: distinct transform chains, sorted; the chain of no transform is ``()``.
    """

    names: tuple[str, ...]
    ndim: U8
    global_shape: I64
    tensor: I32
    dtype: U8
    box_offset: I64
    box_size: I64
    storage: I32
    view_offset: I64
    axis_ptr: I64
    axis_dim: U8
    axis_extent: I64
    axis_stride: I64
    storage_nbytes: I64
    transforms: I32
    transform_names: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for name, kind in DTYPES.items():
            column = np.ascontiguousarray(getattr(self, name), kind)
            if column.flags.writeable:
                column = column.view()
                column.setflags(write=False)
            object.__setattr__(self, name, column)

    @property
    def rows(self) -> int:
        """Number of shards, N."""
        return len(self.tensor)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, without copying."""
        return {f.name: getattr(self, f.name) for f in fields(Columns)}

    def canonical(self) -> Columns:
        """Return the same shards in canonical form: names and rows sorted, nothing unused, least D."""
        return _sort_rows(_pack_transforms(_pack_names(self)))


def row_keys(columns: Columns) -> list[NDArray[Any]]:
    """Return the sort keys of the rows, most significant first."""
    dims = range(columns.box_offset.shape[1])
    offsets = [columns.box_offset[:, d] for d in dims]
    sizes = [columns.box_size[:, d] for d in dims]
    # a rank may hold one box in several places (a scale that an engine repeats), but each place once
    return [columns.tensor, *offsets, *sizes, columns.storage, columns.view_offset]


def ascending(keys: Sequence[NDArray[Any]], *, strict: bool) -> NDArray[np.bool_]:
    """Return bool[N-1]: whether row i is below (or, not strict, equal to) row i+1, keys compared in order."""
    result = np.full(max(len(keys[0]) - 1, 0), not strict)
    for key in reversed(keys):
        result = (key[:-1] < key[1:]) | ((key[:-1] == key[1:]) & result)
    return result


def csr_take(ptr: I64, order: I64) -> tuple[I64, I64]:
    """Return (new ptr, element indices) of the rows ``order`` of a CSR structure, in that order."""
    counts = (ptr[1:] - ptr[:-1])[order]
    new_ptr = np.zeros(len(order) + 1, np.int64)
    np.cumsum(counts, out=new_ptr[1:])
    return new_ptr, np.arange(new_ptr[-1]) + np.repeat(ptr[:-1][order] - new_ptr[:-1], counts)


def _pack_names(c: Columns) -> Columns:
    count = len(c.names)
    used = np.zeros(count, bool)
    used[c.tensor] = True
    keep = [i for i in sorted(range(count), key=c.names.__getitem__) if used[i]]
    names = tuple(c.names[i] for i in keep)
    depth = max(1, int(c.ndim[keep].max(initial=0)))
    if keep == list(range(count)) and depth == c.global_shape.shape[1]:
        return c
    place = np.zeros(count, np.int32)
    place[keep] = np.arange(len(keep))
    return replace(
        c,
        names=names,
        ndim=c.ndim[keep],
        global_shape=c.global_shape[keep, :depth],
        tensor=place[c.tensor],
        box_offset=c.box_offset[:, :depth],
        box_size=c.box_size[:, :depth],
    )


def _pack_transforms(c: Columns) -> Columns:
    used = set(np.unique(c.transforms).tolist())
    chains = sorted({c.transform_names[i] for i in used})
    if tuple(chains) == c.transform_names:
        return c
    place = {chain: i for i, chain in enumerate(chains)}
    table = np.array([place.get(chain, 0) for chain in c.transform_names] or [0], np.int32)
    return replace(c, transforms=table[c.transforms], transform_names=tuple(chains))


def _sort_rows(c: Columns) -> Columns:
    keys = row_keys(c)
    if ascending(keys, strict=False).all():
        return c
    order = np.lexsort(keys[::-1])
    ptr, axes = csr_take(c.axis_ptr, order)
    by_row = ("tensor", "dtype", "box_offset", "box_size", "storage", "view_offset", "transforms")
    by_axis = ("axis_dim", "axis_extent", "axis_stride")
    moved = {name: getattr(c, name)[order] for name in by_row} | {
        name: getattr(c, name)[axes] for name in by_axis
    }
    return replace(c, axis_ptr=ptr, **moved)
