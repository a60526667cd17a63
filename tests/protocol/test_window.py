from __future__ import annotations

import pytest

from syncline.errors import FencedError, RevokedError, UnknownVersionError
from syncline.protocol import messages as m
from tests.protocol.driver import TABLE, Job, Writer, key, publish


def closed(job: Job, waiting: object) -> m.WindowClosed:
    reply = job.reply(waiting)
    assert isinstance(reply, m.WindowClosed)
    return reply


def setup(instances: int = 1) -> tuple[Job, list[Writer], list]:
    job = Job()
    writers = job.writers()
    return job, writers, [job.fleet(name) for name in "ab"[:instances]]


def test_without_readers_a_window_closes_at_once_and_the_version_retires() -> None:
    job, writers, _ = setup(0)
    publish(writers, 1)
    reply = writers[0].close(1)
    assert isinstance(reply, m.WindowClosed)
    assert job.version(1).state == "RETIRED"
    assert writers[1].close(1).state == "RETIRED"
    assert writers[1].close(1).state == "RETIRED"


def test_closing_waits_for_pins_and_only_for_them() -> None:
    job, writers, (fleet,) = setup()
    publish(writers, 1)
    begun = fleet.controller.begin()
    waiting = writers[0].close(1)
    assert not job.done(waiting)
    fleet.workers[0].verify(begun)
    assert not job.done(waiting)
    assert job.version(1).state == "SEALED"
    fleet.workers[1].verify(begun)
    assert closed(job, waiting).revoked == ()
    assert job.version(1).state == "RETIRED"
    fleet.controller.commit(key(1), begun.attempt, None)
    assert job.instance().committed == key(1)


def test_no_pin_is_granted_after_any_writer_closed_its_window() -> None:
    job, writers, (early, late) = setup(2)
    publish(writers, 1)
    early.controller.begin()
    writers[1].close(1)
    with pytest.raises(UnknownVersionError, match=r"window of version 1\.1 is closed") as caught:
        late.controller.begin(1)
    assert "[1]" in str(caught.value)
    waiting = late.controller.begin()
    assert not job.done(waiting)
    assert set(job.version(1).pins) == {"instance a, rank 0", "instance a, rank 1"}
    publish(writers, 2)
    assert job.reply(waiting).key == key(2)
    with pytest.raises(UnknownVersionError):
        job.send(m.Pin(late.controller.fence, TABLE, key(1), 5.0))


def test_a_window_closed_before_the_seal_stays_closed() -> None:
    job, writers, (fleet,) = setup()
    waiting_reader = fleet.controller.begin()
    writers[0].put(1)
    waiting = writers[0].close(1)
    assert not job.done(waiting)
    writers[1].put(1)
    assert closed(job, waiting).state in ("SEALED", "RETIRED")
    assert not job.done(waiting_reader)
    assert job.version(1).state == "RETIRED"


def test_at_the_deadline_an_unsealed_version_is_aborted_naming_who_is_late() -> None:
    job, writers, _ = setup(0)
    writers[0].put(1)
    waiting = writers[0].close(1, deadline=5)
    job.wait(5, *writers)
    reply = closed(job, waiting)
    assert (reply.state, reply.reason) == ("ABORTED", "writer ranks [1] did not put it in time")


def test_a_peer_that_dies_ends_the_wait_for_its_put() -> None:
    job, writers, _ = setup(0)
    writers[0].put(1)
    waiting = writers[0].close(1, deadline=500)
    job.wait(11, writers[0])
    assert closed(job, waiting).state == "ABORTED"
    assert "writer 1" in closed(job, waiting).reason


def test_a_slow_reader_is_waited_for_while_its_bytes_move() -> None:
    job, writers, (fleet,) = setup()
    publish(writers, 1)
    begun = fleet.controller.begin(deadline=300)
    waiting = writers[0].close(1, deadline=300)
    for step in range(1, 6):
        job.wait(9, *writers, *fleet.all, step=3)
        for worker in fleet.workers:
            worker.progress(begun, step)
        assert not job.done(waiting)
    fleet.verify(begun)
    assert closed(job, waiting).revoked == ()


