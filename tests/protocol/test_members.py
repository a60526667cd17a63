from __future__ import annotations

from typing import Any

import pytest

from syncline.errors import DeadlineError, FencedError, ProtocolError, SynclineError, TransportError
from syncline.protocol import messages as m
from syncline.protocol.ids import Fence
from tests.protocol.driver import TABLE, Job, Reader, key, publish


def setup() -> tuple[Job, list, Any]:
    job = Job()
    writers = job.writers()
    fleet = job.fleet()
    publish(writers, 1)
    return job, writers, fleet


def fenced_requests(writer: Any, fleet: Any, begun: m.Begun, fences: dict[str, Fence]) -> list[Any]:
    w, c, r = fences["writer"], fences["controller"], fences["worker"]
    return [
        m.Heartbeat(w),
        m.Deregister(w),
        m.PutManifest(w, b"f", b"x"),
        m.GetManifest(w, b"fp0", 5.0),
        m.PutBinding(w, b"b", b"x"),
        m.GetBinding(w, b"b", 5.0),
        m.AwaitMembers(w, TABLE, 5.0),
        m.Put(w, TABLE, 2, b"fp0", 1, "live", b"binding"),
        m.Digests(w, TABLE, key(1), b"plan", b"digest0"),
        m.FetchDigests(w, TABLE, key(1), b"plan", 5.0),
        m.AbortVersion(w, TABLE, key(1), "no"),
        m.CloseWindow(w, TABLE, key(1), 5.0),
        m.WaitCommitted(w, TABLE, key(1), 5.0),
        m.Pin(w, TABLE, None, 5.0),
        m.Unpin(w, TABLE, key(1)),
        m.BeginUpdate(c, TABLE, None, "in_place", 5.0, 99),
        m.Progress(r, TABLE, key(1), begun.attempt, 5),
        m.Verified(r, TABLE, key(1), begun.attempt, b"plan", 8, 8),
        m.Failed(r, TABLE, key(1), begun.attempt, {}),
        m.Commit(c, TABLE, "a", None, key(1), begun.attempt),
        m.Applied(r, TABLE, key(1)),
        m.AwaitServing(c, TABLE, "a", key(1), 5.0),
        m.StartUpdate(c, TABLE, key(1), begun.attempt),
        m.AwaitUpdate(r, TABLE, 0, 5.0),
        m.AwaitBound(r, TABLE, key(1), begun.attempt, 5.0),
        m.AwaitVerified(c, TABLE, key(1), begun.attempt, 5.0),
        m.AwaitDecision(r, TABLE, key(1), begun.attempt, 5.0),
        m.AwaitPulls(w, TABLE, {}, 5.0),
        m.StartUpdate(c, TABLE, key(1), begun.attempt),
        m.AwaitVerified(c, TABLE, key(1), begun.attempt, 5.0),
        m.AwaitUpdate(r, TABLE, 0, 5.0),
        m.AwaitBound(r, TABLE, key(1), begun.attempt, 5.0),
        m.AwaitDecision(r, TABLE, key(1), begun.attempt, 5.0),
        m.AwaitPulls(w, TABLE, {}, 5.0),
        m.AwaitDirty(c, TABLE, 5.0),
    ]


def change(what: str, fence: Fence) -> Fence:
    fields = {name: getattr(fence, name) for name in Fence.__struct_fields__}
    fields[what] = {"job": "another", "boot": 7, "epoch": 7, "member": 77, "attempt": 77}[what]
    return Fence(**fields)


@pytest.mark.parametrize("what", ["job", "boot", "epoch", "member", "attempt"])
@pytest.mark.parametrize("index", range(28))
def test_a_wrong_fence_changes_nothing(what: str, index: int) -> None:
    job, writers, fleet = setup()
    begun = fleet.controller.begin()
    holders = {"writer": writers[0], "controller": fleet.controller, "worker": fleet.workers[0]}
    fences = {name: change(what, one.fence) for name, one in holders.items()}
    before = job.send(m.StatusQuery())
    with pytest.raises(FencedError):
        job.send(fenced_requests(writers[0], fleet, begun, fences)[index])
    assert job.send(m.StatusQuery()) == before


def test_every_fenced_request_is_covered() -> None:
    job, writers, fleet = setup()
    begun = fleet.controller.begin()
    fences = {
        "writer": writers[0].fence,
        "controller": fleet.controller.fence,
        "worker": fleet.workers[0].fence,
    }
    covered = {type(one) for one in fenced_requests(writers[0], fleet, begun, fences)}
    free = {m.RegisterWriter, m.RegisterReader, m.JoinFailed, m.StatusQuery, m.Watch}
    assert covered | free == set(m.REQUESTS)
    assert job.instance().attempt == 1


