from __future__ import annotations

import pytest

from syncline.errors import (
    DeadlineError,
    FencedError,
    PlanError,
    ProtocolError,
    RevokedError,
    StaleVersionError,
    TransportError,
)
from syncline.protocol import messages as m
from tests.protocol.driver import TABLE, Fleet, Job, Writer, key, publish


def setup(*, published: bool = True) -> tuple[Job, list[Writer], Fleet]:
    job = Job()
    writers = job.writers()
    fleet = job.fleet()
    if published:
        publish(writers, 1)
    return job, writers, fleet


def test_a_whole_update() -> None:
    job, _, fleet = setup()
    assert job.instance().serving
    begun = fleet.controller.begin()
    assert (begun.key, begun.attempt, begun.committed) == (key(1), 1, None)
    state = job.instance()
    assert (state.state, state.dirty, state.serving, state.target) == ("PULLING", True, False, key(1))
    fleet.verify(begun)
    assert job.instance().state == "VERIFIED"
    assert fleet.controller.commit(key(1), 1, None).applying == (0, 1)
    state = job.instance()
    assert (state.state, state.committed, state.applying, state.serving) == (
        "COMMITTED",
        key(1),
        (0, 1),
        False,
    )
    assert not fleet.workers[1].apply(key(1)).serving
    assert not job.instance().serving
    assert fleet.workers[0].apply(key(1)).serving
    assert job.instance().serving
    assert not job.instance().dirty


def test_a_staged_update_serves_until_the_decision_and_not_while_ranks_apply() -> None:
    job, writers, fleet = setup()
    fleet.update()
    publish(writers, 2)
    begun = fleet.controller.begin(mode="staged")
    fleet.verify(begun)
    assert job.instance().serving
    fleet.controller.commit(key(2), begun.attempt, key(1))
    assert job.instance().dirty
    assert not job.instance().serving
    fleet.workers[0].apply(key(2))
    assert not job.instance().serving
    fleet.workers[1].apply(key(2))
    assert job.instance().serving


def test_commit_needs_every_rank_verified_naming_who_is_not() -> None:
    job, _, fleet = setup()
    begun = fleet.controller.begin()
    fleet.workers[0].verify(begun)
    with pytest.raises(ProtocolError, match="every rank") as caught:
        fleet.controller.commit(key(1), begun.attempt, None)
    assert "[1]" in str(caught.value)
    assert job.instance().committed is None


def test_commit_is_a_compare_and_set() -> None:
    job, writers, fleet = setup()
    fleet.update()
    publish(writers, 2)
    begun = fleet.controller.begin()
    fleet.verify(begun)
    for wrong in (None, key(2)):
        with pytest.raises(ProtocolError, match="committed another version"):
            fleet.controller.commit(key(2), begun.attempt, wrong)
    with pytest.raises(ProtocolError, match="another version"):
        fleet.controller.commit(key(3), begun.attempt, key(1))
    with pytest.raises(FencedError, match="superseded"):
        fleet.controller.commit(key(2), begun.attempt - 1, key(1))
    with pytest.raises(ProtocolError, match="its own instance"):
        job.send(m.Commit(fleet.controller.fence, TABLE, "b", key(1), key(2), begun.attempt))
    fleet.controller.commit(key(2), begun.attempt, key(1))
    assert job.instance().committed == key(2)


def test_a_commit_sent_again_is_answered_alike_and_changes_nothing() -> None:
    job, _, fleet = setup()
    begun = fleet.controller.begin()
    fleet.verify(begun)
    first = fleet.controller.commit(key(1), begun.attempt, None)
    assert fleet.controller.commit(key(1), begun.attempt, None) == first
    fleet.workers[0].apply(key(1))
    assert fleet.controller.commit(key(1), begun.attempt, None).applying == (1,)
    fleet.workers[0].apply(key(1))
    fleet.workers[1].apply(key(1))
    assert fleet.controller.commit(key(1), begun.attempt, None).applying == ()
    assert job.instance().serving


def test_every_request_of_an_update_may_be_sent_again() -> None:
    job, _, fleet = setup()
    begun = fleet.controller.begin(nonce=7)
    assert fleet.controller.begin(nonce=7) == begun
    for worker in fleet.workers:
        worker.progress(begun, 4)
        worker.progress(begun, 4)
        worker.verify(begun)
        worker.verify(begun)
    fleet.controller.commit(key(1), begun.attempt, None)
    fleet.workers[0].verify(begun)
    assert job.instance().state == "COMMITTED"
    assert fleet.controller.begin(nonce=7) == msg_after(begun)


def msg_after(begun: m.Begun) -> m.Begun:
    return m.Begun(begun.key, begun.attempt, begun.writers, begun.membership, begun.key)


