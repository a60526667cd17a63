"""Lowering: slices, buckets and slots by their plain definitions."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import PlanError
from syncline.layout import Box, Layout, Manifest, Shard, View
from syncline.layout.dtype import code
from syncline.memory.binding import Binding
from syncline.memory.region import Kind, Region
from syncline.plan import Stream, plan
from syncline.transport.base import Endpoint, Remote, Side, Staging
from syncline.transport.buckets import ALIGN, assign, pack
from syncline.transport.order import alike_together, as_it_lies, by_source
from syncline.transport.shm_link import ShmLink
from syncline.transport.shm_program import ShmProgram
from syncline.transport.tables import Boxes, Table, boxes_of, picked, sliced, tables

if TYPE_CHECKING:
    from collections.abc import Iterable

HOST = ("h",)


def boxes(sizes: list[tuple[int, ...]], itemsize: int = 4) -> Boxes:
    dims = len(sizes[0])
    size = np.array(sizes, np.int64).reshape(len(sizes), dims)
    stride = np.ones_like(size)
    for d in range(dims - 2, -1, -1):
        stride[:, d] = stride[:, d + 1] * size[:, d + 1]
    n = len(sizes)
    zero, width = np.zeros(n, np.int64), np.full(n, itemsize)
    dtype = np.full(n, code({4: "float32", 2: "bfloat16", 8: "int64"}[itemsize]), np.uint8)
    stream = Stream.of_bytes(zero, stride, width)
    return Boxes(np.arange(n), size, Stream(zero, stride, 1), stream, stream, dtype, dtype, zero, zero)


shapes = st.integers(1, 3).flatmap(
    lambda d: st.lists(st.tuples(*[st.integers(0, 9) for _ in range(d)]), min_size=1, max_size=5)
)


@given(sizes=shapes, limit=st.integers(4, 200))
def test_slices_cover_every_element_once_and_keep_their_limit(
    sizes: list[tuple[int, ...]], limit: int
) -> None:
    whole = boxes(sizes)
    cut = sliced(whole, limit)
    assert bool((cut.nbytes <= limit).all())
    for hop, size in enumerate(sizes):
        seen = np.zeros(int(np.prod(size)), np.int64)
        for i in np.nonzero(cut.hop == hop)[0]:
            for index in np.ndindex(*cut.size[i]):
                seen[cut.position.base[i] + int(np.dot(index, cut.position.stride[i]))] += 1
        assert bool((seen == 1).all())
    assert bool((np.diff(cut.hop) >= 0).all())


def test_a_limit_below_an_element_is_refused() -> None:
    with pytest.raises(PlanError, match="element"):
        sliced(boxes([(3, 3)], 8), 4)


@given(nbytes=st.lists(st.integers(0, 256), max_size=40))
def test_buckets_are_filled_in_order_and_never_overflow(nbytes: list[int]) -> None:
    sizes = np.array(nbytes, np.int64)
    bucket, offset, payload = assign(sizes, 256)
    assert bool((np.diff(bucket) >= 0).all())
    assert bool((payload <= 256).all())
    for k in range(len(payload)):
        own = np.nonzero(bucket == k)[0]
        end = 0
        for i in own:
            assert offset[i] == end
            assert offset[i] % ALIGN == 0
            end += -(-int(sizes[i]) // ALIGN) * ALIGN
        assert end == payload[k]


@settings(max_examples=40)
@given(sizes=shapes, bucket=st.sampled_from([256, 512, 4096]), inflight=st.integers(1, 3))
def test_both_ends_cut_the_same_buckets(sizes: list[tuple[int, ...]], bucket: int, inflight: int) -> None:
    staging = Staging(bucket, inflight)
    sent, received = (pack(boxes(sizes), side, staging)[1] for side in Side)
    assert [(b.nbytes, b.moved, b.hops) for b in sent] == [(b.nbytes, b.moved, b.hops) for b in received]
    assert sum(b.moved for b in sent) == int(boxes(sizes).nbytes.sum())


def test_odd_staging_is_refused() -> None:
    with pytest.raises(PlanError, match="staging"):
        pack(boxes([(4, 4)]), Side.SOURCE, Staging(bucket=300))


def test_runs_never_cross_the_border_of_two_storages() -> None:
    """Two arrays that touch in memory, registered apart: the last bytes of one, the first of the other."""
    model = [("a", 0), ("b", 1)]
    writer = Manifest.from_shards(
        [Shard(n, (64,), "uint8", Box.whole((64,)), View.simple(s, 0, (64,), (1,))) for n, s in model],
        [64, 64],
    )
    tail, head = Box((56,), (8,)), Box((0,), (8,))
    reader = Manifest.from_shards(
        [
            Shard("a", (64,), "uint8", tail, View.simple(0, 0, (8,), (1,))),
            Shard("b", (64,), "uint8", head, View.simple(0, 8, (8,), (1,))),
        ],
        [16],
    )
    made = plan(
        Layout((writer,), HOST), {"r": Layout((reader, _rest("a", 0, 56), _rest("b", 8, 56)), HOST * 3)}
    )
    cut, _, _ = boxes_of(made, made.reader("r", 0))
    found = tables(cut, positions=False)
    assert [len(t) for t in found] == [2]
    assert found[0].src_slot.tolist() == [0, 1]


def _rest(name: str, low: int, size: int) -> Manifest:
    shard = Shard(name, (64,), "uint8", Box((low,), (size,)), View.simple(0, 0, (size,), (1,)))
    return Manifest.from_shards([shard], [size])


def test_sizes_beyond_32_bits_are_only_numbers() -> None:
    side = 70_000
    total = side * side * 2
    whole = Box.whole((side, side))
    writers = [_rows(side, low, high) for low, high in ((0, 23_333), (23_333, 46_666), (46_666, side))]
    readers = [_columns(side, low, low + side // 4) for low in range(0, side, side // 4)]
    made = plan(Layout(tuple(writers), HOST * 3), {"r": Layout(tuple(readers), HOST * 4)})
    moved = 0
    for r in range(4):
        program = ShmProgram(made, made.reader("r", r), Side.DESTINATION)
        moved += program.nbytes
        for table in program.tables(digest=True):
            assert int((table.rows * table.nbytes).sum()) == program.nbytes
            last = table.src_base + (table.rows - 1) * table.src_stride + table.nbytes
            assert int(last.max()) > 2**31
            assert int(table.position.max()) > 2**32 - 2**31
    assert moved == total
    assert whole.numel * 2 == total


def _rows(side: int, low: int, high: int) -> Manifest:
    box = Box((low, 0), (high - low, side))
    shard = Shard("w", (side, side), "bfloat16", box, View.contiguous(0, 0, box.size))
    return Manifest.from_shards([shard], [box.numel * 2])


def _columns(side: int, low: int, high: int) -> Manifest:
    box = Box((0, low), (side, high - low))
    shard = Shard("w", (side, side), "bfloat16", box, View.contiguous(0, 0, box.size))
    return Manifest.from_shards([shard], [box.numel * 2])


def test_twenty_thousand_tensors_are_rebound_in_ten_milliseconds() -> None:
    count, shape = 20_000, (8, 8)
    box = Box.whole(shape)
    halves = [Box((0, 0), (4, 8)), Box((4, 0), (4, 8))]
    names = [f"t{i:05}" for i in range(count)]
    writers = [
        Manifest.from_shards(
            [
                Shard(n, shape, "bfloat16", half, View.contiguous(i, 0, half.size))
                for i, n in enumerate(names)
            ],
            [64] * count,
        )
        for half in halves
    ]
    shards = [Shard(n, shape, "bfloat16", box, View.contiguous(i, 0, shape)) for i, n in enumerate(names)]
    reader = Manifest.from_shards(shards, [128] * count)
    made = plan(Layout(tuple(writers), HOST * 2), {"r": Layout((reader,), HOST)})
    program = ShmProgram(made, made.reader("r", 0), Side.DESTINATION)
    local = [Binding.private(reader.fingerprint, 4096 + np.arange(count) * 128 + k, k) for k in range(8)]
    source = Binding(
        writers[0].fingerprint,
        1,
        np.ones(count),
        np.arange(count) * 64,
        {1: Region(1, 0, count * 64, Kind.ARENA, 1)},
    )
    links = {r: Remote(_Everywhere(r), source) for r in range(2)}
    times = []
    for binding in local:
        started = time.perf_counter()
        program.rebind(binding, links)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.010
    (table,) = program.tables(digest=False)
    assert table.dst[0] == 4096 + 7


class _Everywhere(ShmLink):
    """Stands for a link whose one region is mapped at a made-up address; nothing is read through it."""

    def __init__(self, rank: int) -> None:
        self._peer = Endpoint(job="j", id=str(rank), name=f"writer {rank}", host="h", uid=0)

    def pointers(self, regions: Iterable[tuple[int, int]]) -> dict[int, int]:
        return {region: 1 << 20 for region, _ in regions}


def test_boxes_can_be_picked() -> None:
    whole = boxes([(2, 3), (4, 5), (6, 7)])
    some = picked(whole, np.array([2, 0]))
    assert some.hop.tolist() == [2, 0]
    assert some.size.tolist() == [[6, 7], [2, 3]]


def moves(table: Table) -> dict[tuple[int, int], tuple[int, int, int, int]]:
    """Every row of a table: (slot, source byte) -> (position, destination byte, elements, hop)."""
    found = {}
    for i in range(len(table)):
        for row in range(int(table.rows[i])):
            place = int(table.src_base[i] + row * table.src_stride[i])
            position = int(table.position[i] + row * table.position_stride[i])
            target = int(table.dst_base[i] + row * table.dst_stride[i])
            key = (int(table.src_slot[i]), place)
            assert key not in found
            found[key] = (position, target, int(table.elems[i]), int(table.hop[i]))
    return found


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.integers(1, 2000))
def test_the_order_of_the_source_changes_no_row(rows: int, width: int, cuts: int, span: int) -> None:
    """Column cuts of one matrix, as several hops: the same rows, neighbours one after another."""
    size = np.full((cuts, 2), (rows, width), np.int64)
    stride = np.broadcast_to(np.array([cuts * width, 1], np.int64), size.shape)
    base, zero = np.arange(cuts) * width, np.zeros(cuts, np.int64)
    stream = Stream.of_bytes(base, stride, np.full(cuts, 4))
    dtype = np.full(cuts, code("float32"), np.uint8)
    made = Boxes(np.arange(cuts), size, Stream(base, stride, 1), stream, stream, dtype, dtype, zero, zero)
    (table,) = tables(made, positions=True)
    ordered = by_source(table, span)
    assert moves(ordered) == moves(table)
    assert (np.diff(ordered.src_base) > 0).all()
    assert (ordered.rows <= np.maximum(1, span // np.maximum(1, ordered.src_stride))).all()


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([3, 8, 16])), min_size=1, max_size=12))
def test_hops_of_one_run_and_one_length_come_together_and_nothing_else_changes(
    shapes: list[tuple[int, int]],
) -> None:
    count = len(shapes)
    size = np.array(shapes, np.int64)
    stride = np.stack([np.full(count, 20), np.ones(count, np.int64)], axis=1)
    base, zero = np.arange(count) * 100, np.zeros(count, np.int64)
    stream = Stream.of_bytes(base, stride, np.full(count, 4))
    dtype = np.full(count, code("float32"), np.uint8)
    made = Boxes(np.arange(count), size, Stream(base, stride, 1), stream, stream, dtype, dtype, zero, zero)
    (table,) = tables(made, positions=True)
    ordered = alike_together(table)
    assert moves(ordered) == moves(table)
    kinds = [(int(r) == 1, int(n)) for r, n in zip(ordered.rows, ordered.nbytes, strict=True)]
    singles = [n for single, n in kinds if single]
    assert kinds[: len(singles)] == [(True, n) for n in sorted(singles)]
    rest = [int(h) for h, (single, _) in zip(ordered.hop, kinds, strict=True) if not single]
    assert rest == sorted(rest)


@given(st.permutations(range(6)), st.permutations(range(6)))
def test_readers_of_the_same_storages_go_through_them_in_one_order(one: list[int], other: list[int]) -> None:
    def order(slots: list[int]) -> tuple[list[int], list[int]]:
        count = len(slots)
        size = np.full((count, 2), 3, np.int64)
        base, zero = np.arange(count) * 100, np.zeros(count, np.int64)
        stride = np.broadcast_to(np.array([20, 1], np.int64), size.shape)
        stream = Stream.of_bytes(base, stride, np.full(count, 4))
        dtype = np.full(count, code("float32"), np.uint8)
        hop, slot = np.arange(count), np.array(slots, np.int64)
        made = Boxes(hop, size, Stream(base, stride, 1), stream, stream, dtype, dtype, slot, zero)
        (table,) = tables(made, positions=True)
        assert moves(as_it_lies(table)) == moves(table)
        return as_it_lies(table).src_slot.tolist(), alike_together(table).src_slot.tolist()

    assert order(one) == order(other) == (list(range(6)), list(range(6)))