def test_a_lease_runs_out_without_a_sign_of_life_and_any_request_renews_it() -> None:
    job, writers, fleet = setup()
    job.wait(9, *writers, *fleet.all)
    fleet.workers[0].beat()
    job.tick(9.5)
    fleet.workers[0].beat()
    job.tick(1)
    with pytest.raises(FencedError, match="no sign of life"):
        writers[0].beat()
    fleet.workers[0].beat()
    assert job.instance().missing == (-1, 1)


def test_a_wait_is_no_sign_of_life() -> None:
    job, _, fleet = setup()
    waiting = fleet.controller.begin(9, deadline=500)
    for _ in range(11):
        job.tick(1)
    with pytest.raises(FencedError, match="no sign of life"):
        job.reply(waiting)


# --- writers and epochs


def test_writers_that_start_together_share_an_epoch_in_any_order() -> None:
    job = Job()
    second = job.writer(1)
    first = job.writer(0)
    assert (first.registered.epoch, second.registered.epoch) == (1, 1)
    assert first.registered.missing == (b"fp0",)
    assert job.status().missing == ()


def test_a_registration_whose_answer_was_lost_is_answered_alike() -> None:
    job = Job()
    first, _ = job.writers()
    assert first.join().fence == first.fence
    assert job.status().epoch == 1
    fleet = job.fleet()
    for reader in fleet.all:
        assert reader.join().fence == reader.fence


def test_a_new_incarnation_fences_the_old_writers() -> None:
    job, writers, fleet = setup()
    publish(writers, 2)
    writers[0].put(3, "snapshot")
    new = job.writers(process="new")
    assert [one.registered.epoch for one in new] == [2, 2]
    for old in writers:
        with pytest.raises(FencedError, match="epoch 2 superseded epoch 1"):
            old.put(4)
        with pytest.raises(FencedError, match="newer incarnation"):
            old.join(previous=old.fence)
    assert (job.version(2).state, job.version(3).state) == ("BROKEN", "ABORTED")
    assert job.state.epochs == {TABLE: 2}
    del fleet


def test_a_trainer_restarted_from_an_older_checkpoint_is_accepted_as_newer() -> None:
    job, writers, fleet = setup()
    publish(writers, 50)
    fleet.update()
    assert job.instance().committed == key(50)
    new = job.writers(process="new")
    publish(new, 10)
    begun = fleet.update()
    assert begun.key == key(10, 2)
    assert job.instance().committed == key(10, 2)
    publish(new, 11)
    assert fleet.update().key == key(11, 2)


def test_a_late_starter_of_another_size_opens_a_new_epoch() -> None:
    job = Job()
    small = job.writer(0, 2)
    large = job.writer(1, 3, process="x")
    assert (small.registered.epoch, large.registered.epoch) == (1, 2)
    with pytest.raises(FencedError):
        small.beat()


def test_one_fresh_process_in_a_complete_epoch_is_a_new_incarnation() -> None:
    job, writers, _ = setup()
    assert job.writer(1, process="restarted alone").registered.epoch == 2
    with pytest.raises(FencedError):
        writers[0].beat()


def test_a_writer_that_was_only_silent_comes_back_to_its_epoch() -> None:
    job, writers, fleet = setup()
    job.wait(11, writers[0], *fleet.all)
    assert job.version(1).state == "BROKEN"
    back = writers[1].join(previous=writers[1].fence, last=key(1))
    assert back.epoch == 1
    writers[1].fence = back.fence
    publish(writers, 2)
    assert fleet.update().key == key(2)


def test_a_rank_given_to_a_newer_process_is_not_given_back() -> None:
    job = Job()
    first = job.writer(0)
    job.wait(11)
    job.writer(0, process="second try")
    with pytest.raises(FencedError, match="newer process"):
        first.join(previous=first.fence)
    fleet = job.fleet()
    old = fleet.workers[0]
    Reader(job, "a", 0, 2, "replacement")
    with pytest.raises(FencedError, match="newer process"):
        old.join(previous=old.fence)


@pytest.mark.parametrize("fence", [Fence("other", 1, 1, 1), Fence("job", 9, 1, 1), Fence("job", 1, 0, 1)])
def test_a_fence_of_another_job_or_server_is_no_past(fence: Fence) -> None:
    job = Job()
    with pytest.raises(FencedError):
        job.writer(0, previous=fence)


def test_ranks_must_fit_the_world() -> None:
    job = Job()
    for rank, world in ((2, 2), (-1, 2), (0, 0), (0, 1 << 20)):
        with pytest.raises(ProtocolError, match="rank"):
            job.writer(rank, world)
    with pytest.raises(ProtocolError, match="rank"):
        Reader(job, "a", 2, 2, "p")
    Reader(job, "a", 0, 2, "p")
    with pytest.raises(ProtocolError, match="differ in world"):
        Reader(job, "a", 1, 3, "q")
    first = job.writer(0, 2)
    with pytest.raises(ProtocolError, match="differ in world"):
        job.writer(1, 3, "other", previous=first.fence)


