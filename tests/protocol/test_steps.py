from __future__ import annotations

from typing import Any

import pytest

from syncline.errors import DeadlineError, ProtocolError, SynclineError, TransportError
from syncline.protocol import messages as m
from tests.protocol.driver import TABLE, Job, key, publish


def setup() -> tuple[Job, list, Any]:
    job = Job()
    writers = job.writers()
    fleet = job.fleet()
    publish(writers, 1)
    return job, writers, fleet


def start(fleet: Any, begun: m.Begun) -> Any:
    return fleet.job.send(m.StartUpdate(fleet.controller.fence, TABLE, begun.key, begun.attempt))


def test_workers_hear_of_an_update_once_its_engine_is_paused() -> None:
    job, _, fleet = setup()
    waiting = job.send(m.AwaitUpdate(fleet.workers[0].fence, TABLE, 0, 60.0))
    begun = fleet.controller.begin()
    assert not job.done(waiting)
    start(fleet, begun)
    start(fleet, begun)
    assert job.reply(waiting) == begun
    late = job.send(m.AwaitUpdate(fleet.workers[0].fence, TABLE, begun.attempt, 5.0))
    job.tick(5)
    with pytest.raises(DeadlineError, match="controller of instance a"):
        job.reply(late)


def test_the_pause_counts_once_against_the_stall() -> None:
    job, writers, fleet = setup()
    begun = fleet.controller.begin()
    job.wait(8, *writers, *fleet.all)
    start(fleet, begun)
    job.wait(8, *writers, *fleet.all)
    start(fleet, begun)
    assert job.instance().state == "PULLING"
    job.wait(3, *writers, *fleet.all)
    with pytest.raises(ProtocolError, match="no byte moved"):
        start(fleet, begun)


def test_ranks_write_only_when_all_of_them_are_bound() -> None:
    job, writers, fleet = setup()
    begun = fleet.controller.begin()
    start(fleet, begun)
    asks = [m.AwaitBound(one.fence, TABLE, key(1), begun.attempt, 60.0) for one in fleet.workers]
    waiting = job.send(asks[0])
    late = job.send(m.AwaitBound(fleet.workers[0].fence, TABLE, key(1), begun.attempt, 2.0))
    assert not job.done(waiting)
    job.wait(2, *writers, *fleet.all)
    with pytest.raises(DeadlineError, match=r"ranks \[1\] of instance a to bind"):
        job.reply(late)
    assert job.send(asks[1]) == m.Done()
    assert job.reply(waiting) == m.Done()


def test_a_rank_that_cannot_bind_ends_the_attempt_before_any_other_has_written() -> None:
    job, _, fleet = setup()
    begun = fleet.controller.begin()
    start(fleet, begun)
    one, other = fleet.workers
    waiting = job.send(m.AwaitBound(one.fence, TABLE, key(1), begun.attempt, 60.0))
    other.fail(begun, what="offloaded", touched=False)
    with pytest.raises(SynclineError, match="offloaded"):
        job.reply(waiting)
    one.fail(begun, what="the attempt is over", touched=False)
    assert not job.instance().dirty


def test_the_controller_waits_for_all_ranks_or_hears_why_not() -> None:
    job, writers, fleet = setup()
    begun = fleet.controller.begin()
    ask = m.AwaitVerified(fleet.controller.fence, TABLE, key(1), begun.attempt, 60.0)
    waiting = job.send(ask)
    fleet.workers[0].verify(begun)
    assert not job.done(waiting)
    fleet.workers[1].verify(begun)
    assert job.reply(waiting) == m.AllVerified(({}, {}))
    begun = fleet.controller.begin()
    waiting = job.send(m.AwaitVerified(fleet.controller.fence, TABLE, key(1), begun.attempt, 60.0))
    late = job.send(m.AwaitVerified(fleet.controller.fence, TABLE, key(1), begun.attempt, 2.0))
    job.wait(2, *writers, *fleet.all)
    with pytest.raises(DeadlineError, match=r"ranks \[0, 1\] of instance a"):
        job.reply(late)
    fleet.workers[1].fail(begun, what="disk full")
    with pytest.raises(TransportError, match="disk full"):  # the rank's own error, class and all
        job.reply(waiting)


