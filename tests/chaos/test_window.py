"""The read window: who waits for whom, and who may go ahead."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.fleet import every, ready, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.fleet import Fleet

pytestmark = pytest.mark.timeout(60)


def test_no_trainer_rank_steps_before_a_slow_reader_has_pulled(fleets: Callable[..., Fleet]) -> None:
    """Two FSDP2 ranks with collectives of their own; the reader begins 1.5 s later (B58)."""
    fleet = fleets(stall=6.0)
    trainers = fleet.trainers(2, sharded=True)
    readers = fleet.readers("a", 2)
    ready(*trainers, *readers)
    every(trainers, "fill", 1)
    every(trainers, "publish", 1, "pulled")
    steps = [trainer.start("step") for trainer in trainers]
    time.sleep(1.5)
    assert not any(step.done for step in steps)
    readers[1].do("arm", "worker.before_verified", "sleep:0.5")  # a rank that is slower still
    update = readers[0].start("update", 1)
    assert until(lambda: readers[1].do("passed", "worker.before_verified"))
    verified_after = time.monotonic()
    entered = [step.get()["entered"] for step in steps]
    assert min(entered) > verified_after
    assert update.get()["key"] == "1.1"
    assert every(readers, "wrong", 1) == [[], []]
    assert every(trainers, "collect") == [2.0, 2.0]
    assert every(trainers, "window") == [{"readers": ("a",), "revoked": (), "missed": ()}] * 2


def test_a_step_waits_for_a_pull_under_way_and_the_version_is_not_torn(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(stall=6.0)
    trainer = fleet.trainer(wide=True).ready()
    reader = fleet.reader(wide=True).ready()
    trainer.do("fill", 1)
    trainer.do("publish", 1)
    trainer.do("published")
    reader.do("arm", "shm.before_part", "sleep:1.2", 2)
    update = reader.start("update", 1)
    assert until(lambda: reader.do("passed", "shm.before_part"))
    assert reader.do("paused")
    step = trainer.start("fill", 2)
    time.sleep(0.4)
    assert not step.done
    assert update.get()["key"] == "1.1"
    step.get()
    assert reader.do("wrong", 1) == []
    trainer.do("publish", 2)
    assert reader.do("update", 2)["key"] == "1.2"
    assert reader.do("wrong", 2) == []
    assert trainer.do("window")["revoked"] == ()


def test_the_engine_serves_the_new_version_only_after_every_writer_is_in(fleet: Fleet) -> None:
    """Writer 1 publishes later; until then the engine runs on what it has (B83)."""
    writers = fleet.trainers(2)
    readers = fleet.readers("a", 2)
    ready(*writers, *readers)
    every(writers, "fill", 1)
    every(writers, "publish", 1)
    assert readers[0].do("update", 1)["key"] == "1.1"
    every(writers, "fill", 2)
    writers[0].do("publish", 2)
    update = readers[0].start("update", 2)
    time.sleep(1.2)
    assert not update.done
    assert readers[0].do("forward", 1.0) == "1.1"
    assert every(readers, "wrong", 1) == [[], []]
    writers[1].do("publish", 2)
    assert update.get()["key"] == "1.2"
    assert readers[0].do("forward", 1.0) == "1.2"
    assert every(readers, "wrong", 2) == [[], []]
