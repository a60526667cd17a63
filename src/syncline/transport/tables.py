"""From hops to descriptor tables with relative addresses, and from bindings to absolute ones.

A table's addresses are (slot, byte offset) pairs; a slot is one storage of one rank. `Slots.resolve` turns a
binding into one address a slot, and `Table.bind` adds the two: that is all a changed binding costs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from syncline.errors import PlanError, TransportError
from syncline.layout.dtype import ITEMSIZE, name_of
from syncline.plan.lower import Stream, lower

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from syncline.memory.binding import Binding
    from syncline.plan import Hops, Plan

    I64 = NDArray[np.int64]
    U64 = NDArray[np.uint64]
    I32 = NDArray[np.int32]
    U8 = NDArray[np.uint8]

SLICE_BYTES = 4 << 20
"""Boxes are sliced to this many wire bytes, so that a run can be stopped within milliseconds."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes to move, each with the layout of its elements on both sides; rows may be slices of hops.

    Attributes:
        hop: i64[N], the hop each belongs to.
        position: canonical stream, in elements of the checkpoint tensor.
        src: source stream in bytes of its storage; dst: likewise, or None for a pass that writes nothing.
        size: i64[N, D].
        src_dtype, wire_dtype: u8[N] codes.
        src_slot, dst_slot: i64[N].
    """

    hop: I64
    size: I64
    position: Stream
    src: Stream
    dst: Stream | None
    src_dtype: U8
    wire_dtype: U8
    src_slot: I64
    dst_slot: I64

    @property
    def nbytes(self) -> I64:
        """i64[N], wire bytes."""
        return np.prod(self.size, axis=1) * ITEMSIZE[self.wire_dtype]


@dataclass(frozen=True)
class Slots:
    """The storages that a table touches, and how far into each it reaches.

    Attributes:
        rank: i64[S], whose storage; storage: i64[S], its number there.
        low, high: i64[S], bytes of the storage that are touched: [low, high).
    """

    rank: I64
    storage: I64
    low: I64 = field(repr=False)
    high: I64 = field(repr=False)

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks involved, ascending."""
        return [int(r) for r in np.unique(self.rank)]

    @cached_property
    def _rows(self) -> dict[int, I64]:
        return {rank: np.nonzero(self.rank == rank)[0] for rank in self.ranks}

    def storages(self, rank: int) -> I64:
        """Return the storages of one rank that are touched."""
        return self.storage[self._rows[rank]]

    def resolve(self, places: Mapping[int, Place], who: str) -> I64:
        """Return i64[S]: the address of each storage's first byte.

        Args:
            places: of every rank's storages.
            who: the side, for errors.

        Raises:
            TransportError: a rank without place, a storage that its binding lacks, a region that is not
                mapped, or a range outside its region.
        """
        out = np.empty(len(self.rank), np.int64)
        for rank in self.ranks:
            place, rows = places.get(rank), self._rows[rank]
            if place is None:
                raise TransportError(f"no binding of {who} {rank}", expected=self.ranks, found=sorted(places))
            out[rows] = self._addresses(place, rows, f"{who} {rank}")
        return out

    def _addresses(self, place: Place, rows: I64, who: str) -> I64:
        binding, storage = place.binding, self.storage[rows]
        if len(storage) and int(storage.max()) >= len(binding):
            raise TransportError(
                "a binding of fewer storages than its manifest",
                expected=f"more than {int(storage.max())}",
                found=len(binding),
                rank=who,
            )
        region, offset = binding.region[storage], binding.offset[storage]
        base, limit = place.of_regions(region, who)
        # No sum wraps: offsets are addresses in private memory, and below the region's size elsewhere.
        outside = (offset + self.low[rows] < 0) | (offset > limit - self.high[rows])
        if outside.any():
            i = int(np.argmax(outside))
            touched = offset[i] + self.low[rows][i], offset[i] + self.high[rows][i]
            size = int(np.broadcast_to(limit, region.shape)[i])
            raise TransportError(
                f"a descriptor reaches outside the region of storage {int(storage[i])}",
                expected=f"within {size} bytes of region {int(region[i])}",
                found=f"[{int(touched[0])}, {int(touched[1])})",
                rank=who,
            )
        return base + offset


