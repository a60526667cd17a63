"""Segments: a manifest's nested views expanded to ordinary strided boxes, for planners and kernels."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncline.layout.columns import I32, I64, U8, Columns

_KINDS: dict[str, type] = {"tensor": np.int32, "dtype": np.uint8, "storage": np.int32, "shard": np.int32}


@dataclass(frozen=True, eq=False)
class Segments:
    """M boxes, each with one stride a dimension, as read-only arrays; rows without elements are left out.

    Attributes:
        tensor: i32[M], index into the manifest's names; rows are sorted by shard, then by offset.
        dtype: u8[M], code of the stored dtype.
        offset: i64[M, D], corner in the checkpoint tensor, padded with 0.
        size: i64[M, D], padded with 1.
        storage: i32[M].
        base: i64[M], storage element of the corner, in elements of the dtype.
        stride: i64[M, D], in elements; 0 in dimensions of size 1 (where a stride has no meaning) and where a
            source is expanded.
        shard: i32[M], the manifest's row; rows are sorted by tensor, so this column is ascending.
    """

    tensor: I32
    dtype: U8
    offset: I64
    size: I64
    storage: I32
    base: I64
    stride: I64
    shard: I32

    def __post_init__(self) -> None:
        for f in fields(self):
            column = np.ascontiguousarray(getattr(self, f.name), _KINDS.get(f.name, np.int64)).view()
            column.setflags(write=False)
            object.__setattr__(self, f.name, column)

    def __len__(self) -> int:
        return len(self.tensor)


def plain(c: Columns) -> bool:
    """Return whether the segments of checked columns are their rows: none empty, one stride a dimension."""
    if len(c.axis_dim) != int(c.ndim[c.tensor].sum(dtype=np.int64)):
        return False
    return bool((c.box_size > 0).all())


def strides(c: Columns, rows: I64 | None = None) -> I64:
    """Return i64[N, D]: strides of rows (all, if left out) of `plain` columns, as `Segments.stride`."""
    depth = c.box_size.shape[1]
    if len(c.axis_dim) == c.rows * depth:
        table = c.axis_stride.reshape(c.rows, depth)
        step = table.copy() if rows is None else table.take(rows, axis=0)
    else:
        ndim = c.ndim[c.tensor if rows is None else c.tensor[rows]]
        step = np.zeros((len(ndim), depth), np.int64)
        start = c.axis_ptr[:-1] if rows is None else c.axis_ptr[rows]
        for d in range(depth if len(c.axis_stride) else 0):
            at = np.minimum(start + d, len(c.axis_stride) - 1)
            step[:, d] = c.axis_stride.take(at) * (ndim > d)
    size = c.box_size if rows is None else c.box_size.take(rows, axis=0)
    step *= size != 1
    return step


def expand(c: Columns) -> Segments:
    """Return the segments of checked columns: nests merged where strides allow, unrolled where not."""
    live = ~(c.box_size == 0).any(axis=1)
    row, dim, extent, stride = _merged_axes(c, live)
    innermost = np.ones(len(row), bool)
    innermost[:-1] = (row[1:] != row[:-1]) | (dim[1:] != dim[:-1])
    size = np.ones_like(c.box_size)
    step = np.zeros_like(c.box_size)
    size[row[innermost], dim[innermost]] = extent[innermost]
    step[row[innermost], dim[innermost]] = stride[innermost]
    shard = np.flatnonzero(live)
    offset, base = c.box_offset[shard], c.view_offset[shard]
    outer = ~innermost
    if outer.any():
        inner = _inner_extents(row, dim, extent)
        shard, offset, base = _unroll(
            c, shard, row[outer], dim[outer], extent[outer], stride[outer], inner[outer]
        )
    return Segments(
        tensor=c.tensor[shard],
        dtype=c.dtype[shard],
        offset=offset,
        size=size[shard],
        storage=c.storage[shard],
        base=base,
        stride=step[shard],
        shard=shard.astype(np.int32),
    )


def _merged_axes(c: Columns, live: NDArray[np.bool_]) -> tuple[I64, U8, I64, I64]:
    """Return (row, dim, extent, stride) of live rows' axes longer than 1, mergeable neighbours merged."""
    row = np.repeat(np.arange(c.rows), np.diff(c.axis_ptr))
    keep = live[row] & (c.axis_extent > 1)
    row, dim, extent, stride = row[keep], c.axis_dim[keep], c.axis_extent[keep], c.axis_stride[keep]
    if not len(row):
        return row, dim, extent, stride
    joins = (row[:-1] == row[1:]) & (dim[:-1] == dim[1:]) & (stride[:-1] == stride[1:] * extent[1:])
    if not joins.any():
        return row, dim, extent, stride
    starts = np.flatnonzero(np.append(True, ~joins))
    last = np.append(starts[1:], len(row)) - 1
    return row[starts], dim[starts], np.multiply.reduceat(extent, starts), stride[last]


def _inner_extents(row: I64, dim: U8, extent: I64) -> I64:
    """Return, for every axis, the product of the extents of the axes inside it in its nest."""
    inner = np.ones(len(row), np.int64)
    depth = 1
    while True:
        same = (row[:-depth] == row[depth:]) & (dim[:-depth] == dim[depth:])
        if not same.any():
            return inner
        inner[:-depth][same] *= extent[depth:][same]
        depth += 1


def _unroll(
    c: Columns, shard: I64, row: I64, dim: U8, extent: I64, stride: I64, inner: I64
) -> tuple[I64, I64, I64]:
    """Return (shard, offset, base): a row for every combination of the outer axes' digits, in box order."""
    start = np.searchsorted(row, shard, "left")
    axes = np.searchsorted(row, shard, "right") - start
    count = np.ones(c.rows, np.int64)
    np.multiply.at(count, row, extent)
    copies = count[shard]
    which = np.repeat(np.arange(len(shard)), copies)
    rest = np.arange(len(which)) - np.repeat(np.cumsum(copies) - copies, copies)
    offset, base = c.box_offset[shard][which], c.view_offset[shard][which]
    for level in range(int(axes.max(initial=0))):
        at = np.flatnonzero(axes[which] > level)
        axis = (start + axes)[which[at]] - 1 - level
        rest[at], digit = np.divmod(rest[at], extent[axis])
        base[at] += digit * stride[axis]
        offset[at, dim[axis]] += digit * inner[axis]
    return shard[which], offset, base