def test_commit_needs_the_digests_of_every_writer_under_the_readers_plan() -> None:
    job, writers, fleet = setup(published=False)
    for writer in writers:
        writer.put(1)
    begun = fleet.controller.begin()
    fleet.verify(begun)
    writers[0].digest(1)
    with pytest.raises(ProtocolError, match="digests") as caught:
        fleet.controller.commit(key(1), begun.attempt, None)
    assert "writer ranks [1]" in str(caught.value)
    writers[1].digest(1, b"another plan")
    with pytest.raises(ProtocolError, match="digests"):
        fleet.controller.commit(key(1), begun.attempt, None)
    writers[1].digest(1)
    fleet.controller.commit(key(1), begun.attempt, None)
    assert job.instance().committed == key(1)


def test_level_none_commits_without_digests() -> None:
    job, writers, fleet = setup(published=False)
    for writer in writers:
        writer.put(1)
    fleet.update(level="none")
    assert job.instance().committed == key(1)


def test_ranks_that_verified_by_different_plans_cannot_commit() -> None:
    _job, _, fleet = setup()
    begun = fleet.controller.begin()
    fleet.workers[0].verify(begun)
    with pytest.raises(ProtocolError, match="two plans"):
        fleet.workers[0].verify(begun, plan=b"x")
    fleet.workers[1].verify(begun, plan=b"x")
    with pytest.raises(PlanError, match="different plans"):
        fleet.controller.commit(key(1), begun.attempt, None)


def test_a_rank_that_received_less_than_planned_is_not_verified() -> None:
    job, _, fleet = setup()
    begun = fleet.controller.begin()
    with pytest.raises(ProtocolError, match="every planned byte"):
        fleet.workers[0].verify(begun, nbytes=0, planned=8)
    assert job.instance().state == "PULLING"
    assert "instance a, rank 0" in job.version(1).pins


def test_a_failed_rank_ends_the_attempt_for_all_and_the_next_one_succeeds() -> None:
    job, _, fleet = setup()
    begun = fleet.controller.begin()
    fleet.workers[0].verify(begun)
    fleet.workers[1].fail(begun, what="socket closed")
    state = job.instance()
    assert (state.state, state.dirty, state.serving) == ("IDLE", True, False)
    assert "rank 1 failed: socket closed" in state.failure
    with pytest.raises(FencedError, match="socket closed"):
        fleet.controller.commit(key(1), begun.attempt, None)
    with pytest.raises(FencedError):
        fleet.workers[1].verify(begun)
    again = fleet.update()
    assert again.attempt == begun.attempt + 1
    assert job.instance().serving


def test_an_attempt_that_touched_nothing_leaves_the_instance_clean() -> None:
    job, _, fleet = setup()
    begun = fleet.controller.begin()
    fleet.workers[0].fail(begun, touched=False)
    assert job.instance().dirty
    fleet.workers[1].fail(begun, touched=False)
    assert job.instance().serving
    begun = fleet.controller.begin()
    fleet.workers[0].fail(begun, touched=False)
    fleet.workers[1].fail(begun, touched=True)
    assert job.instance().dirty
    begun = fleet.controller.begin()
    for worker in fleet.workers:
        worker.fail(begun, touched=False)
    assert job.instance().dirty


def test_a_rank_that_verified_in_place_has_touched_its_memory() -> None:
    job, _, fleet = setup()
    begun = fleet.controller.begin()
    fleet.workers[0].verify(begun)
    fleet.workers[1].fail(begun, touched=False)
    fleet.workers[0].fail(begun, touched=False)
    assert job.instance().dirty


def test_a_controller_may_give_up_before_any_rank_started() -> None:
    job, _, fleet = setup()
    begun = fleet.controller.begin()
    fleet.controller.fail(begun, touched=False)
    assert job.instance().serving
    begun = fleet.controller.begin()
    fleet.workers[0].progress(begun, 1)
    fleet.controller.fail(begun, touched=False)
    assert job.instance().dirty


def test_a_rank_that_fails_while_applying_leaves_the_instance_dirty() -> None:
    job, writers, fleet = setup()
    begun = fleet.controller.begin(mode="staged")
    fleet.verify(begun)
    fleet.controller.commit(key(1), begun.attempt, None)
    fleet.workers[0].apply(key(1))
    fleet.workers[1].fail(begun)
    assert job.instance().dirty
    fleet.workers[1].apply(key(1))
    assert not job.instance().serving
    with pytest.raises(TransportError, match="broken pipe"):
        job.send(m.AwaitServing(writers[0].fence, TABLE, "a", key(1), 5.0))
    fleet.update(1)
    assert job.instance().serving