@dataclass(frozen=True, slots=True)
class Place:
    """A binding, and where the regions that it names lie in this process.

    Attributes:
        binding: of one rank's storages.
        pointers: address by region id; regions that are not here are missing.
    """

    binding: Binding
    pointers: Mapping[int, int]

    @classmethod
    def local(cls, binding: Binding) -> Place:
        """Return the place of this process's own binding."""
        return cls(binding, {key: r.ptr for key, r in binding.regions.items() if r.mapped})

    def of_regions(self, region: NDArray[np.int32], who: str) -> tuple[I64 | np.int64, I64 | np.int64]:
        """Return address and size of each row's region; one of each where all rows share a region."""
        if len(region) and bool((region == region[0]).all()):
            address, nbytes = self._one(int(region[0]), who)
            return np.int64(address), np.int64(nbytes)
        ids, which = np.unique(region, return_inverse=True)
        found = np.array([self._one(int(i), who) for i in ids], np.int64).reshape(-1, 2)[which]
        return found[:, 0], found[:, 1]

    def _one(self, region: int, who: str) -> tuple[int, int]:
        described = self.binding.regions.get(region)
        if described is None:
            raise TransportError(
                "a binding names a region that it does not describe",
                expected=sorted(self.binding.regions),
                found=region,
                rank=who,
            )
        if region not in self.pointers:
            raise TransportError(
                "a binding's region is not mapped in this process", found=described, rank=who
            )
        return self.pointers[region], described.nbytes


@dataclass
class Table:
    """Descriptors of one kind of work: a plain copy (one dtype on both sides), or one cast.

    Attributes:
        src_dtype, wire_dtype: torch's names; equal for plain copies, which may mix dtypes of any size.
        rows, elems: i64[R]; nbytes: i64[R], wire bytes of a row; itemsize: u8[R], of the wire dtype.
        hop: i32[R], non-decreasing only within a slice of a hop.
        position, position_stride: i64[R], elements.
        src, dst: i64[R], absolute after `bind`; src_stride, dst_stride: i64[R], bytes.
    """

    src_dtype: str
    wire_dtype: str
    rows: I64
    elems: I64
    nbytes: I64
    itemsize: U8
    hop: I32
    position: I64
    position_stride: I64
    src_base: I64
    src_stride: I64
    src_slot: I64
    dst_base: I64
    dst_stride: I64
    dst_slot: I64
    src: I64 = field(init=False)
    dst: I64 = field(init=False)
    box: I64 = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        self.src, self.dst = np.zeros_like(self.src_base), np.zeros_like(self.dst_base)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def casts(self) -> bool:
        """Whether elements change their dtype."""
        return self.src_dtype != self.wire_dtype

    @cached_property
    def as_bytes(self) -> tuple[U64, U64, U64, U64, U64, U64]:
        """(dst, src, rows, nbytes, dst_stride, src_stride) as kernels take them: the same memory."""
        u = np.uint64
        strides = self.dst_stride.view(u), self.src_stride.view(u)
        return self.dst.view(u), self.src.view(u), self.rows.view(u), self.nbytes.view(u), *strides

    @cached_property
    def as_elements(self) -> tuple[U64, U64, U64, U64, U64, U64, U64, U64]:
        """(dst, src, rows, elems, dst_stride, src_stride, position, position_stride), likewise."""
        dst, src, rows, _, *strides = self.as_bytes
        u = np.uint64
        position = self.position.view(u), self.position_stride.view(u)
        return dst, src, rows, self.elems.view(u), strides[0], strides[1], *position

    def bind_src(self, address: I64) -> None:
        """Point the source half at storages ``address`` i64[slots]."""
        np.take(address, self.src_slot, out=self.src)
        self.src += self.src_base

    def bind_dst(self, address: I64) -> None:
        """Point the destination half at storages ``address`` i64[slots]."""
        np.take(address, self.dst_slot, out=self.dst)
        self.dst += self.dst_base


