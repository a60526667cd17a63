"""Tables under load: concurrent readers, waiting, retention, memory that runs out, keys of every kind."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

from syncline.errors import (
    CoverageError,
    LayoutError,
    MemoryBudgetError,
    NameMismatchError,
    ProtocolError,
    SynclineError,
    UnknownVersionError,
)
from syncline.options import Options
from syncline.protocol import messages as m
from syncline.store import segments
from syncline.store.keys import ShardedKey
from syncline.store.table import Entry, TensorTable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FULL = torch.arange(60.0).reshape(6, 10)


@pytest.fixture
def table(run_dir: Path) -> Iterator[TensorTable]:
    with TensorTable("kv", job="more", rank=0, keep=2) as made:
        yield made


def test_puts_are_copies(table: TensorTable) -> None:
    value = FULL.clone()
    table.put(1, "w", value)
    value.zero_()
    table.complete(1)
    value.fill_(-5.0)
    assert torch.equal(table.get("w", torch.empty(6, 10)), FULL)


def test_several_requests_of_one_call_come_from_one_version(table: TensorTable) -> None:
    for version in (1, 2):
        table.multi_put(
            version, {"a": torch.full((3,), float(version)), "b": torch.full((2,), float(version))}
        )
        table.complete(version)
    a, b, part = torch.empty(3), torch.empty(2), torch.empty(1)
    key = table.multi_get({"a": a, "b": b, ShardedKey("a", (3,), (2,)): part})
    assert (key.number, a.tolist(), b.tolist(), part.tolist()) == (2, [2.0] * 3, [2.0] * 2, [2.0])
    key = table.multi_get({"a": a, "b": b}, version=1)
    assert (key.number, a.tolist(), b.tolist()) == (1, [1.0] * 3, [1.0] * 2)


def test_one_wrong_name_writes_nothing_of_the_call(table: TensorTable) -> None:
    table.multi_put(1, {"a": torch.ones(3), "b": torch.ones(2)})
    table.complete(1)
    a, c = torch.full((3,), -1.0), torch.full((2,), -1.0)
    with pytest.raises(NameMismatchError, match="missing 1") as caught:
        table.multi_get({"a": a, "c": c})
    assert caught.value.tensor == "c"
    assert (a == -1).all()
    assert (c == -1).all()
    with pytest.raises(CoverageError):  # one destination twice, from two sources
        table.multi_get({"a": a, ShardedKey("b", (2,), (0,)): a[:2]})
    assert (a == -1).all()


def test_an_open_version_is_seen_by_nobody(table: TensorTable) -> None:
    table.put(1, "w", FULL)
    table.complete(1)
    table.put(2, "w", FULL + 1)
    with TensorTable("kv", job="more") as reader:
        assert torch.equal(reader.get("w", torch.empty(6, 10)), FULL)
        assert reader.scan() == [Entry("w", (6, 10), "float32")]
        with pytest.raises(UnknownVersionError, match="version 2"):
            reader.get("w", torch.empty(6, 10), version=2)


def test_a_get_waits_for_its_version(table: TensorTable) -> None:
    with TensorTable("kv", job="more") as reader:

        def later() -> None:
            time.sleep(0.3)
            table.put(7, "w", FULL)
            table.complete(7)

        thread = threading.Thread(target=later)
        thread.start()
        began = time.monotonic()
        assert torch.equal(reader.get("w", torch.empty(6, 10), version=7, timeout=10.0), FULL)
        assert 0.2 < time.monotonic() - began < 5.0
        thread.join()


def test_readers_beside_a_writer_always_see_whole_versions(table: TensorTable) -> None:
    errors: list[BaseException] = []
    seen: set[int] = set()
    over = threading.Event()
    table.multi_put(1, {"a": torch.full((500,), 1.0), "b": torch.full((70, 3), 1.0)})
    table.complete(1)

    def read() -> None:
        try:
            with TensorTable("kv", job="more") as reader:
                while not over.is_set():
                    a, b = torch.empty(500), torch.empty(70, 3)
                    key = reader.multi_get({"a": a, "b": b})
                    assert bool((a == key.number).all())
                    assert bool((b == key.number).all())
                    seen.add(key.number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for version in range(2, 16):
        table.multi_put(
            version, {"a": torch.full((500,), float(version)), "b": torch.full((70, 3), float(version))}
        )
        table.complete(version)
        time.sleep(0.03)
    over.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(seen) > 1
    assert len(table._pool) == 1


def test_a_version_in_use_is_not_dropped_under_its_reader(table: TensorTable) -> None:
    with TensorTable("kv", job="more") as reader:
        for version in (1, 2):
            table.put(version, "w", FULL + version)
            table.complete(version)
        pinned = reader._pin(1, 0.0)
        done = threading.Event()

        def third() -> None:
            table.put(3, "w", FULL + 3)
            table.complete(3)
            done.set()

        thread = threading.Thread(target=third)
        thread.start()
        assert not done.wait(0.4)  # dropping version 1 waits for the pin
        reader.member.ask(m.Unpin(reader._reading, reader.name, pinned.key))
        assert done.wait(10.0)
        thread.join()
        with pytest.raises(UnknownVersionError):
            reader.get("w", torch.empty(6, 10), version=1)


def test_too_little_memory_puts_nothing_of_a_call(
    table: TensorTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.put(1, "w", FULL)
    asked: list[int] = []

    def poor(nbytes: int, what: str, *_: object) -> None:
        asked.append(nbytes)
        raise MemoryBudgetError(f"not enough memory for {what}", expected=f"{nbytes} bytes needed")

    with monkeypatch.context() as patch:
        patch.setattr(segments, "require_memory", poor)
        with pytest.raises(MemoryBudgetError, match="not enough memory for copies of tensors"):
            table.multi_put(1, {"x": torch.ones(100), "y": torch.ones(64)})
    assert asked == [448 + 256]
    table.multi_put(1, {"x": torch.ones(100)})  # the name was not taken
    table.complete(1)
    assert [entry.name for entry in table.scan()] == ["w", "x"]


def test_keys_are_checked_before_anything_is_copied(table: TensorTable) -> None:
    for key in (
        ShardedKey("w", (6, 10), (1, 0)),
        ShardedKey("w", (6, 10), (-1, 0)),
        ShardedKey("w", (6,), (0, 0)),
        ShardedKey("w", (6, 10, 1), (0, 0, 0)),
    ):
        with pytest.raises(LayoutError):
            table.put(1, key, FULL)
    with pytest.raises(ProtocolError, match="nothing was put"):
        table.complete(1)
    with pytest.raises(LayoutError, match="host memory"):
        table.put(1, "m", torch.empty(3, device="meta"))


def test_replicas_and_overlaps_of_two_writers(run_dir: Path) -> None:
    options = Options(connect_timeout=15.0, update_timeout=10.0, heartbeat=0.5)
    with (
        TensorTable("t", job="two", rank=0, world=2, options=options) as first,
        TensorTable("t", job="two", rank=1, world=2, options=options) as second,
    ):
        for one in (first, second):
            one.put(1, "same", FULL)  # a replica
        first.put(1, ShardedKey("over", (6, 10), (0, 0)), FULL[:4])
        second.put(1, ShardedKey("over", (6, 10), (2, 0)), FULL[2:])
        for one in (first, second):
            one.complete(1)
        assert torch.equal(second.get("same", torch.empty(6, 10)), FULL)
        with pytest.raises(CoverageError) as caught:
            first.get("over", torch.empty(6, 10))
        assert caught.value.tensor == "over"


def test_a_table_outlives_its_readers_and_they_its_writer(run_dir: Path) -> None:
    with TensorTable("kv", job="life", serve=True) as reader:
        with TensorTable("kv", job="life", rank=0) as writer:
            writer.put(1, "w", FULL)
            writer.complete(1)
            with TensorTable("kv", job="life") as brief:
                brief.get("w", torch.empty(6, 10))
            assert torch.equal(reader.get("w", torch.empty(6, 10)), FULL)
        into = torch.full((6, 10), -1.0)
        with pytest.raises(SynclineError):
            reader.get("w", into)
        assert (into == -1).all()
        with TensorTable("kv", job="life", rank=0) as successor:  # another process takes the rank
            successor.put(1, "w", FULL + 1)
            key = successor.complete(1)
            assert str(key) == "2.1"
            assert torch.equal(reader.get("w", into), FULL + 1)


def test_nonsense_is_refused(run_dir: Path) -> None:
    with pytest.raises(ProtocolError, match="keep"):
        TensorTable("kv", job="none", rank=0, keep=0)
    with (
        pytest.raises(SynclineError),
        TensorTable("kv", job="nobody", options=Options(connect_timeout=0.3)) as alone,
    ):
        alone.scan()