def test_workers_hear_the_decision() -> None:
    job, _, fleet = setup()
    begun = fleet.controller.begin()
    worker = fleet.workers[0]
    ask = m.AwaitDecision(worker.fence, TABLE, key(1), begun.attempt, 60.0)
    waiting = job.send(ask)
    fleet.verify(begun)
    assert not job.done(waiting)
    fleet.controller.commit(key(1), begun.attempt, None)
    assert job.reply(waiting) == m.Decision(True, "")
    assert job.send(ask) == m.Decision(True, "")
    with pytest.raises(ProtocolError, match="another version"):
        job.send(m.AwaitDecision(worker.fence, TABLE, key(2), begun.attempt, 60.0))


def test_workers_hear_of_a_failed_or_superseded_attempt() -> None:
    job, _, fleet = setup()
    worker = fleet.workers[0]
    first = fleet.controller.begin()
    waiting = job.send(m.AwaitDecision(worker.fence, TABLE, key(1), first.attempt, 60.0))
    fleet.workers[1].fail(first, what="disk full")
    assert not job.reply(waiting).committed
    assert "disk full" in job.reply(waiting).reason
    second = fleet.controller.begin()
    waiting = job.send(m.AwaitDecision(worker.fence, TABLE, key(1), second.attempt, 60.0))
    fleet.controller.begin()
    assert not job.reply(waiting).committed


def test_writers_that_must_send_hear_who_pulls() -> None:
    job, writers, a = setup()
    b = job.fleet("b")
    waiting = job.send(m.AwaitPulls(writers[0].fence, TABLE, {}, 60.0))
    begun = a.controller.begin()
    assert not job.done(waiting)
    start(a, begun)
    (pull,) = job.reply(waiting).pulls
    assert (pull.instance, pull.begun) == ("a", begun)
    served = {"a": begun.attempt}
    waiting = job.send(m.AwaitPulls(writers[0].fence, TABLE, served, 60.0))
    start(b, b.controller.begin())
    assert [one.instance for one in job.reply(waiting).pulls] == ["b"]


def test_an_instance_that_lives_again_is_not_taken_for_served() -> None:
    job, writers, fleet = setup()
    begun = fleet.update()
    served = {"a": begun.attempt}
    for reader in fleet.all:
        reader.leave()
    again = job.fleet(process="second life")
    waiting = job.send(m.AwaitPulls(writers[0].fence, TABLE, served, 60.0))
    start(again, again.controller.begin())
    assert len(job.reply(waiting).pulls) == 1


def test_a_controller_that_gives_up_waits_for_the_word_of_ranks_that_may_write() -> None:
    job, writers, fleet = setup()
    begun = fleet.controller.begin()
    start(fleet, begun)
    job.send(m.AwaitUpdate(fleet.workers[0].fence, TABLE, 0, 60.0))
    give_up = m.Failed(fleet.controller.fence, TABLE, key(1), begun.attempt, {"what": "stop"}, False, 60.0)
    waiting = job.send(give_up)
    assert not job.done(waiting)
    assert job.instance().dirty
    fleet.workers[0].fail(begun, touched=False)
    assert job.reply(waiting) == m.Done()
    assert not job.instance().dirty
    begun = fleet.controller.begin()
    start(fleet, begun)
    job.send(m.AwaitUpdate(fleet.workers[0].fence, TABLE, 0, 60.0))
    last = m.Failed(fleet.controller.fence, TABLE, key(1), begun.attempt, {"what": "stop"}, False, 2.0)
    waiting = job.send(last)
    job.wait(2, *writers, *fleet.all)
    assert job.reply(waiting) == m.Done()
    assert job.instance().dirty


def test_attempts_grow_over_a_restart() -> None:
    job, writers, fleet = setup()
    before = fleet.controller.begin().attempt
    job.restart()
    for member in (*writers, *fleet.all):
        member.fence = member.join(previous=member.fence).fence
    publish(writers, 2)
    assert fleet.controller.begin().attempt > before
