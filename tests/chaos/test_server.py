"""The MetaServer and trainers that come and go while readers stay."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.fleet import every, ready, until

if TYPE_CHECKING:
    from tests.chaos.fleet import Fleet

pytestmark = pytest.mark.timeout(60)


def test_a_server_of_its_own_is_killed_and_refilled(fleet: Fleet) -> None:
    server = fleet.server().ready()
    writers = fleet.trainers(2, serve=False)
    readers = fleet.readers("a", 2)
    ready(*writers, *readers)
    assert server.do("boot") == 1
    every(writers, "fill", 1)
    every(writers, "publish", 1)
    assert readers[0].do("update", 1)["key"] == "1.1"

    # idle: the next server knows nothing, and is told
    server.kill()
    server = fleet.server().ready()
    assert server.do("boot") == 2
    every(writers, "fill", 2)
    every(writers, "publish", 2)
    assert readers[0].do("update", 2)["key"] == "1.2"
    assert every(readers, "wrong", 2) == [[], []]

    # in the middle of an update: the attempt is over, the version is still there
    every(writers, "fill", 3)
    every(writers, "publish", 3)
    every(writers, "published")
    for reader in readers:
        reader.do("arm", "shm.before_part", "sleep:0.8")
    broken = readers[0].start("update", 3)
    assert until(lambda: all(reader.do("passed", "shm.before_part") for reader in readers))
    server.kill()
    server = fleet.server().ready()
    assert server.do("boot") == 3
    error = broken.error()
    assert error.kind in ("RevokedError", "FencedError"), error.text
    assert readers[0].do("paused")  # some rank was written
    assert readers[0].do("update", 3)["key"] == "1.3"
    assert every(readers, "wrong", 3) == [[], []]
    assert readers[0].do("state") == {"committed": "1.3", "dirty": False, "paused": False, "serves": "1.3"}


def test_trainers_come_back_from_older_checkpoints(fleet: Fleet) -> None:
    """The embedded server dies with trainer rank 0; each trainer goes on from a smaller number (B71)."""
    (reader,) = fleet.readers("a", 1)
    trainer = fleet.trainer().ready()
    reader.ready()
    trainer.do("fill", 100)
    trainer.do("publish", 100)
    assert reader.do("update", 100)["key"] == "1.100"
    counts = []
    for again in range(1, 4):
        trainer.kill()
        began = time.monotonic()
        error = reader.start("update", timeout=1.0).error()
        assert error.kind == "DeadlineError"
        assert "MetaServer" in error.text
        assert time.monotonic() - began < 5.0
        assert not reader.do("paused")  # nothing was touched: the old version is served on
        assert reader.do("served") == f"{again}.{101 - again}"
        trainer = fleet.trainer().ready()
        trainer.do("fill", 100 - again)
        trainer.do("publish", 100 - again)
        trainer.do("published")
        assert reader.do("update")["key"] == f"{again + 1}.{100 - again}"
        assert reader.do("wrong", 100 - again) == []
        counts.append(reader.do("resources"))
    assert counts[1:] == [counts[0]] * 2


def test_the_last_rank_leaves_as_quickly_as_the_first(fleet: Fleet) -> None:
    """Rank 0, with the server, must not leave the others waiting for it."""
    writers = fleet.trainers(2)
    reader = fleet.reader()
    ready(*writers, reader)
    every(writers, "publish", 1)
    assert reader.do("update", 1)["key"] == "1.1"
    began = time.monotonic()
    leaving = [writer.start("close") for writer in writers]
    for pending in leaving:
        pending.get()
    assert time.monotonic() - began < 5.0


def test_two_jobs_of_one_model_on_one_host(fleet: Fleet) -> None:
    """Same names everywhere but the job's (B76)."""
    trainers = [fleet.trainer(job=job) for job in ("one", "two")]
    readers = [fleet.reader(job=job) for job in ("one", "two")]
    ready(*trainers, *readers)
    for number in (1, 2):
        for offset, trainer in enumerate(trainers):
            trainer.do("fill", 10 * offset + number)
            trainer.do("publish", number)
        for offset, reader in enumerate(readers):
            assert reader.do("update", number)["key"] == f"1.{number}"
            assert reader.do("wrong", 10 * offset + number) == []
    trainers[0].kill()
    trainers[1].do("fill", 13)
    trainers[1].do("publish", 3)
    assert readers[1].do("update", 3)["key"] == "1.3"
    assert readers[0].start("update", timeout=0.5).error().kind == "DeadlineError"