def boxes_of(plan: Plan, hops: Hops) -> tuple[Boxes, Slots, Slots]:
    """Return the hops as boxes, in their order, with the storages they come from and go to."""
    src, dst = hops.source_stream(), hops.destination_stream()
    position = Stream.of_positions(hops.offset, plan.global_shape[hops.tensor])
    src_slot, src_slots = slots_of(hops.src, hops.src_storage, hops.size, src)
    dst_slot, dst_slots = slots_of(hops.dst, hops.dst_storage, hops.size, dst)
    rows = np.arange(len(hops))
    boxes = Boxes(rows, hops.size, position, src, dst, hops.src_dtype, hops.dst_dtype, src_slot, dst_slot)
    return boxes, src_slots, dst_slots


def slots_of(
    rank: NDArray[np.integer], storage: NDArray[np.integer], size: I64, stream: Stream
) -> tuple[I64, Slots]:
    """Return each row's slot i64[N], and the slots with the byte ranges touched in them."""
    pair = np.stack([rank.astype(np.int64), storage.astype(np.int64)], axis=1)
    unique, slot = _distinct(pair)
    reach = (np.maximum(size, 1) - 1) * stride_of(stream)
    first = stream.base + np.minimum(reach, 0).sum(axis=1)
    last = stream.base + np.maximum(reach, 0).sum(axis=1) + np.asarray(stream.unit, np.int64)
    live = (size > 0).all(axis=1)
    low = np.full(len(unique), np.iinfo(np.int64).max)
    high = np.zeros(len(unique), np.int64)
    np.minimum.at(low, slot[live], first[live])
    np.maximum.at(high, slot[live], last[live])
    return slot, Slots(unique[:, 0], unique[:, 1], np.minimum(low, high), high)


def _distinct(pair: I64) -> tuple[I64, I64]:
    """Return the distinct rows of i64[N, 2], sorted, and which of them each row is."""
    order = np.lexsort((pair[:, 1], pair[:, 0]))
    new = np.ones(len(pair), np.bool_)
    new[1:] = (pair[order[1:]] != pair[order[:-1]]).any(axis=1)
    which = np.empty(len(pair), np.int64)
    which[order] = np.cumsum(new) - 1
    return pair[order[new]], which


def stride_of(stream: Stream) -> I64:
    """Return i64[N, D]: the stream's strides."""
    return np.asarray(stream.stride, np.int64)


def sliced(boxes: Boxes, limit: int) -> Boxes:
    """Cut every box of more than ``limit`` wire bytes into slices of at most so many, outer dimensions first.

    Raises:
        PlanError: the limit is smaller than an element.
    """
    itemsize = ITEMSIZE[boxes.wire_dtype]
    if len(itemsize) and limit < int(itemsize.max()):
        raise PlanError(
            "a slice must hold an element", expected=f"at least {int(itemsize.max())} bytes", found=limit
        )
    row = np.arange(len(boxes.hop))
    low, size = np.zeros_like(boxes.size), boxes.size
    for d in range(boxes.size.shape[1]):
        item = itemsize[row]
        if not bool(np.any(np.prod(size, axis=1) * item > limit)):
            break
        row, low, size = _slice_dim(d, row, low, size, item, limit)
    if len(row) == len(boxes.hop):
        return boxes
    return picked(boxes, row, low, size)