# --- readers


def test_a_reader_that_dies_while_pulling_hurts_only_its_own_instance() -> None:
    job, writers, a = setup()
    b = job.fleet("b")
    begun, good = a.controller.begin(deadline=300), b.controller.begin(deadline=300)
    waiting = writers[0].close(1, deadline=300)
    for step in range(1, 12):
        for worker in (*b.workers, a.workers[0]):
            worker.beat(step)
        job.wait(1, *writers, a.controller, b.controller)
    state = job.instance("a")
    assert (state.missing, state.dirty, state.serving) == ((1,), True, False)
    assert "rank 1 was lost" in state.failure
    assert set(job.version(1).pins) == {"instance b, rank 0", "instance b, rank 1"}
    b.verify(good)
    assert job.reply(waiting).state in ("SEALED", "RETIRED")
    b.controller.commit(key(1), good.attempt, None)
    for worker in b.workers:
        worker.apply(key(1))
    assert job.instance("b").serving
    with pytest.raises(FencedError):
        a.controller.commit(key(1), begun.attempt, None)
    publish(writers, 2)
    a.workers[1] = Reader(job, "a", 1, 2, "new")
    a.update(2)
    assert job.instance("a").serving


def test_a_new_process_with_unknown_weights_makes_the_instance_dirty() -> None:
    job, _, fleet = setup()
    fleet.update()
    Reader(job, "a", 0, 2, "new")
    assert job.instance().dirty
    assert not job.instance().serving


def test_a_process_that_comes_back_with_its_weights_is_welcome() -> None:
    job, writers, fleet = setup()
    fleet.update()
    job.wait(11, *writers, fleet.controller, fleet.workers[0])
    assert not job.instance().serving
    worker = fleet.workers[1]
    worker.fence = worker.join(previous=worker.fence, committed=key(1)).fence
    assert job.instance().serving
    job.wait(11, *writers, fleet.controller, fleet.workers[0])
    worker.join(previous=worker.fence, committed=key(1), dirty=True)
    assert job.instance().dirty


def test_a_worker_replaced_while_ranks_apply_leaves_the_instance_dirty() -> None:
    job, _, fleet = setup()
    begun = fleet.controller.begin()
    fleet.verify(begun)
    fleet.controller.commit(key(1), begun.attempt, None)
    fleet.workers[0].apply(key(1))
    new = Reader(job, "a", 1, 2, "new")
    assert not new.apply(key(1)).serving
    assert job.instance().dirty


def test_the_death_of_a_controller_before_its_decision_ends_the_attempt() -> None:
    job, _, fleet = setup()
    begun = fleet.controller.begin()
    fleet.verify(begun)
    old = fleet.controller
    new = Reader(job, "a", -1, 2, "new controller")
    assert (new.registered.committed, new.registered.dirty, new.registered.applying) == (None, True, None)
    with pytest.raises(FencedError):
        old.commit(key(1), begun.attempt, None)
    with pytest.raises(FencedError, match="was lost"):
        new.commit(key(1), begun.attempt, None)
    fleet.controller = new
    assert fleet.update().attempt == begun.attempt + 1


def test_a_decision_outlives_its_controller() -> None:
    job, writers, fleet = setup()
    begun = fleet.controller.begin()
    fleet.verify(begun)
    fleet.controller.commit(key(1), begun.attempt, None)
    fleet.workers[0].apply(key(1))
    job.wait(11, *writers, *fleet.workers)
    new = Reader(job, "a", -1, 2, "new controller")
    assert (new.registered.committed, new.registered.applying) == (key(1), key(1))
    assert new.commit(key(1), begun.attempt, None).applying == (1,)
    fleet.workers[1].apply(key(1))
    assert job.instance().serving


def test_an_instance_without_a_process_is_forgotten_with_its_weights() -> None:
    job, _, fleet = setup()
    fleet.update()
    for reader in fleet.all:
        reader.leave()
    assert job.status().instances == ()
    again = job.fleet(process="second life")
    assert job.instance().committed is None
    again.update()
    assert job.instance().serving


def test_pins_of_a_dead_holder_drop() -> None:
    job, writers, fleet = setup()
    job.send(m.Pin(fleet.workers[0].fence, TABLE, key(1), 500.0))
    waiting = writers[0].close(1, deadline=500)
    job.wait(11, *writers, fleet.controller, fleet.workers[1])
    assert job.reply(waiting).revoked == ()


# --- connecting


