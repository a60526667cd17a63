from __future__ import annotations

import pytest

from syncline.errors import (
    FencedError,
    ProtocolError,
    StaleVersionError,
    UnknownVersionError,
    VersionAbortedError,
    VersionBrokenError,
)
from syncline.protocol import messages as m
from syncline.protocol.job import Timing
from tests.protocol.driver import TABLE, TIMING, Job, key, publish


def test_a_version_is_sealed_by_the_put_of_its_last_rank() -> None:
    job = Job()
    first, second = job.writers()
    assert first.put(1).state == "OPEN"
    assert job.version(1).state == "OPEN"
    second.put(1)
    assert job.version(1).state == "SEALED"
    assert [event.kind for event in job.state.drain_events() if event.key] == ["opened", "sealed"]


def test_the_same_put_again_is_harmless_and_another_one_is_refused() -> None:
    job = Job()
    first, second = job.writers()
    before = first.put(1)
    assert first.put(1) == before
    second.put(1)
    assert first.put(1).state == "SEALED"
    changed = m.Put(first.fence, TABLE, 1, b"fp0", 2, "live", b"moved")
    with pytest.raises(ProtocolError, match="twice with different contents"):
        job.send(changed)


def test_numbers_grow_within_an_epoch() -> None:
    job = Job()
    first, second = job.writers()
    publish([first, second], 5)
    with pytest.raises(StaleVersionError, match="must grow"):
        first.put(4)
    first.put(6)
    with pytest.raises(StaleVersionError):
        second.put(3)


def test_a_refill_is_not_a_way_around_growing_numbers() -> None:
    job = Job()
    first, _ = job.writers()
    first.put(5)
    with pytest.raises(StaleVersionError):
        first.put(4, refill=True)


def test_ranks_must_offer_one_kind_of_source() -> None:
    job = Job()
    first, second = job.writers()
    first.put(1, "live")
    with pytest.raises(ProtocolError, match="different sources"):
        second.put(1, "snapshot")


def test_a_writer_that_dies_before_the_seal_aborts_the_version_by_name() -> None:
    job = Job()
    first, second = job.writers()
    fleet = job.fleet()
    first.put(1)
    job.wait(11, first, *fleet.all)
    assert job.version(1).state == "ABORTED"
    assert "writer 1" in job.version(1).reason
    with pytest.raises(VersionAbortedError, match="writer 1 was lost"):
        fleet.controller.begin(1)
    with pytest.raises(VersionAbortedError, match="writer 1 was lost"):
        fleet.controller.begin()
    del second


def test_a_writer_that_dies_after_the_seal_breaks_the_version_by_name() -> None:
    job = Job()
    first, second = job.writers()
    fleet = job.fleet()
    publish([first, second], 1)
    job.wait(11, first, *fleet.all)
    assert job.version(1).state == "BROKEN"
    with pytest.raises(VersionBrokenError, match="writer 1 was lost"):
        fleet.controller.begin(1)


def test_readers_that_hold_a_pin_finish_a_broken_version_if_its_digests_are_there() -> None:
    job = Job()
    writers = job.writers()
    fleet = job.fleet()
    publish(writers, 1)
    begun = fleet.controller.begin()
    for second in range(11):
        for worker in fleet.workers:
            worker.progress(begun, second + 1)
        job.wait(1, writers[0], fleet.controller)
    assert job.version(1).state == "BROKEN"
    fleet.verify(begun)
    fleet.controller.commit(key(1), begun.attempt, None)
    for worker in fleet.workers:
        worker.apply(key(1))
    assert job.instance().serving


@pytest.mark.parametrize("level", ["none", "delivered"])
def test_without_digests_a_broken_version_cannot_be_committed(level: m.Level) -> None:
    job = Job()
    writers = job.writers()
    fleet = job.fleet()
    for writer in writers:
        writer.put(1)
    begun = fleet.controller.begin(level=level)
    for second in range(11):
        for worker in fleet.workers:
            worker.progress(begun, second + 1)
        job.wait(1, writers[0], fleet.controller)
    fleet.verify(begun)
    with pytest.raises(VersionBrokenError, match="writer 1"):
        fleet.controller.commit(key(1), begun.attempt, None)
    assert job.instance().dirty


def test_a_writer_that_leaves_in_order_retires_its_version() -> None:
    job = Job()
    first, second = job.writers()
    fleet = job.fleet()
    publish([first, second], 1)
    second.leave()
    assert job.version(1).state == "RETIRED"
    with pytest.raises(UnknownVersionError, match=r"window of version 1\.1 is closed"):
        fleet.controller.begin(1)


def test_a_version_never_published_by_a_finished_epoch_is_unknown_at_once() -> None:
    job = Job()
    writers = job.writers()
    fleet = job.fleet()
    publish(writers, 1)
    for writer in writers:
        writer.leave()
    with pytest.raises(UnknownVersionError, match=r"1\.7 was never published"):
        fleet.controller.begin(7)