def test_a_new_update_ends_the_one_under_way() -> None:
    job, _, fleet = setup()
    first = fleet.controller.begin()
    fleet.verify(first)
    second = fleet.controller.begin()
    assert second.attempt == first.attempt + 1
    with pytest.raises(FencedError, match="superseded"):
        fleet.workers[0].verify(first)
    with pytest.raises(FencedError):
        fleet.controller.commit(key(1), first.attempt, None)
    with pytest.raises(FencedError, match="newer update"):
        fleet.controller.begin(nonce=fleet.controller.nonce - 1)
    with pytest.raises(ProtocolError, match="every rank"):
        fleet.controller.commit(key(1), second.attempt, None)
    assert job.instance().committed is None


def test_update_takes_the_newest_and_refuses_older_ones_at_once() -> None:
    job, writers, fleet = setup(published=False)
    publish(writers, 1, "snapshot")
    publish(writers, 2, "snapshot")
    with pytest.raises(StaleVersionError):
        fleet.controller.begin(1)
    fleet.update()
    assert job.instance().committed == key(2)
    assert fleet.controller.begin() == m.Current(key(2))
    assert fleet.controller.begin(2) == m.Current(key(2))
    with pytest.raises(StaleVersionError):
        fleet.controller.begin(1)
    waiting = fleet.controller.begin(after=key(2))
    assert not job.done(waiting)
    with pytest.raises(StaleVersionError):
        fleet.controller.begin(2, after=key(2))


def test_a_future_version_is_waited_for_to_the_deadline() -> None:
    job, writers, fleet = setup()
    waiting = fleet.controller.begin(2)
    assert not job.done(waiting)
    publish(writers, 2)
    assert job.reply(waiting).key == key(2)
    waiting = fleet.controller.begin(9, deadline=5)
    job.wait(5, *writers, *fleet.all)
    with pytest.raises(DeadlineError, match=r"1\.9 .*newest sealed: 1\.2.* writers 0 to 1"):
        job.reply(waiting)


def test_a_wait_for_an_unsealed_version_names_the_writers_that_are_late() -> None:
    job, writers, fleet = setup(published=False)
    writers[0].put(1)
    waiting = fleet.controller.begin(1, deadline=5)
    job.wait(5, *writers, *fleet.all)
    with pytest.raises(DeadlineError, match=r"version 1\.1 by writer ranks \[1\]"):
        job.reply(waiting)


def test_an_incomplete_instance_waits_for_its_ranks_by_name() -> None:
    job, writers, fleet = setup()
    fleet.workers[1].leave()
    waiting = fleet.controller.begin(deadline=5)
    job.wait(5, *writers, fleet.controller, fleet.workers[0])
    with pytest.raises(DeadlineError, match=r"ranks \[1\] of instance a"):
        job.reply(waiting)


def test_a_dirty_instance_pulls_its_own_version_again() -> None:
    job, _, fleet = setup()
    fleet.update()
    broken = fleet.workers[1]
    broken.process = "restarted"
    broken.fence = broken.join().fence
    assert job.instance().dirty
    begun = fleet.controller.begin()
    assert begun.key == key(1)
    fleet.verify(begun)
    fleet.controller.commit(key(1), begun.attempt, key(1))
    for worker in fleet.workers:
        worker.apply(key(1))
    assert job.instance().serving


def test_an_acknowledgement_of_another_version_is_refused() -> None:
    _job, writers, fleet = setup()
    fleet.update()
    publish(writers, 2)
    with pytest.raises(StaleVersionError):
        fleet.workers[0].apply(key(2))
    fleet.update()
    with pytest.raises(StaleVersionError):
        fleet.workers[0].apply(key(1))


def test_an_acknowledgement_does_not_clean_an_instance_that_is_pulled_into_again() -> None:
    job, writers, fleet = setup()
    begun = fleet.controller.begin()
    fleet.verify(begun)
    fleet.controller.commit(key(1), begun.attempt, None)
    publish(writers, 2)
    fleet.controller.begin()
    for worker in fleet.workers:
        worker.apply(key(1))
    assert job.instance().dirty
    assert not job.instance().serving


def test_serving_can_be_awaited() -> None:
    job, writers, fleet = setup()
    begun = fleet.controller.begin()
    waiting = job.send(m.AwaitServing(fleet.controller.fence, TABLE, "a", key(1), 5.0))
    fleet.verify(begun)
    fleet.controller.commit(key(1), begun.attempt, None)
    fleet.workers[1].apply(key(1))
    late = job.send(m.AwaitServing(fleet.controller.fence, TABLE, "a", key(1), 2.0))
    job.wait(2, *writers, *fleet.all)
    with pytest.raises(DeadlineError, match=r"ranks \[0\] of instance a"):
        job.reply(late)
    assert not job.done(waiting)
    fleet.workers[0].apply(key(1))
    assert job.reply(waiting) == m.Done()


