"""Packing for two-sided transports: which slice of a hop lies where in which bucket.

On the wire a slice is contiguous, row-major within its box, in the wire dtype, at a multiple of `ALIGN`. Both
ends derive the same buckets from the same rows of the plan and the same `Staging`, so no table of contents
travels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from syncline.errors import PlanError
from syncline.layout.dtype import ITEMSIZE
from syncline.plan.columns import row_major
from syncline.plan.lower import Stream
from syncline.transport.base import Side
from syncline.transport.tables import Boxes, Table, sliced, tables
from syncline.transport.work import Part

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncline.transport.base import Staging

    I64 = NDArray[np.int64]

ALIGN = 16
MIN_BUCKET = 256


@dataclass(frozen=True)
class Bucket:
    """One bucket of one peer.

    Attributes:
        nbytes: payload on the wire, gaps between slices included.
        parts: the work that packs or unpacks it.
        moved: wire bytes of its slices; hops: hops that end in it.
    """

    nbytes: int
    parts: tuple[Part, ...]
    moved: int
    hops: int


def assign(nbytes: I64, limit: int) -> tuple[I64, I64, I64]:
    """Fill buckets in order.

    Args:
        nbytes: i64[N], of each slice, none above ``limit``.
        limit: bytes of a bucket, a multiple of `ALIGN`.

    Returns:
        bucket i64[N], offset i64[N] within it, payload i64[B] of every bucket.
    """
    padded = -(-nbytes // ALIGN) * ALIGN
    ends = np.cumsum(padded)
    begins = ends - padded
    bucket, payload = np.zeros(len(nbytes), np.int64), []
    start = 0
    while start < len(nbytes):
        stop = int(np.searchsorted(ends, begins[start] + limit, side="right"))
        bucket[start:stop] = len(payload)
        payload.append(int(ends[stop - 1] - begins[start]))
        start = stop
    first = np.searchsorted(bucket, np.arange(len(payload)))
    offset = begins - begins[first][bucket] if payload else begins
    return bucket, offset, np.array(payload, np.int64)


def pack(boxes: Boxes, side: Side, staging: Staging) -> tuple[list[Table], list[Bucket]]:
    """Lower one peer's boxes to tables between live memory and staging slots, bucket by bucket.

    Bucket ``k`` uses slot ``k % staging.inflight`` of the peer's staging memory: that is the wire half's slot
    in the tables.
    """
    if staging.bucket < MIN_BUCKET or staging.bucket % ALIGN or staging.inflight < 1:
        raise PlanError(
            "staging too small or odd",
            expected=f"buckets of at least {MIN_BUCKET} bytes, a multiple of {ALIGN}; one in flight or more",
            found=staging,
        )
    # Slices of a quarter bucket leave less of a bucket empty than whole ones would.
    cut = sliced(boxes, max(staging.bucket // 4, ALIGN))
    bucket, offset, payload = assign(cut.nbytes, staging.bucket)
    itemsize = ITEMSIZE[cut.wire_dtype]
    wire = Stream(offset, row_major(cut.size) * itemsize[:, None], itemsize)
    slot = bucket % staging.inflight
    if side is Side.SOURCE:
        staged = replace(cut, dst=wire, dst_slot=slot)
    else:
        staged = replace(cut, src=wire, src_slot=slot, src_dtype=cut.wire_dtype)
    made = tables(staged, positions=True)
    return made, _cut(made, bucket, payload)


def _cut(made: list[Table], bucket: I64, payload: I64) -> list[Bucket]:
    """Distribute the tables' descriptors, which are in bucket order, over the buckets."""
    numbers = np.arange(len(payload) + 1)
    found: list[list[Part]] = [[] for _ in payload]
    for table in made:
        edges = np.searchsorted(bucket[table.box], numbers).tolist()
        for k, (start, stop) in enumerate(pairwise(edges)):
            if stop > start:
                found[k].append(_part(table, start, stop))
    return [
        Bucket(int(n), tuple(own), sum(p.nbytes for p in own), sum(p.hops for p in own))
        for n, own in zip(payload, found, strict=True)
        if n
    ]


def _part(table: Table, start: int, stop: int) -> Part:
    nbytes = int((table.rows[start:stop] * table.nbytes[start:stop]).sum())
    following = np.append(table.hop[start + 1 : stop], table.hop[stop] if stop < len(table) else -1)
    return Part(table, start, stop, nbytes, int(np.count_nonzero(following != table.hop[start:stop])))