def test_a_rank_that_skips_a_version_aborts_it() -> None:
    job = Job()
    first, second = job.writers()
    first.put(1)
    second.put(2)
    assert job.version(1).state == "ABORTED"
    assert "writer 1 went on to version 1.2" in job.version(1).reason
    with pytest.raises(VersionAbortedError):
        second.put(1)
    first.put(2)
    assert job.version(2).state == "SEALED"


def test_a_writer_can_give_a_version_up() -> None:
    job = Job()
    writers = job.writers()
    fleet = job.fleet()
    writers[0].put(1)
    job.send(m.AbortVersion(writers[0].fence, TABLE, key(1), "bad gradient"))
    assert job.version(1).state == "ABORTED"
    publish(writers, 2)
    begun = fleet.controller.begin()
    fleet.verify(begun)
    job.send(m.AbortVersion(writers[0].fence, TABLE, key(2), "digest thread failed"))
    assert job.version(2).state == "BROKEN"
    with pytest.raises(ProtocolError, match="digest thread failed"):
        fleet.controller.commit(key(2), begun.attempt, None)


def test_digests_need_the_put_and_do_not_change() -> None:
    job = Job()
    first, second = job.writers()
    first.put(1)
    with pytest.raises(ProtocolError, match="before its put"):
        second.digest(1)
    first.digest(1)
    first.digest(1)
    with pytest.raises(ProtocolError, match="changed between two reports"):
        job.send(m.Digests(first.fence, TABLE, key(1), b"plan", b"other"))
    job.send(m.AbortVersion(first.fence, TABLE, key(1), "x"))
    with pytest.raises(VersionAbortedError):
        first.digest(1)
    with pytest.raises(UnknownVersionError):
        first.digest(9)
    with pytest.raises(FencedError):
        first.digest(1, epoch=2)


def test_digests_of_too_many_plans_are_refused() -> None:
    job = Job()
    (writer,) = job.writers(1)
    writer.put(1)
    for plan in range(8):
        writer.digest(1, b"plan%d" % plan)
    with pytest.raises(ProtocolError, match="too many plans"):
        writer.digest(1, b"plan8")


def test_history_is_bounded_and_what_is_pinned_stays() -> None:
    job = Job(timing=Timing(lease=10, stall=10, history=4))
    (writer,) = job.writers(1)
    fleet = job.fleet(world=1)
    publish([writer], 1, "snapshot")
    begun = fleet.controller.begin(1)
    for number in range(2, 12):
        publish([writer], number, "snapshot")
    kept = [one.key.number for one in job.status().versions]
    assert kept == [1, 8, 9, 10, 11]
    fleet.verify(begun)
    fleet.controller.commit(key(1), begun.attempt, None)
    publish([writer], 12, "snapshot")
    assert [one.key.number for one in job.status().versions] == [9, 10, 11, 12]
    assert job.send(m.StatusQuery()).tables[0].name == TABLE


def test_events_are_bounded_and_their_loss_is_told() -> None:
    job = Job(timing=Timing(events=8))
    (writer,) = job.writers(1)
    for number in range(30):
        writer.put(number, "snapshot")
    events = job.send(m.Watch(0, 5.0))
    assert events.lost
    assert [one.seq for one in events.events] == list(range(events.events[0].seq, events.events[0].seq + 8))
    assert not job.send(m.Watch(events.events[0].seq - 1, 5.0)).lost
    assert len(job.state.drain_events()) == 8
    assert job.state.drain_events() == []


def test_events_reach_a_watcher_that_waits_and_an_empty_answer_its_deadline() -> None:
    job = Job()
    (writer,) = job.writers(1)
    since = job.send(m.StatusQuery()).seq
    waiting = job.send(m.Watch(since, 5.0))
    assert not job.done(waiting)
    writer.put(1)
    assert [one.kind for one in job.reply(waiting).events] == ["opened", "sealed"]
    waiting = job.send(m.Watch(since + 2, 5.0))
    job.tick(5)
    assert job.reply(waiting) == m.Events((), False)


def test_the_plans_membership_is_that_of_the_opening_and_a_late_instance_makes_a_new_one() -> None:
    job = Job()
    first, second = job.writers()
    early = job.fleet("b")
    membership = first.put(1).membership
    assert [one.name for one in membership] == ["b"]
    late = job.fleet("a")
    assert second.put(1).membership == membership
    begun = early.controller.begin()
    assert begun.membership == membership
    begun = late.controller.begin()
    assert [one.name for one in begun.membership] == ["a", "b"]
    assert begun.membership[0].ranks == (m.RankLayout(b"rfp0", "host"), m.RankLayout(b"rfp1", "host"))
    assert first.put(1).membership == begun.membership
    assert [place.endpoint for place in begun.writers] == ["ep0", "ep1"]


def test_options_that_differ_are_refused_by_name() -> None:
    job = Job()
    job.writer(0, options={"casts": "reader", "threads": "1"})
    with pytest.raises(ProtocolError, match="option casts differs") as caught:
        job.fleet("a", options={"casts": "none"})
    assert "writer 0" in str(caught.value)
    job.fleet("b", options={"casts": "reader", "own": "1"})
    job.writer(0, process="new trainer", options={"threads": "2"})
    assert TIMING.lease == 10