def test_a_stuck_reader_whose_heart_beats_loses_its_pin_and_cannot_commit() -> None:
    job, writers, (fleet, other) = setup(2)
    publish(writers, 1)
    begun = fleet.controller.begin()
    good = other.controller.begin()
    fleet.workers[0].verify(begun)
    waiting = writers[0].close(1, deadline=300)
    for step in range(1, 13):
        for worker in other.workers:
            worker.progress(good, step)
        if step < 10:
            fleet.workers[1].progress(begun, 0)
        job.wait(1, *writers, *fleet.all, *other.all)
    assert not job.done(waiting)
    other.verify(good)
    assert "instance a, rank 1" in closed(job, waiting).revoked
    with pytest.raises(RevokedError, match="no byte moved"):
        fleet.workers[1].progress(begun, 99)
    with pytest.raises(RevokedError, match="no byte moved"):
        fleet.workers[1].verify(begun)
    with pytest.raises(RevokedError):
        fleet.controller.commit(key(1), begun.attempt, None)
    assert job.instance("a").dirty
    assert not job.instance("a").serving
    other.controller.commit(key(1), good.attempt, None)
    assert job.instance("b").committed == key(1)


def test_bytes_told_by_heartbeat_keep_a_pin_and_a_bare_heartbeat_does_not() -> None:
    job, writers, (fleet,) = setup()
    publish(writers, 1)
    begun = fleet.controller.begin(deadline=300)
    for step in range(1, 15):
        for worker in fleet.workers:
            worker.beat(progress=step)
        job.wait(1, *writers, fleet.controller)
    assert job.instance().state == "PULLING"
    job.wait(10, *writers, *fleet.all)
    with pytest.raises(RevokedError):
        fleet.workers[0].verify(begun)


def test_at_the_deadline_pins_are_revoked_although_bytes_move() -> None:
    job, writers, (fleet,) = setup()
    publish(writers, 1)
    begun = fleet.controller.begin(deadline=300)
    waiting = writers[0].close(1, deadline=5)
    for step in range(1, 6):
        for worker in fleet.workers:
            worker.progress(begun, step)
        job.wait(1, *writers, fleet.controller)
    assert set(closed(job, waiting).revoked) <= {"instance a, rank 0", "instance a, rank 1"}
    assert closed(job, waiting).revoked
    assert job.version(1).pins == ()
    with pytest.raises(RevokedError):
        fleet.verify(begun)


def test_the_deadline_of_an_update_ends_its_pins() -> None:
    job, writers, (fleet,) = setup()
    publish(writers, 1)
    begun = fleet.controller.begin(deadline=4)
    for step in range(1, 6):
        for worker in fleet.workers:
            worker.beat(step)
        job.wait(1, *writers, fleet.controller)
    assert job.version(1).pins == ()
    with pytest.raises(RevokedError, match="deadline passed"):
        fleet.workers[0].verify(begun)


def test_live_memory_is_one_so_closing_drains_older_versions_too() -> None:
    job, writers, (fleet,) = setup()
    publish(writers, 1)
    begun = fleet.controller.begin()
    publish(writers, 2)
    waiting = writers[0].close(2)
    assert not job.done(waiting)
    assert "instance a, rank 0" in job.version(1).pins
    fleet.verify(begun)
    assert closed(job, waiting).key == key(2)


def test_a_broken_versions_window_still_waits_for_its_readers() -> None:
    job, writers, (fleet,) = setup()
    publish(writers, 1)
    begun = fleet.controller.begin(deadline=300)
    for step in range(1, 12):
        for worker in fleet.workers:
            worker.progress(begun, step)
        job.wait(1, writers[0], fleet.controller)
    assert job.version(1).state == "BROKEN"
    waiting = writers[0].close(1)
    assert not job.done(waiting)
    fleet.verify(begun)
    assert closed(job, waiting).state == "BROKEN"


