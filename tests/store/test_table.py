"""Tables: put by some, read by others under another sharding, in place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from syncline.errors import (
    CoverageError,
    DeadlineError,
    LayoutError,
    NameMismatchError,
    ProtocolError,
    ShapeMismatchError,
    UndeclaredCastError,
    UnknownVersionError,
)
from syncline.store.keys import ShardedKey
from syncline.store.segments import SegmentPool
from syncline.store.table import TensorTable

if TYPE_CHECKING:
    from collections.abc import Iterator

FULL = torch.arange(60.0).reshape(6, 10)


@pytest.fixture
def table(run_dir: Path) -> Iterator[TensorTable]:
    with TensorTable("kv", job="table", rank=0) as made:
        yield made


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def put_grid(table: TensorTable, version: int) -> None:
    """A 2x3 grid of shards, as six trainers would put them."""
    for i in range(2):
        for j, (start, stop) in enumerate([(0, 3), (3, 7), (7, 10)]):
            key = ShardedKey("w", (6, 10), (3 * i, start))
            table.put(version, key, (FULL + version)[3 * i : 3 * i + 3, start:stop])
            assert j < 3
    table.complete(version)


def test_a_request_that_spans_several_shards_is_filled_in_place(table: TensorTable) -> None:
    put_grid(table, 1)
    holder = torch.full((8, 12), -1.0)
    into = holder[1:5, 2:9]
    returned = table.get(ShardedKey("w", (6, 10), (1, 1)), into)
    assert returned is into
    assert torch.equal(into, (FULL + 1)[1:5, 1:8])
    outside = torch.ones(8, 12, dtype=torch.bool)
    outside[1:5, 2:9] = False
    assert (holder[outside] == -1).all()


def test_shapes_and_dtypes_of_every_kind_come_back(table: TensorTable) -> None:
    values = {
        "scalar": torch.tensor(3.5),
        "half": torch.tensor(2.5, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "one": torch.tensor([1.0]),
        "empty": torch.empty(0, 4),
        "transposed": FULL.t(),
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "strided": FULL[:, ::3],
    }
    table.multi_put(1, values)
    table.complete(1)
    into = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in values.items()}
    table.multi_get(into)
    assert all(torch.equal(into[name], value) for name, value in values.items())


def test_versions_are_kept_and_dropped_and_memory_is_used_again(table: TensorTable) -> None:
    for version in range(1, 8):
        put_grid(table, version)
        assert torch.equal(table.get("w", torch.empty(6, 10)), FULL + version)
    assert torch.equal(table.get("w", torch.empty(6, 10), version=6), FULL + 6)
    with pytest.raises(UnknownVersionError):
        table.get("w", torch.empty(6, 10), version=5)
    assert len(table._pool) == 1


def test_scan_lists_by_prefix(table: TensorTable) -> None:
    table.multi_put(
        1, {"a.x": torch.zeros(2, 3), "a.y": torch.zeros((), dtype=torch.int64), "b": torch.zeros(1)}
    )
    table.complete(1)
    assert [(e.name, e.shape, e.dtype) for e in table.scan("a.")] == [
        ("a.x", (2, 3), "float32"),
        ("a.y", (), "int64"),
    ]


def test_a_version_is_sealed_by_its_last_writer(run_dir: Path) -> None:
    with (
        TensorTable("t", job="two", rank=0, world=2) as first,
        TensorTable("t", job="two", rank=1, world=2) as second,
        TensorTable("t", job="two") as reader,
    ):
        first.put(1, ShardedKey("w", (6, 10), (0, 0)), FULL[:2])
        first.complete(1)
        with pytest.raises(DeadlineError, match="complete"):
            reader.get("w", torch.empty(6, 10), timeout=0.2)
        second.put(1, ShardedKey("w", (6, 10), (2, 0)), FULL[2:])
        second.complete(1)
        assert torch.equal(reader.get("w", torch.empty(6, 10), timeout=5.0), FULL)


def test_dtensors_say_themselves_where_they_lie(table: TensorTable) -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    try:
        mesh = init_device_mesh("cpu", (3,))
        local = DTensor.from_local(FULL[2:4].clone(), mesh, [Shard(0)], shape=(6, 10), stride=(10, 1))
        table.put(1, "w", local)
        table.complete(1)
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(table.get(ShardedKey("w", (6, 10), (2, 0)), torch.empty(2, 10)), FULL[2:4])


def test_bad_requests_are_refused_and_nothing_is_written(table: TensorTable) -> None:
    put_grid(table, 1)
    into = torch.full((6, 10), -1.0)
    cases = [
        (NameMismatchError, "v", into),
        (ShapeMismatchError, "w", torch.full((5, 10), -1.0)),
        (ShapeMismatchError, ShardedKey("w", (6, 11), (0, 0)), into),
        (UndeclaredCastError, "w", into.bfloat16()),
        (CoverageError, "w", torch.full((6, 1), -1.0).expand(6, 10)),
        (LayoutError, ShardedKey("w", (6, 10), (1, 0)), into),
    ]
    for kind, key, target in cases:
        with pytest.raises(kind):
            table.get(key, target)
        assert (target == -1).all()
    assert torch.equal(table.get("w", into.bfloat16(), casts=True), (FULL + 1).bfloat16())
    assert torch.equal(table.get("w", into.double()), (FULL + 1).double())


def test_a_gap_between_the_writers_shards_is_named(table: TensorTable) -> None:
    table.put(1, ShardedKey("w", (6, 10), (0, 0)), FULL[:2])
    table.put(1, ShardedKey("w", (6, 10), (3, 0)), FULL[3:])
    table.complete(1)
    with pytest.raises(CoverageError, match="w"):
        table.get("w", torch.empty(6, 10))


def test_writing_is_checked(table: TensorTable) -> None:
    table.put(1, "w", FULL)
    with pytest.raises(LayoutError, match="before"):
        table.put(1, "w", FULL)
    table.complete(1)
    with pytest.raises(ProtocolError, match="grow"):
        table.put(1, "v", FULL)
    with pytest.raises(ProtocolError, match="nothing"):
        table.complete(2)
    with TensorTable("kv", job="table") as reader, pytest.raises(ProtocolError, match="only reads"):
        reader.put(3, "w", FULL)


def test_many_tensors_need_few_descriptors(table: TensorTable) -> None:
    before = open_descriptors()
    table.multi_put(1, {f"t{i}": torch.full((i % 7 + 1, 3), float(i)) for i in range(5000)})
    table.complete(1)
    assert torch.equal(table.get("t4321", torch.empty(3, 3)), torch.full((3, 3), 4321.0))
    assert open_descriptors() - before <= 12


def test_the_pool_fills_and_reuses_segments() -> None:
    pool = SegmentPool(segment_bytes=1 << 16)
    small = pool.take([100, 0, 4096])
    large = pool.take([1 << 17])
    assert len(pool) == 2
    assert [slot.offset for slot in small] == [0, 128, 128]
    pool.give(large)
    assert len(pool) == 1
    pool.give(small)
    assert pool.take([8])[0].offset == 0
    pool.close()
