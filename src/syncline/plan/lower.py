"""Lowering: strided boxes to few and long runs, over any number of streams at once.

A stream says where the elements of each hop lie in one address space: bytes of a source storage, bytes of a
destination storage, positions in the checkpoint tensor. A descriptor is ``rows`` rows of ``row_elems``
elements; within a row every stream is contiguous, and each stream has its own stride from row to row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from syncline.errors import PlanError
from syncline.layout.hashing import kinds
from syncline.plan.columns import changes, expand, pointers, row_major

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncline.plan.columns import I32, I64, Bools, Ints


_MANY = 4096  # hops from which on kinds of hops are looked for


class Stream(NamedTuple):
    """Where the elements of H hops lie in one address space.

    Attributes:
        base: i64[H], the place of each hop's corner.
        stride: i64[H, D], from one index to the next in each dimension.
        unit: distance of neighbouring elements, one number or i64[H]; None: the item size given to `lower`.
            Positions, which count elements, have the unit 1.
    """

    base: I64
    stride: I64
    unit: I64 | int | None = None

    @classmethod
    def of_bytes(cls, base: I64, stride: I64, itemsize: I64) -> Stream:
        """Return the byte stream of a view given in elements of ``itemsize`` i64[H] bytes."""
        return cls(base * itemsize, stride * itemsize[:, None], itemsize)

    @classmethod
    def of_positions(cls, offset: I64, shape: I64) -> Stream:
        """Return the canonical flat positions of boxes at ``offset`` of tensors ``shape``, both i64[H, D]."""
        stride = row_major(shape)
        return cls((offset * stride).sum(axis=1), stride, 1)


@dataclass(frozen=True, slots=True)
class Runs:
    """Descriptors, in hop order unless hops were merged.

    Attributes:
        base: one i64[R] a stream, the place of each descriptor's first element.
        stride: one i64[R] a stream, from row to row; 0 where there is one row.
        rows: i64[R].
        row_elems: i64[R], elements of a row.
        hop: i32[R], the hop each descriptor belongs to (the first, where hops were merged).
    """

    base: tuple[I64, ...]
    stride: tuple[I64, ...]
    rows: I64
    row_elems: I64
    hop: I32

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, which: Ints | Bools) -> Runs:
        """Return some of the descriptors, by index or mask."""
        base, stride = tuple(b[which] for b in self.base), tuple(s[which] for s in self.stride)
        return Runs(base, stride, self.rows[which], self.row_elems[which], self.hop[which])


@dataclass(slots=True)
class _Nest:
    """Up to D merged dimensions of every hop, innermost first; ``depth`` says how many are in use."""

    depth: I64
    extent: I64  # [H, D]
    stride: list[I64]  # a stream: [H, D]


def lower(
    extents: I64, streams: Sequence[Stream], itemsize: I64 | int = 1, merge: Ints | None = None
) -> Runs:
    """Compile strided boxes into descriptors, as few and long as the streams allow.

    Dimensions that are contiguous with their neighbour in *all* streams are merged, the innermost one becomes
    the row if it is contiguous in all streams, the longest of the others becomes the rows, and the rest are
    written out as descriptors. Empty hops have none.

    Args:
        extents: i64[H, D], elements of each hop's box.
        streams: at least one; see `Stream`.
        itemsize: unit of the streams that bring none.
        merge: [H], optional: one-row descriptors of hops with the same number here become one where every
            stream goes on without a gap. Descriptors are then in the order of these numbers and of the first
            stream. Give the same number only to hops between the same two storages, and leave it out where
            every hop needs its own descriptors (digests).

    Raises:
        PlanError: no stream, or columns of different lengths.
    """
    units = _units(extents, streams, itemsize)
    hop = np.arange(len(extents))
    parts = [Stream(s.base, s.stride, u) for s, u in zip(streams, units, strict=True)]
    if not (extents > 0).all():
        hop = np.nonzero((extents > 0).all(axis=1))[0]
        extents = extents.take(hop, axis=0)
        parts = [
            Stream(s.base[hop], s.stride.take(hop, axis=0), u[hop]) for s, u in zip(parts, units, strict=True)
        ]
    runs = _alike(hop, extents, parts)
    return runs if merge is None else _merge_hops(runs, merge, [u[runs.hop] for u in units])


def _alike(hop: I64, extents: I64, streams: list[Stream]) -> Runs:
    """Lower many hops by lowering one of each kind: of equal extents, strides and units."""
    if len(hop) < _MANY:
        return _descriptors(hop, _merge_dims(extents, streams), streams)
    units = [np.asarray(s.unit)[:, None] for s in streams]
    tables = [extents, *(s.stride for s in streams), *units]
    order, first = kinds(tables)
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(first) - 1
    sample = order[first]
    same = all(bool((t.take(sample, axis=0).take(number, axis=0) == t).all()) for t in tables)
    if not same or 4 * len(sample) > len(hop):
        return _descriptors(hop, _merge_dims(extents, streams), streams)
    few = [
        Stream(np.zeros(len(sample), np.int64), s.stride[sample], np.asarray(s.unit)[sample]) for s in streams
    ]
    runs = _descriptors(np.arange(len(sample)), _merge_dims(extents[sample], few), few)
    ptr = pointers(np.bincount(runs.hop, minlength=len(sample)))
    if len(runs) == len(sample):
        at, of = slice(None), number
    else:
        at, place = expand(np.diff(ptr)[number])
        of = ptr[number[at]] + place
    base = tuple(s.base[at] + b.take(of) for s, b in zip(streams, runs.base, strict=True))
    stride = tuple(s.take(of) for s in runs.stride)
    return Runs(base, stride, runs.rows.take(of), runs.row_elems.take(of), hop[at].astype(np.int32))


def _units(extents: I64, streams: Sequence[Stream], itemsize: I64 | int) -> list[I64]:
    if not streams:
        raise PlanError("lowering needs at least one stream")
    for s in streams:
        if s.base.shape != extents.shape[:1] or s.stride.shape != extents.shape:
            raise PlanError(
                "a stream does not fit the hops",
                expected=f"{extents.shape[0]} bases, strides of shape {extents.shape}",
                found=f"bases {s.base.shape}, strides {s.stride.shape}",
            )
    chosen = [itemsize if s.unit is None else s.unit for s in streams]
    return [np.broadcast_to(np.asarray(u, np.int64), extents.shape[:1]) for u in chosen]


def _merge_dims(extents: I64, streams: list[Stream]) -> _Nest:
    """Drop dimensions of one element and merge neighbours that are contiguous in all streams."""
    hops, dims = extents.shape
    order = _outermost_first(extents, streams)
    rows = np.arange(hops)
    depth = np.zeros(hops, np.int64)
    extent = np.ones((hops, dims), np.int64)
    stride = [np.zeros((hops, dims), np.int64) for _ in streams]
    for d in range(dims - 1, -1, -1):
        at = order[:, d]
        n = extents[rows, at]
        step = [s.stride[rows, at] for s in streams]
        top = np.maximum(depth - 1, 0)
        wide, length = n > 1, extent[rows, top]
        joins = wide & (depth > 0)
        for own, outer in zip(stride, step, strict=True):
            joins &= own[rows, top] * length == outer
        extent[rows[joins], top[joins]] *= n[joins]
        push = np.nonzero(wide & ~joins)[0]
        extent[push, depth[push]] = n[push]
        for own, outer in zip(stride, step, strict=True):
            own[push, depth[push]] = outer[push]
        depth[push] += 1
    return _Nest(depth, extent, stride)


def _outermost_first(extents: I64, streams: list[Stream]) -> I64:
    """Return i64[H, D]: dimensions by falling stride (summed over streams), so that neighbours can merge."""
    weight = np.zeros_like(extents)
    for s in streams:
        unit = np.asarray(s.unit)[:, None]
        weight += np.abs(s.stride) // np.maximum(unit, 1)
    order = np.broadcast_to(np.arange(extents.shape[1]), extents.shape).copy()
    unsorted = (weight[:, 1:] > weight[:, :-1]).any(axis=1)
    order[unsorted] = np.argsort(-weight[unsorted], axis=1, kind="stable")
    return order


def _descriptors(hop: I64, nest: _Nest, streams: list[Stream]) -> Runs:
    hops, dims = nest.extent.shape
    rows_of = np.arange(hops)
    contiguous = nest.depth > 0
    for own, s in zip(nest.stride, streams, strict=True):
        contiguous &= own[:, 0] == s.unit
    row_elems = np.where(contiguous, nest.extent[:, 0], 1)
    outer = nest.extent.copy()
    outer[contiguous, 0] = 1
    longest = np.argmax(outer, axis=1)
    rows = outer[rows_of, longest]
    row_stride = [np.where(rows > 1, own[rows_of, longest], 0) for own in nest.stride]
    outer[rows_of, longest] = 1
    copies = np.prod(outer, axis=1)
    if hops == 0 or int(copies.max()) == 1:
        base = tuple(s.base for s in streams)
        return Runs(base, tuple(row_stride), rows, row_elems, hop.astype(np.int32))
    at, place = expand(copies)
    base = [s.base[at] for s in streams]
    for d in range(dims):  # innermost first: it varies fastest
        index, place = place % outer[at, d], place // outer[at, d]
        for k, own in enumerate(nest.stride):
            base[k] += index * own[at, d]
    return Runs(
        tuple(base), tuple(s[at] for s in row_stride), rows[at], row_elems[at], hop[at].astype(np.int32)
    )


def _merge_hops(runs: Runs, merge: Ints, units: list[I64]) -> Runs:
    """Merge a one-row descriptor into the one before it where all streams continue within one merge group."""
    if not len(runs):
        return runs
    order = np.lexsort((runs.base[0], merge[runs.hop]))
    runs, units = runs.take(order), [unit[order] for unit in units]
    joined: Bools = np.zeros(len(runs), np.bool_)
    key = merge[runs.hop]
    joined[1:] = (key[1:] == key[:-1]) & (runs.rows[1:] == 1) & (runs.rows[:-1] == 1)
    for base, unit in zip(runs.base, units, strict=True):
        follows = base[:-1] + runs.row_elems[:-1] * unit[:-1] == base[1:]
        joined[1:] &= follows & ~changes(unit)[1:]
    first = np.nonzero(~joined)[0]
    return replace(runs.take(first), row_elems=np.add.reduceat(runs.row_elems, first))