def _slice_dim(d: int, row: I64, low: I64, size: I64, item: I64, limit: int) -> tuple[I64, I64, I64]:
    inner = np.prod(size[:, d + 1 :], axis=1) * item
    big = inner * size[:, d] > limit
    chunk = np.where(big, np.maximum(limit // np.maximum(inner, 1), 1), np.maximum(size[:, d], 1))
    count = np.maximum(-(-size[:, d] // chunk), 1)
    at = np.repeat(np.arange(len(row)), count)
    place = np.arange(len(at)) - np.repeat(np.cumsum(count) - count, count)
    new_low, new_size = low[at], size[at]
    start = place * chunk[at]
    new_low[:, d] += start
    new_size[:, d] = np.minimum(chunk[at], new_size[:, d] - start)
    return row[at], new_low, new_size


def picked(boxes: Boxes, row: I64, low: I64 | None = None, size: I64 | None = None) -> Boxes:
    """Return some boxes by row, or parts of them: corners ``low`` within the box and sizes, i64[N, D]."""
    corner = np.zeros((len(row), boxes.size.shape[1]), np.int64) if low is None else low

    def moved(stream: Stream) -> Stream:
        stride = stride_of(stream)[row]
        unit = stream.unit
        return Stream(
            stream.base[row] + (corner * stride).sum(axis=1),
            stride,
            unit[row] if isinstance(unit, np.ndarray) else unit,
        )

    return Boxes(
        boxes.hop[row],
        boxes.size[row] if size is None else size,
        moved(boxes.position),
        moved(boxes.src),
        None if boxes.dst is None else moved(boxes.dst),
        boxes.src_dtype[row],
        boxes.wire_dtype[row],
        boxes.src_slot[row],
        boxes.dst_slot[row],
    )


def tables(boxes: Boxes, *, positions: bool) -> list[Table]:
    """Lower boxes to descriptor tables: one of plain copies (if any), then one for each pair of dtypes cast.

    Args:
        boxes: sliced as needed; their order is kept.
        positions: whether the canonical positions are wanted; runs are longer without.
    """
    pair = boxes.src_dtype.astype(np.int64) * 256 + boxes.wire_dtype
    pair[boxes.src_dtype == boxes.wire_dtype] = -1
    found = []
    for kind in np.unique(pair):
        at = np.nonzero(pair == kind)[0]
        table = _table(boxes, at, positions=positions)
        if len(table):
            found.append(table)
    return found


def _table(boxes: Boxes, at: I64, *, positions: bool) -> Table:
    streams = [_at(boxes.src, at)]
    if boxes.dst is not None:
        streams.append(_at(boxes.dst, at))
    if positions:
        streams.append(_at(boxes.position, at))
    runs = lower(boxes.size[at], streams)
    box = at[runs.hop]
    zero = np.zeros(len(runs), np.int64)
    dst = (runs.base[1], runs.stride[1]) if boxes.dst is not None else (zero, zero)
    position = (runs.base[-1], runs.stride[-1]) if positions else (zero, zero)
    itemsize = ITEMSIZE[boxes.wire_dtype[box]]
    first = int(at[0])
    return Table(
        src_dtype=name_of(int(boxes.src_dtype[first])),
        wire_dtype=name_of(int(boxes.wire_dtype[first])),
        rows=runs.rows.astype(np.int64),
        elems=runs.row_elems.astype(np.int64),
        nbytes=runs.row_elems * itemsize,
        itemsize=itemsize.astype(np.uint8),
        hop=boxes.hop[box].astype(np.int32),
        position=position[0].astype(np.int64),
        position_stride=position[1].astype(np.int64),
        src_base=runs.base[0].astype(np.int64),
        src_stride=runs.stride[0].astype(np.int64),
        src_slot=boxes.src_slot[box],
        dst_base=dst[0].astype(np.int64),
        dst_stride=dst[1].astype(np.int64),
        dst_slot=boxes.dst_slot[box],
        box=box,
    )


def _at(stream: Stream, at: I64) -> Stream:
    unit = stream.unit
    return Stream(stream.base[at], stream.stride[at], unit[at] if isinstance(unit, np.ndarray) else unit)
