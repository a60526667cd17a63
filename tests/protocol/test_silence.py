"""Whose word counts: of a rank that may be about to write, and of one that waits for others."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.errors import RevokedError
from syncline.protocol import messages as m
from syncline.protocol.job import Timing
from tests.protocol.driver import PLAN, TABLE, Fleet, Job, publish


def begun(job: Job, fleet: Fleet, number: int = 1, *, told: bool = True) -> m.Begun:
    """Begin an in-place update; with ``told`` every rank knows that it may write."""
    controller = fleet.controller
    found: m.Begun = controller.begin(number)
    job.send(m.StartUpdate(controller.fence, TABLE, found.key, found.attempt))
    for worker in fleet.workers if told else ():
        job.send(m.AwaitUpdate(worker.fence, TABLE, 0, 1.0))
    return found


def give_up(job: Job, fleet: Fleet, found: m.Begun, deadline: float) -> Any:
    error: dict[str, str | None] = {"what": "no more"}
    note = m.Failed(fleet.controller.fence, TABLE, found.key, found.attempt, error, False, deadline)
    return job.send(note)


def test_the_controller_does_not_vouch_for_ranks_that_may_write() -> None:
    job = Job()
    fleet = job.fleet()
    publish(job.writers(), 1)
    found = begun(job, fleet)
    give_up(job, fleet, found, 0.0)
    assert job.instance().dirty


def test_the_controller_vouches_for_ranks_that_were_never_told() -> None:
    job = Job()
    fleet = job.fleet()
    publish(job.writers(), 1)
    give_up(job, fleet, begun(job, fleet, told=False), 0.0)
    assert not job.instance().dirty


def test_the_controller_hears_the_last_rank_that_wrote_nothing() -> None:
    job = Job()
    fleet = job.fleet()
    publish(job.writers(), 1)
    found = begun(job, fleet)
    fleet.workers[0].fail(found, touched=False)
    waiting = give_up(job, fleet, found, 5.0)
    assert not job.done(waiting)
    fleet.workers[1].fail(found, touched=False)
    assert job.reply(waiting) == m.Done()
    assert not job.instance().dirty


def test_one_rank_that_wrote_ends_the_hearing() -> None:
    job = Job()
    fleet = job.fleet()
    publish(job.writers(), 1)
    found = begun(job, fleet)
    fleet.workers[0].fail(found, touched=True)
    assert give_up(job, fleet, found, 5.0) == m.Done()
    assert job.instance().dirty


def test_the_hearing_ends_at_its_deadline() -> None:
    job = Job()
    fleet = job.fleet()
    publish(job.writers(), 1)
    waiting = give_up(job, fleet, begun(job, fleet), 1.0)
    assert not job.done(waiting)
    job.wait(2.0, *fleet.all)
    assert job.reply(waiting) == m.Done()
    assert job.instance().dirty


def test_a_rank_that_waits_for_digests_is_not_stuck() -> None:
    job = Job(timing=Timing(stall=3.0, lease=100.0))
    fleet = job.fleet(world=1)
    writers = job.writers()
    for writer in writers:
        writer.put(1)
    found = begun(job, fleet)
    worker = fleet.workers[0]
    asked = job.send(m.FetchDigests(worker.fence, TABLE, found.key, PLAN, 50.0))
    job.wait(10.0, *fleet.all)
    for writer in writers:
        writer.digest(1)
    assert isinstance(job.reply(asked), m.DigestBlobs)
    job.wait(2.0, *fleet.all)
    assert worker.verify(found) == m.Done()


def test_a_rank_that_got_its_digests_is_stuck_like_any_other() -> None:
    job = Job(timing=Timing(stall=3.0, lease=100.0))
    fleet = job.fleet(world=1)
    publish(job.writers(), 1)
    found = begun(job, fleet)
    worker = fleet.workers[0]
    job.send(m.FetchDigests(worker.fence, TABLE, found.key, PLAN, 50.0))
    job.wait(4.0, *fleet.all)
    with pytest.raises(RevokedError, match="no byte moved"):
        worker.verify(found)


def test_a_rank_lost_while_applying_is_named() -> None:
    job = Job()
    fleet = job.fleet()
    at = publish(job.writers(), 1)
    found = begun(job, fleet)
    fleet.verify(found)
    fleet.controller.commit(at, found.attempt, None)
    fleet.workers[0].apply(at)
    waiting = job.send(m.AwaitServing(fleet.controller.fence, TABLE, "a", at, 5.0))
    fleet.workers[1].leave()
    with pytest.raises(Exception, match="instance a, rank 1") as caught:
        job.reply(waiting)
    assert "DIRTY" in str(caught.value)
