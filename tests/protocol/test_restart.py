"""The server dies and comes back with a new boot number; its clients tell it what it knew."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.errors import DeadlineError, FencedError, StaleVersionError, VersionAbortedError
from syncline.protocol import messages as m
from tests.protocol.driver import TABLE, Job, key, publish


def setup() -> tuple[Job, list, Any]:
    job = Job()
    writers = job.writers()
    fleet = job.fleet()
    publish(writers, 1)
    fleet.update()
    publish(writers, 2)
    return job, writers, fleet


def back(member: Any, **fields: Any) -> m.Registered:
    reply = member.join(previous=member.fence, **fields)
    member.fence = reply.fence
    return reply


def all_back(writers: list, fleet: Any, committed: int = 1, last: int = 2) -> None:
    for writer in writers:
        back(writer, last=key(last))
    for reader in fleet.all:
        back(reader, committed=key(committed))


def test_fences_of_an_earlier_boot_are_void() -> None:
    job, writers, fleet = setup()
    begun = fleet.controller.begin()
    fleet.verify(begun)
    job.restart()
    for member in (*writers, *fleet.all):
        with pytest.raises(FencedError, match="another boot"):
            member.beat()
    with pytest.raises(FencedError):
        fleet.controller.commit(key(2), begun.attempt, key(1))


def test_writers_refill_the_server_and_the_job_goes_on() -> None:
    job, writers, fleet = setup()
    job.restart()
    assert job.status().recovering
    all_back(writers, fleet)
    assert [one.fence.epoch for one in writers] == [1, 1]
    assert not job.status().recovering
    state = job.instance()
    assert (state.committed, state.dirty, state.serving) == (key(1), False, True)
    assert writers[0].put(2, refill=True).state == "OPEN"
    assert writers[1].put(2, refill=True).state == "OPEN"
    assert job.version(2).state == "SEALED"
    for writer in writers:
        writer.digest(2)
    assert fleet.update().key == key(2)


def test_nothing_is_sealed_begun_or_declared_unknown_before_all_writers_are_back() -> None:
    job, writers, fleet = setup()
    job.restart()
    back(writers[0], last=key(2))
    for reader in fleet.all:
        back(reader, committed=key(1))
    writers[0].put(2, refill=True)
    asked = [fleet.controller.begin(number, deadline=200) for number in (None, 2, 1)]
    job.wait(20, writers[0], *fleet.all)
    assert job.version(2).state == "OPEN"
    assert job.status().recovering
    assert not job.done(asked[-1])
    back(writers[1], last=key(2))
    with pytest.raises(FencedError):
        job.reply(asked[0])
    assert job.reply(asked[2]) == m.Current(key(1))
    waiting = fleet.controller.begin(2)
    writers[1].put(2, refill=True)
    assert job.version(2).state == "SEALED"
    assert job.reply(waiting).key == key(2)


def test_writers_that_do_not_come_back_count_as_dead_after_the_deadline() -> None:
    job, writers, fleet = setup()
    job.restart()
    back(writers[0], last=key(2))
    for reader in fleet.all:
        back(reader, committed=key(1))
    writers[0].put(2, refill=True)
    closing = writers[0].close(2, deadline=300)
    waiting = fleet.controller.begin(deadline=40)
    job.wait(29, writers[0], *fleet.all)
    assert job.version(2).state == "OPEN"
    job.wait(2, writers[0], *fleet.all)
    assert job.version(2).state == "ABORTED"
    assert "writer 1 was lost: it did not come back" in job.version(2).reason
    assert job.reply(closing).state == "ABORTED"
    with pytest.raises(VersionAbortedError, match="writer 1 was lost"):
        job.reply(waiting)


def test_without_any_writer_the_wait_names_them() -> None:
    job, _, fleet = setup()
    job.restart()
    for reader in fleet.all:
        back(reader, committed=key(1))
    waiting = fleet.controller.begin(deadline=5)
    job.wait(5, *fleet.all)
    with pytest.raises(DeadlineError, match="server was restarted: all writers"):
        job.reply(waiting)


def test_an_old_incarnation_does_not_come_back_to_a_server_that_knows_a_newer_one() -> None:
    job, writers, fleet = setup()
    new = job.writers(process="new")
    assert job.state.epochs == {TABLE: 2}
    job.restart()
    with pytest.raises(FencedError, match="newer incarnation"):
        back(writers[0])
    for writer in new:
        back(writer)
    assert job.status().epoch == 2
    del fleet


def test_a_readers_claim_teaches_a_forgetful_server_the_newest_epoch() -> None:
    job, writers, fleet = setup()
    new = job.writers(process="new")
    publish(new, 1)
    fleet.update()
    job.state.core.tables[TABLE].epoch = 1
    job.restart()
    back(writers[0], last=key(2))
    assert job.status().epoch == 1
    back(fleet.workers[0], committed=key(1, 2))
    assert job.status().epoch == 2
    with pytest.raises(FencedError, match="epoch 2 superseded epoch 1"):
        writers[0].beat()
    assert job.writer(0, process="third").registered.epoch == 3


def test_a_writers_claim_teaches_a_forgetful_server_the_newest_epoch() -> None:
    job, writers, _ = setup()
    new = job.writers(process="new")
    job.state.core.tables[TABLE].epoch = 0
    job.restart()
    back(writers[0])
    back(new[0])
    assert job.status().epoch == 2
    with pytest.raises(FencedError):
        writers[0].beat()


def test_a_number_that_was_used_before_the_restart_is_not_used_again() -> None:
    job, writers, fleet = setup()
    job.restart()
    all_back(writers, fleet, last=2)
    with pytest.raises(StaleVersionError):
        writers[0].put(2)
    with pytest.raises(StaleVersionError):
        writers[1].put(1)
    writers[0].put(3)


def test_a_committed_number_is_not_used_again_even_if_the_writers_forgot_it() -> None:
    job, writers, fleet = setup()
    job.restart()
    back(fleet.workers[0], committed=key(2))
    for writer in writers:
        back(writer)
    with pytest.raises(StaleVersionError):
        writers[0].put(2)
    back(fleet.controller)
    back(fleet.workers[1], committed=key(2))
    with pytest.raises(StaleVersionError):
        fleet.controller.begin(1)


def test_refills_come_in_any_order_and_say_what_is_closed() -> None:
    job, writers, fleet = setup()
    job.restart()
    all_back(writers, fleet, last=3)
    writers[0].put(3, refill=True)
    writers[0].put(1, refill=True, closed=True)
    writers[1].put(1, refill=True, closed=True)
    writers[1].put(3, refill=True)
    assert (job.version(1).state, job.version(3).state) == ("RETIRED", "SEALED")
    writers[0].put(2, refill=True)
    writers[1].put(2, refill=True)
    assert job.version(2).state == "RETIRED"
    assert job.version(3).closed == ()
    assert job.version(2).closed == (0, 1)


def test_a_window_of_an_earlier_boot_closes_at_once_since_its_readers_are_fenced() -> None:
    job, writers, fleet = setup()
    begun = fleet.controller.begin()
    waiting = writers[0].close(2)
    assert not job.done(waiting)
    job.restart()
    back(writers[0], last=key(2))
    assert writers[0].close(2).state == "RETIRED"
    back(fleet.workers[0], committed=key(1), dirty=True)
    with pytest.raises(FencedError):
        fleet.workers[0].verify(begun)
    with pytest.raises(FencedError):
        job.send(m.Verified(fleet.controller.fence, TABLE, key(2), begun.attempt, b"plan", 8, 8))


def test_an_instance_interrupted_in_place_stays_dirty_over_a_restart() -> None:
    job, writers, fleet = setup()
    fleet.controller.begin()
    job.restart()
    for writer in writers:
        back(writer, last=key(2))
    back(fleet.controller, committed=key(1))
    for worker in fleet.workers:
        back(worker, committed=key(1), dirty=True)
    assert job.instance().dirty
    for writer in writers:
        writer.put(2, refill=True)
        writer.digest(2)
    fleet.update()
    assert job.instance().serving


def test_ranks_that_come_back_with_different_versions_are_a_mixture() -> None:
    for claims in ((1, 2), (2, 1)):
        job, writers, fleet = setup()
        job.restart()
        for writer in writers:
            back(writer, last=key(2))
        back(fleet.controller, committed=key(2))
        for worker, number in zip(fleet.workers, claims, strict=True):
            back(worker, committed=key(number))
        state = job.instance()
        assert (state.committed, state.dirty, state.serving) == (key(2), True, False)


def test_a_fresh_trainer_after_a_restart_opens_a_new_epoch() -> None:
    job, writers, _ = setup()
    job.restart()
    back(writers[0], last=key(2))
    assert job.writer(1, process="fresh").registered.epoch == 2
    with pytest.raises(FencedError):
        writers[0].beat()


def test_an_epoch_that_had_not_published_still_assembles_after_a_restart() -> None:
    job = Job()
    first = job.writer(0)
    job.restart()
    back(first)
    assert job.writer(1).registered.epoch == 1
    assert job.status().missing == ()


def test_of_two_processes_of_one_rank_the_newer_registration_wins() -> None:
    job, _, fleet = setup()
    old = fleet.workers[0]
    job.fleet()
    newer = job.fleet(process="n").workers[0]
    job.restart()
    back(old, committed=key(1))
    back(newer)
    with pytest.raises(FencedError, match="newer process"):
        old.join(previous=old.fence)
    job.restart()
    back(newer)
    with pytest.raises(FencedError, match="newer process"):
        old.join(previous=old.fence)
