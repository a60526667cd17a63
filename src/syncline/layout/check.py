"""Checks of a manifest's columns: whatever passes can be planned and addressed without further questions."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import numpy as np

from syncline.errors import LayoutError
from syncline.layout.columns import LIMIT, ascending, row_keys
from syncline.layout.dtype import ITEMSIZE

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from syncline.layout.columns import Columns

    Bools = NDArray[np.bool_]


def structure(c: Columns) -> None:
    """Check lengths, index ranges and the axis structure: after it every index is safe to follow.

    Raises:
        LayoutError: a column is too short or long, or an index points nowhere.
    """
    tensors, rows, axes, depth = len(c.names), c.rows, len(c.axis_dim), c.global_shape.shape[-1]
    shapes = {
        "ndim": (tensors,),
        "global_shape": (tensors, depth),
        "dtype": (rows,),
        "box_offset": (rows, depth),
        "box_size": (rows, depth),
        "storage": (rows,),
        "view_offset": (rows,),
        "transforms": (rows,),
        "axis_ptr": (rows + 1,),
        "axis_extent": (axes,),
        "axis_stride": (axes,),
    }
    for name, shape in shapes.items():
        if getattr(c, name).shape != shape:
            raise LayoutError(f"column {name} does not fit", expected=shape, found=getattr(c, name).shape)
    index("tensor", c.tensor, tensors)
    index("storage", c.storage, len(c.storage_nbytes))
    index("transforms", c.transforms, len(c.transform_names))
    index("ndim", c.ndim, depth + 1)
    steps = np.diff(c.axis_ptr)
    if c.axis_ptr[0] != 0 or c.axis_ptr[-1] != axes or (steps < 0).any():
        raise LayoutError("axis_ptr does not partition the axes", expected=f"0 .. {axes}, ascending")
    if len(set(c.names)) != tensors:
        raise LayoutError("a name occurs twice in the table of names")
    if not all(c.names):
        raise LayoutError("a tensor needs a name", expected="at least one character")


def order(c: Columns) -> None:
    """Check that structurally sound columns are as `Columns.canonical` leaves them.

    Raises:
        LayoutError: names, rows or transform chains out of order, twice or unused; dimensions nobody needs.
    """
    depth = max(1, int(c.ndim.max(initial=0)))
    if depth != c.global_shape.shape[1]:
        raise LayoutError("more dimensions than needed", expected=depth, found=c.global_shape.shape[1])
    if not ascending(row_keys(c), strict=True).all():
        raise LayoutError("rows out of order, or twice", expected="sorted by tensor, box and place")
    tables: list[tuple[str, Any, NDArray[np.int32]]] = [
        ("names", c.names, c.tensor),
        ("transform chains", c.transform_names, c.transforms),
    ]
    for what, table, column in tables:
        if not all(map(operator.lt, table, table[1:])):
            raise LayoutError(f"{what} out of order, or twice", expected="sorted and unique")
        if not np.bincount(column, minlength=len(table)).all():
            raise LayoutError(f"{what} that no shard uses", expected="at least one shard for each")


def contents(c: Columns) -> None:
    """Check shapes, boxes, views and storages of structurally sound columns in canonical row order.

    Raises:
        LayoutError: names the first tensor at fault, with what was expected and found.
    """
    if (c.storage_nbytes < 0).any():
        raise LayoutError("a storage of negative size", found=int(c.storage_nbytes.min()))
    _refuse(c, ITEMSIZE[c.dtype] == 0, "unknown dtype code", "a code of syncline.layout.dtype", "dtype")
    _check_shapes(c)
    _check_boxes(c)
    _check_axes(c)
    _check_spans(c)
    same = ~ascending(row_keys(c), strict=True)
    _refuse(
        c,
        np.append(same, False) if c.rows else same,
        "the same box twice in one place",
        "each box once in each place",
        "box_offset",
    )


def index(name: str, column: NDArray[np.integer], end: int) -> None:
    """Check that a column of indices stays in 0..end-1.

    Raises:
        LayoutError: it does not.
    """
    if len(column) and (int(column.min()) < 0 or int(column.max()) >= end):
        raise LayoutError(
            f"column {name} points nowhere", expected=f"0..{end - 1}", found=f"{column.min()}..{column.max()}"
        )


def _refuse(c: Columns, bad: Bools | np.bool_, what: str, expected: object, column: str) -> None:
    if not bad.any():
        return
    row = int(np.argmax(bad))
    tensor = int(c.tensor[row])
    ndim = int(c.ndim[tensor])
    found = getattr(c, column)[row]
    box = f"box {c.box_offset[row, :ndim].tolist()} + {c.box_size[row, :ndim].tolist()}"
    shape = f"global shape {c.global_shape[tensor, :ndim].tolist()}"
    raise LayoutError(
        what,
        tensor=c.names[tensor],
        expected=expected,
        found=f"{column} {found.tolist()}; {box} of {shape}",
    )


def _check_shapes(c: Columns) -> None:
    padded = np.arange(c.global_shape.shape[1]) >= c.ndim[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        too_large = c.global_shape.astype(np.float64).prod(axis=1) * 16 >= LIMIT
    for bad, what in (
        ((c.global_shape < 0).any(axis=1), "a negative dimension"),
        ((padded & (c.global_shape != 1)).any(axis=1), "a shape that is not padded with 1"),
        (too_large, "a tensor too large to address"),
    ):
        if bad.any():
            at = int(np.argmax(bad))
            raise LayoutError(what, tensor=c.names[at], found=c.global_shape[at].tolist())


def _check_boxes(c: Columns) -> None:
    shape = c.global_shape[c.tensor]
    inside: Bools = (c.box_offset >= 0) & (c.box_size >= 0) & (c.box_size <= shape)
    inside &= c.box_offset <= shape - np.where(inside, c.box_size, 0)
    _refuse(
        c, ~inside.all(axis=1), "a box outside of its tensor", "a box inside the global shape", "box_offset"
    )
    padded = np.arange(shape.shape[1]) >= c.ndim[c.tensor][:, None]
    loose = padded & (c.box_size != 1)
    _refuse(c, loose.any(axis=1), "a box that is not padded with 1", "padding of 1", "box_size")


def _check_axes(c: Columns) -> None:
    """Check that every dimension has its axes, in order, with extents that multiply to its size."""
    counts = np.diff(c.axis_ptr)
    row = np.repeat(np.arange(c.rows), counts)
    first = np.ones(len(row), bool)
    first[1:] = (row[1:] != row[:-1]) | (c.axis_dim[1:] != c.axis_dim[:-1])
    starts = np.flatnonzero(first)
    nest_row, nest_dim = row[starts], c.axis_dim[starts]
    ndim = c.ndim[c.tensor]
    place = np.arange(len(starts)) - np.searchsorted(nest_row, nest_row, "left")
    bad = np.bincount(nest_row, minlength=c.rows) != ndim
    bad[nest_row[nest_dim != place]] = True
    bad[row[c.axis_extent < 0]] = True
    _refuse(
        c, bad, "a view whose nests do not match its box", "a nest for every dimension, in order", "box_size"
    )
    if not len(starts):
        return
    with np.errstate(over="ignore", invalid="ignore"):
        approximate = np.multiply.reduceat(c.axis_extent.astype(np.float64), starts)
    size = c.box_size[nest_row, nest_dim]
    wrong = (approximate >= LIMIT) | (np.multiply.reduceat(c.axis_extent, starts) != size)
    bad = np.zeros(c.rows, bool)
    bad[nest_row[wrong]] = True
    _refuse(
        c, bad, "a view that has not the size of its box", "extents that multiply to the size", "box_size"
    )


def _check_spans(c: Columns) -> None:
    """Check that the view of every row lies inside its storage; an empty box touches nothing."""
    row = np.repeat(np.arange(c.rows), np.diff(c.axis_ptr))
    size = np.bincount(row, weights=_reach_as_float(c), minlength=c.rows)
    empty = (c.box_size == 0).any(axis=1)
    huge = (size + np.abs(c.view_offset.astype(np.float64))) * 16 >= LIMIT
    _refuse(c, huge & ~empty, "a view too large to address", f"below {LIMIT:.0f} bytes", "view_offset")
    usable = ~(empty | huge)[row]
    reach = np.where(usable, (c.axis_extent - 1) * np.where(usable, c.axis_stride, 0), 0)
    low = np.where(empty | huge, 0, c.view_offset) + _row_sums(np.minimum(reach, 0), c.axis_ptr)
    high = np.where(empty | huge, 0, c.view_offset) + _row_sums(np.maximum(reach, 0), c.axis_ptr) + 1
    item = ITEMSIZE[c.dtype]
    outside = ~empty & ((low < 0) | (high * item > c.storage_nbytes[c.storage]))
    if outside.any():
        at = int(np.argmax(outside))
        limit = f"bytes 0 .. {c.storage_nbytes[c.storage[at]]} of storage {c.storage[at]}"
        reached = f"bytes {low[at] * item[at]} .. {high[at] * item[at]}"
        raise LayoutError(
            "a view outside of its storage", tensor=c.names[c.tensor[at]], expected=limit, found=reached
        )


def _reach_as_float(c: Columns) -> NDArray[np.float64]:
    return np.abs(c.axis_extent.astype(np.float64) - 1) * np.abs(c.axis_stride.astype(np.float64))


def _row_sums(values: NDArray[np.int64], ptr: NDArray[np.int64]) -> NDArray[np.int64]:
    total = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=total[1:])
    return total[ptr[1:]] - total[ptr[:-1]]
