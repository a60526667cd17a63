"""Following: how often, how far behind, and what happens when updates fail."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

from syncline import faults
from syncline.errors import SynclineError
from tests.store.pair import Engine, Trainer, module, stamped

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncline.store.report import UpdateReport
    from syncline.store.writer import WeightWriter
    from tests.store.pair import Job


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for something that a thread of the store does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


class Run:
    """A trainer whose weights are its version, and an engine."""

    def __init__(self, job: Job) -> None:
        self.model = module({"w": stamped(4)})
        self.writer: WeightWriter = job.writer(Trainer(self.model))
        self.engine = Engine(module({"w": torch.full((4,), -1.0)}))
        self.reader = job.reader(self.engine)
        self.reports: list[UpdateReport] = []

    def publish(self, number: int) -> None:
        with self.writer.adapter.mutation("step"):
            self.model.w.data.fill_(float(number))
        self.writer.publish(number)

    @property
    def served(self) -> float:
        return float(self.engine.live_tensors()["w"][0])

    def settled(self, number: int) -> None:
        until(lambda: self.reports and self.reports[-1].key.number == number)
        assert self.served == number
        assert not self.engine.paused


def test_every_version_is_taken_and_told(job: Job) -> None:
    run = Run(job)
    follower = run.reader.follow(on_update=run.reports.append)
    for number in (1, 2, 3):
        run.publish(number)
        run.settled(number)
    assert [r.key.number for r in run.reports] == [1, 2, 3]
    assert (follower.updates, follower.error) == (3, None)
    with pytest.raises(SynclineError, match="follows already"):
        run.reader.follow()
    follower.stop()
    assert not follower.running
    run.publish(4)
    time.sleep(0.2)
    assert run.served == 3
    run.reader.follow(on_update=run.reports.append)  # it may be taken up again
    run.settled(4)


def test_only_versions_that_are_new_enough_are_taken(job: Job) -> None:
    run = Run(job)
    run.reader.follow(every=3, on_update=run.reports.append)
    run.publish(1)
    run.settled(1)  # the first one, whatever its number
    for number in (2, 3):
        run.publish(number)
        time.sleep(0.15)
        assert run.served == 1
    run.publish(4)
    run.settled(4)
    run.publish(6)
    time.sleep(0.15)
    assert run.served == 4
    run.publish(10)
    run.settled(10)
    assert [r.key.number for r in run.reports] == [1, 4, 10]


def test_proofs_are_made_as_often_as_asked(job: Job) -> None:
    run = Run(job)
    run.reader.follow(verify="installed", verify_every=2, on_update=run.reports.append)
    for number in (1, 2, 3, 4):
        run.publish(number)
        run.settled(number)
    assert [r.level for r in run.reports] == ["installed", "none", "installed", "none"]


def test_failing_updates_pause_the_engine_once_it_is_too_far_behind(job: Job) -> None:
    run = Run(job)
    follower = run.reader.follow(max_staleness=1, on_update=run.reports.append)
    run.publish(1)
    run.settled(1)
    with faults.arm("reader.before_start", "raise:engine busy"):
        run.publish(2)
        until(lambda: follower.error is not None)
        assert "engine busy" in str(follower.error)
        time.sleep(0.3)
        assert not run.engine.paused  # one behind is allowed: it goes on serving the old version
        assert run.served == 1
        run.publish(3)
        until(lambda: run.reader._held)
        resumed = run.engine.calls.count("resume None")
        time.sleep(0.6)  # attempts go on meanwhile
        assert run.engine.paused
        assert run.engine.calls.count("resume None") == resumed
        assert run.served == 1
    run.settled(3)
    assert follower.error is None
    assert not run.reader.dirty


def test_without_a_limit_the_old_version_is_served_on(job: Job) -> None:
    run = Run(job)
    follower = run.reader.follow(on_update=run.reports.append)
    run.publish(1)
    run.settled(1)
    with faults.arm("reader.before_start", "raise:engine busy"):
        for number in (2, 3, 4, 5):
            run.publish(number)
        until(lambda: follower.error is not None)
        time.sleep(0.3)
        with run.engine.forward(2.0):
            assert run.served == 1
    run.settled(5)


@pytest.mark.parametrize(("every", "limit"), [(0, None), (1, -1)])
def test_nonsense_is_refused(job: Job, every: int, limit: int | None) -> None:
    run = Run(job)
    with pytest.raises(SynclineError, match="cannot follow"):
        run.reader.follow(every, limit)


def test_closing_the_reader_ends_its_follower(job: Job) -> None:
    run = Run(job)
    follower = run.reader.follow()
    run.publish(1)
    until(lambda: follower.updates == 1)
    run.reader.close()
    assert not follower.running