def test_members_are_awaited_by_name() -> None:
    job = Job()
    first = job.writer(0)
    waiting = job.send(m.AwaitMembers(first.fence, TABLE, 5.0, True, ("a",)))
    job.wait(5, first)
    with pytest.raises(DeadlineError, match=r"writer 1 \(never registered\); instance a, ranks all"):
        job.reply(waiting)
    waiting = job.send(m.AwaitMembers(first.fence, TABLE, 5.0, True, ("a",)))
    second = job.writer(1)
    assert not job.done(waiting)
    job.fleet()
    reply = job.reply(waiting)
    assert [rank.manifest_fp for rank in reply.writers] == [b"fp0", b"fp1"]
    assert [one.name for one in reply.instances] == ["a"]
    job.wait(11, first)
    late = job.send(m.AwaitMembers(first.fence, TABLE, 0.5))
    job.tick(1)
    with pytest.raises(DeadlineError, match=r"writer 1 \(no sign of life for 10 s\)"):
        job.reply(late)
    del second


def test_who_waits_for_somebody_that_failed_to_join_hears_why() -> None:
    job = Job()
    writers = job.writers()
    error: dict[str, str | None] = {"kind": "TransportError", "what": "no manifest: unsupported layer"}
    waiting = job.send(m.AwaitMembers(writers[0].fence, TABLE, 60.0, True, ("a",)))
    job.send(m.JoinFailed(TABLE, "instance a, rank 1", error, "a"))
    with pytest.raises(TransportError, match="unsupported layer"):
        job.reply(waiting)
    with pytest.raises(SynclineError, match="unsupported layer"):
        job.send(m.AwaitMembers(writers[0].fence, TABLE, 60.0, False, ("a",)))
    job.fleet("b")
    job.send(m.AwaitMembers(writers[0].fence, TABLE, 60.0, True, ("b",)))
    job.fleet("a")
    assert isinstance(job.send(m.AwaitMembers(writers[0].fence, TABLE, 60.0, True, ("a",))), m.Members)


def test_a_refusal_is_remembered_for_a_while_only() -> None:
    job = Job()
    writers = job.writers()
    fleet = job.fleet("b")
    job.send(m.JoinFailed(TABLE, "writer 1", {"kind": "AuthError", "what": "no"}))
    with pytest.raises(SynclineError):
        job.send(m.AwaitMembers(fleet.controller.fence, TABLE, 5.0))
    job.wait(31, *writers, *fleet.all)
    assert isinstance(job.send(m.AwaitMembers(fleet.controller.fence, TABLE, 5.0)), m.Members)


def test_manifests_are_kept_by_fingerprint_and_waited_for() -> None:
    job = Job()
    writers = job.writers()
    waiting = job.send(m.GetManifest(writers[1].fence, b"fp0", 5.0))
    job.send(m.PutManifest(writers[0].fence, b"fp0", b"blob"))
    assert job.reply(waiting) == m.ManifestBlob(b"fp0", b"blob")
    assert writers[0].join().missing == ()
    late = job.send(m.GetManifest(writers[0].fence, b"fp1", 5.0))
    job.wait(5, *writers)
    with pytest.raises(DeadlineError, match="writer 1"):
        job.reply(late)
    for number in range(100):
        job.send(m.PutManifest(writers[0].fence, b"x%d" % number, b"blob"))
    assert len(job.state.core.manifests) <= 65
    assert job.send(m.GetManifest(writers[1].fence, b"fp0", 5.0)).blob == b"blob"


def test_bindings_are_put_once_and_named_by_versions() -> None:
    job = Job()
    writers, fleet = job.writers(), job.fleet()
    waiting = job.send(m.GetBinding(fleet.workers[0].fence, b"b0", 5.0))
    job.send(m.PutBinding(writers[0].fence, b"b0", b"where"))
    assert job.reply(waiting) == m.BindingBlob(b"b0", b"where")
    late = job.send(m.GetBinding(fleet.workers[0].fence, b"none", 5.0))
    job.wait(5, *writers, *fleet.all)
    with pytest.raises(DeadlineError, match="writer whose version names it"):
        job.reply(late)


def test_a_binding_is_kept_while_a_version_names_it_and_no_longer() -> None:
    job = Job()
    (writer,) = job.writers(1)
    for number in range(1, 60):
        name = b"b%d" % number
        job.send(m.PutBinding(writer.fence, name, b"where"))
        job.send(m.Put(writer.fence, TABLE, number, b"fp0", number, "live", name))
        assert name in job.state.core.bindings
    named = {
        place.binding_fp
        for version in job.state.core.tables[TABLE].versions.values()
        for place in version.puts.values()
    }
    assert b"b59" in named
    job.send(m.PutBinding(writer.fence, b"newest", b"where"))
    assert set(job.state.core.bindings) == named | {b"newest"}