def test_until_pulled_leaves_the_window_open_for_every_live_instance() -> None:
    job, writers, (a, b) = setup(2)
    publish(writers, 1)
    waiting = writers[0].close(1, until="pulled")
    begun = a.controller.begin()
    a.verify(begun)
    assert not job.done(waiting)
    late = b.controller.begin()
    b.workers[0].verify(late)
    assert not job.done(waiting)
    b.workers[1].fail(late)
    assert closed(job, waiting).missed == ()
    assert closed(job, waiting).failed == {"b": "instance b, rank 1 failed: broken pipe"}


def test_until_pulled_ends_at_its_deadline_naming_who_missed_it() -> None:
    job, writers, (a, b) = setup(2)
    publish(writers, 1)
    waiting = writers[0].close(1, deadline=5, until="pulled")
    begun = a.controller.begin()
    a.verify(begun)
    job.wait(5, *writers, *a.all, *b.all)
    assert closed(job, waiting).missed == ("b",)


def test_until_pulled_does_not_wait_for_a_dead_instance() -> None:
    job, writers, (a, b) = setup(2)
    publish(writers, 1)
    waiting = writers[0].close(1, deadline=500, until="pulled")
    a.verify(a.controller.begin())
    job.wait(11, *writers, *a.all, b.controller, b.workers[0])
    assert closed(job, waiting).missed == ()


def test_a_snapshot_stays_in_service_until_it_is_evicted() -> None:
    job, writers, (fleet,) = setup()
    publish(writers, 1, "snapshot")
    assert writers[0].close(1).state == "SEALED"
    begun = fleet.controller.begin()
    assert writers[0].close(1).state == "SEALED"
    waiting = writers[0].close(1, evict=True)
    assert not job.done(waiting)
    fleet.verify(begun)
    assert closed(job, waiting).key == key(1)
    assert job.version(1).state == "RETIRED"


def test_digests_owed_are_told_when_the_window_closes() -> None:
    job, writers, (fleet,) = setup()
    for writer in writers:
        writer.put(1)
    writers[0].digest(1)
    assert writers[0].close(1).owed == ()
    assert [one.name for one in writers[1].close(1).owed[0]] == ["a"]
    writers[1].digest(1)
    assert writers[1].close(1).owed == ()
    assert fleet.name == "a"
    assert job.version(1).state == "RETIRED"


def test_a_window_of_a_version_never_put_or_of_another_epoch_is_refused() -> None:
    _job, writers, _ = setup(0)
    with pytest.raises(UnknownVersionError):
        writers[0].close(3)
    with pytest.raises(FencedError):
        writers[0].job.send(m.CloseWindow(writers[0].fence, TABLE, key(1, 7), 5.0))


def test_closing_before_the_own_put_gives_the_version_up() -> None:
    job, writers, _ = setup(0)
    writers[0].put(1)
    assert writers[1].close(1).state == "ABORTED"
    assert job.version(1).state == "ABORTED"


def test_a_version_that_was_forgotten_is_closed() -> None:
    job = Job()
    (writer,) = job.writers(1)
    for number in range(40):
        writer.put(number, "snapshot")
    assert writer.close(3).state == "RETIRED"


def test_a_retention_pin_holds_the_window_until_it_is_let_go_or_ends() -> None:
    job, writers, (fleet,) = setup()
    publish(writers, 1)
    holder = fleet.workers[0]
    pinned = job.send(m.Pin(holder.fence, TABLE, None, 20.0))
    assert (pinned.key, len(pinned.writers)) == (key(1), 2)
    waiting = writers[0].close(1)
    assert job.send(m.Pin(holder.fence, TABLE, key(1), 20.0)).key == key(1)
    assert not job.done(waiting)
    job.send(m.Unpin(holder.fence, TABLE, key(1)))
    assert closed(job, waiting).revoked == ()
    job.send(m.Unpin(holder.fence, TABLE, key(1)))
    publish(writers, 2)
    job.send(m.Pin(holder.fence, TABLE, key(2), 5.0))
    waiting = writers[0].close(2)
    job.wait(5, *writers, *fleet.all)
    assert closed(job, waiting).revoked == ("instance a, rank 0",)
    with pytest.raises(RevokedError, match="did not last"):
        job.send(m.Unpin(holder.fence, TABLE, key(2)))