def test_writers_can_wait_for_the_fleet_and_hear_who_failed() -> None:
    job, writers, a = setup()
    b = job.fleet("b")
    waiting = job.send(m.WaitCommitted(writers[0].fence, TABLE, key(1), 60.0))
    a.update()
    assert not job.done(waiting)
    begun = b.controller.begin()
    b.workers[0].fail(begun, what="out of memory")
    assert job.reply(waiting) == m.CommitSummary(
        key(1), ("a",), {"b": "instance b, rank 0 failed: out of memory"}
    )
    b.controller.begin()
    waiting = job.send(m.WaitCommitted(writers[0].fence, TABLE, key(1), 5.0))
    job.wait(5, *writers, *a.all, *b.all)
    with pytest.raises(DeadlineError, match="instance b"):
        job.reply(waiting)


def test_digests_are_fetched_when_all_are_there_and_the_late_writer_is_named() -> None:
    job, writers, fleet = setup(published=False)
    for writer in writers:
        writer.put(1)
    fleet.controller.begin()
    writers[1].digest(1)
    worker = fleet.workers[0]
    waiting = job.send(m.FetchDigests(worker.fence, TABLE, key(1), b"plan", 5.0))
    late = job.send(m.FetchDigests(worker.fence, TABLE, key(1), b"other", 3.0))
    job.wait(3, *writers, *fleet.all)
    with pytest.raises(DeadlineError, match=r"writer ranks \[0, 1\]"):
        job.reply(late)
    writers[0].digest(1)
    assert job.reply(waiting) == m.DigestBlobs((b"digest0", b"digest1"))


def test_a_rank_that_waits_for_digests_is_not_stuck_and_a_wait_that_ended_is_no_excuse() -> None:
    job, writers, fleet = setup(published=False)
    for writer in writers:
        writer.put(1)
    fleet.controller.begin(deadline=300)
    asked = [job.send(m.FetchDigests(worker.fence, TABLE, key(1), b"plan", 15.0)) for worker in fleet.workers]
    job.wait(14, *writers, *fleet.all)
    assert job.instance().state == "PULLING"
    job.wait(2, *writers, *fleet.all)
    with pytest.raises(DeadlineError, match=r"writer ranks \[0, 1\]"):
        job.reply(asked[0])
    again = [job.send(m.FetchDigests(one.fence, TABLE, key(1), b"plan", 100.0)) for one in fleet.workers]
    assert job.instance().state == "PULLING"
    job.wait(10, *writers, *fleet.all)
    assert job.instance().state == "IDLE"
    assert "no byte moved" in job.instance().failure
    assert not job.done(again[0])


def test_a_dead_rank_is_named_by_whoever_waits_for_it_to_serve() -> None:
    job, writers, fleet = setup()
    begun = fleet.controller.begin()
    fleet.verify(begun)
    fleet.controller.commit(key(1), begun.attempt, None)
    waiting = job.send(m.AwaitServing(fleet.controller.fence, TABLE, "a", key(1), 60.0))
    fleet.workers[0].apply(key(1))
    job.wait(11, *writers, fleet.controller, fleet.workers[0])
    with pytest.raises(ProtocolError, match=r"it is DIRTY\n.*instance a, rank 1 was lost"):
        job.reply(waiting)


def test_only_the_right_role_may_ask() -> None:
    job, writers, fleet = setup()
    begun = fleet.controller.begin()
    wrong = [
        m.Put(fleet.controller.fence, TABLE, 2, b"", 1, "live", b""),
        m.BeginUpdate(writers[0].fence, TABLE, None, "staged", 5.0, 1),
        m.BeginUpdate(fleet.workers[0].fence, TABLE, None, "staged", 5.0, 1),
        m.Verified(fleet.controller.fence, TABLE, key(1), begun.attempt, b"plan", 1, 1),
        m.Commit(fleet.workers[0].fence, TABLE, "a", None, key(1), begun.attempt),
        m.Failed(writers[0].fence, TABLE, key(1), begun.attempt, {}),
    ]
    for request in wrong:
        with pytest.raises(ProtocolError, match="not for this member"):
            job.send(request)
    with pytest.raises(ProtocolError, match="another table"):
        job.send(m.Put(writers[0].fence, "other", 2, b"", 1, "live", b""))


def test_a_revoked_attempt_begun_again_says_so() -> None:
    job, writers, fleet = setup()
    fleet.controller.begin(nonce=5)
    job.wait(10, *writers, *fleet.all)
    with pytest.raises(RevokedError):
        fleet.controller.begin(nonce=5)
    assert isinstance(fleet.controller.begin(nonce=6), m.Begun)
