"""The MetaServer is killed and another one takes its place, while the job goes on."""

from __future__ import annotations

import os
import signal
import time

import pytest

from syncline.errors import DeadlineError, FencedError, ManifestError, ProtocolError, RevokedError
from syncline.meta import JobDir
from syncline.protocol import messages as m
from tests.meta.jobs import FP, PLAN, Engine, Trainer, instance_status, key, manifest, reader, status, writer


@pytest.fixture
def restart(process):
    """Kill the job's server, if there is one, and start the next in a process of its own."""
    running = []

    def again(**kwargs):
        if running:
            running[-1].kill()
        running.append(process("server", "job", *kwargs.values()))
        return running[-1].said()

    return again


def test_the_job_goes_on_and_refills_its_new_server(restart, client):
    assert restart()[1] == 1
    trainer, engine = Trainer(client), Engine(client, world=2)
    trainer.put(1)
    assert engine.update() == key(1, 1)
    trainer.put(2)
    assert restart()[1] == 2
    # No word from here on of registering or putting again: the clients do it by themselves.
    trainer.settle()
    assert engine.update() == key(1, 2)
    trainer.put(3)
    assert engine.update() == key(1, 3)
    table = status(engine.control)
    assert (table.epoch, table.missing, table.recovering) == (1, (), False)
    assert engine.control.boot == 2
    assert engine.control.fence(engine.fence).boot == 2
    assert engine.control.get_manifest(engine.fence, FP) == manifest()


def test_what_was_under_way_is_sent_again(restart, client):
    restart()
    trainer, engine = Trainer(client, world=1), Engine(client)
    trainer.put(1)
    engine.update()
    update = engine.control.submit(engine.begin(2, deadline=20.0))
    window = trainer.clients[0].submit(m.CloseWindow(trainer.fences[0], "t", key(1, 1), 20.0, until="pulled"))
    committed = trainer.clients[0].submit(m.WaitCommitted(trainer.fences[0], "t", key(1, 1), 20.0))
    assert window.result(5).missed == ()
    assert committed.result(5).committed == ("a",)
    restart()
    trainer.put(2)
    begun = update.result(10)
    assert begun.key == key(1, 2)
    assert begun.committed == key(1, 1)  # as the instance claimed


def test_a_new_server_seals_nothing_before_all_writers_are_back(restart, client):
    restart()
    trainer, engine = Trainer(client), Engine(client)
    trainer.put(1)
    trainer.clients[1].close()  # leaves in order, but its epoch does not end with it
    restart()
    with pytest.raises(DeadlineError, match="writer 1"):
        engine.control.request(engine.begin(deadline=1.0))
    assert [one.state for one in status(engine.control).versions] == ["OPEN"]


def test_a_writer_that_died_meanwhile_is_named_after_the_recovery(restart, client, process):
    restart()
    dies = process("member", "job", "writer", 1, 2)
    dies.said()
    lives = client()
    fence = lives.register(writer(0, 2), manifest()).fence
    lives.request(m.Put(fence, "t", 1, FP, 0, "live", b""))
    dies.kill()
    restart(recovery=0.5)
    closed = lives.request(m.CloseWindow(fence, "t", key(1, 1), 5.0))
    assert closed.state == "ABORTED"
    assert "writer 1" in closed.reason


def test_an_attempt_does_not_outlive_its_server(restart, client):
    restart()
    trainer, engine = Trainer(client, world=1), Engine(client)
    trainer.put(1)
    begun = engine.control.request(engine.begin())
    worker, fence = engine.workers[0], engine.worker_fences[0]
    worker.request(m.Progress(fence, "t", begun.key, begun.attempt, 4))
    restart()
    with pytest.raises((FencedError, RevokedError)):
        worker.request(m.Verified(fence, "t", begun.key, begun.attempt, PLAN, 8, 8))
    found = instance_status(engine.control)
    assert (found.dirty, found.serving, found.committed) == (True, False, None)
    assert engine.update() == key(1, 1)
    assert instance_status(engine.control).serving


def test_a_verdict_in_flight_is_not_given_to_the_next_server(process, client):
    first = process("server", "job")
    first.said()
    trainer, engine = Trainer(client, world=1), Engine(client)
    trainer.put(1)
    begun = engine.control.request(engine.begin())
    os.kill(first.pid, signal.SIGSTOP)  # the verdict reaches its socket, and is never read
    verdict = m.Verified(engine.worker_fences[0], "t", begun.key, begun.attempt, PLAN, 8, 8)
    answer = engine.workers[0].submit(verdict)
    decision = m.Commit(engine.fence, "t", "a", None, begun.key, begun.attempt)
    committed = engine.control.submit(decision)
    first.kill()
    process("server", "job").said()
    for future in (answer, committed):
        with pytest.raises(RevokedError, match="restarted during the update"):
            future.result(5)
    assert engine.update() == key(1, 1)


def test_an_owner_that_tells_is_not_second_guessed(restart, client):
    restart()
    trainer, engine = Trainer(client, world=1), Engine(client)
    trainer.put(1)
    worker, fence = engine.workers[0], engine.worker_fences[0]
    worker.note(fence, committed=None, dirty=False)
    begun = engine.control.request(engine.begin(mode="staged"))
    worker.request(m.Progress(fence, "t", begun.key, begun.attempt, 4))
    restart()
    assert instance_status(engine.control).dirty is False
    with pytest.raises(ProtocolError, match="no member"):
        engine.control.note(fence, committed=None, dirty=True)


def test_a_closed_window_stays_closed(restart, client):
    restart()
    trainer, engine = Trainer(client), Engine(client)
    trainer.put(1)
    trainer.close_window(key(1, 1))
    restart()
    with pytest.raises(DeadlineError):
        engine.control.request(engine.begin(deadline=1.0))
    (version,) = status(engine.control).versions
    assert (version.state, version.closed) == ("RETIRED", (0, 1))
    with pytest.raises(ProtocolError, match="put twice"):
        trainer.put(1, binding_fp=b"other")
    trainer.put(2)
    assert engine.update() == key(1, 2)


def test_a_trainer_that_starts_anew_gets_a_new_epoch_from_a_new_server(restart, client):
    restart()
    old = Trainer(client)
    old.put(5)
    restart()
    new = Trainer(client)
    assert new.put(1) == key(2, 1)
    with pytest.raises(FencedError):
        old.put(6)
    engine = Engine(client)
    assert engine.update() == key(2, 1)


def test_a_reader_replaced_while_the_server_was_away_is_fenced(restart, client, process):
    restart()
    first = client()
    fence = first.register(reader()).fence
    second = client()
    second.register(reader())
    restart()
    second.connect()
    with pytest.raises(FencedError):
        first.request(m.Heartbeat(fence))


def test_two_restarts_in_a_row(restart, client):
    restart()
    trainer = Trainer(client, world=1)
    trainer.put(1)
    restart()
    restart()
    engine = Engine(client)
    assert engine.update() == key(1, 1)
    assert engine.control.boot == 3


def test_an_epoch_is_on_disk_before_anybody_is_told_of_it(process, client, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("SYNCLINE_FAULTS", "meta.before_reply=kill")
        dies = process("server", "job")
        dies.said()
    member = client()
    answer = member.submit(writer(), 10)
    dies.process.join(10)
    assert JobDir.open("job").load_state().epochs == {"t": 1}
    assert not answer.done()
    process("server", "job").said()
    assert (
        answer.result(10).epoch == 2
    )  # nobody had the first one's fence: the next registration opens another


def test_without_a_server_a_request_ends_at_its_deadline_naming_it(process, client):
    server = process("server", "job")
    endpoint, _ = server.said()
    member = client()
    member.register(writer())
    server.kill()
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=endpoint) as caught:
        member.request(m.StatusQuery(), 0.7)
    assert 0.6 < time.monotonic() - began < 1.5
    assert "trainer rank 0" in str(caught.value)
    began = time.monotonic()
    member.close()
    assert time.monotonic() - began < 1.0


def test_a_client_made_before_the_server_finds_it(client, serve):
    early = client()
    waiting = early.submit(m.StatusQuery(), 10)
    time.sleep(0.1)
    assert not waiting.done()
    serve()
    assert waiting.result(5).job == "job"


def test_a_client_without_any_server_says_where_it_looked(client, root):
    with pytest.raises(DeadlineError, match=str(root / "job")):
        client().request(m.StatusQuery(), 0.2)


def test_a_member_that_lost_its_lease_comes_back(serve, client):
    serve()
    engine = Engine(client)
    worker = engine.workers[0]
    worker._session._roster._heartbeat = 1e9
    (membership,) = worker._session._roster.members()
    membership.next_beat = time.monotonic() + 1.6  # as if it had been suspended for longer than its lease
    deadline = time.monotonic() + 5
    while instance_status(engine.control).missing != (0,):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while instance_status(engine.control).missing:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    worker.request(m.Heartbeat(engine.worker_fences[0]))


def test_a_killed_member_is_lost_and_named(serve, client, process):
    serve()
    peer = process("member", "job", "reader", 0, 1, "b")
    peer.said()
    watcher = client()
    watcher.connect()
    peer.kill()
    lost = next(event for event in watcher.watch(5.0) if event.kind == "lost")
    assert (lost.instance, lost.rank) == ("b", 0)


def test_a_watcher_is_told_of_a_restart(restart, client):
    restart()
    watcher, member = client(), client()
    watcher.connect()
    events = watcher.watch(20.0)
    member.register(reader())
    assert next(events).kind == "joined"
    restart()
    kinds = [next(events).kind, next(events).kind]
    assert kinds == ["restarted", "joined"]


def test_a_new_server_gets_the_bindings_that_versions_name(restart, client):
    restart()
    trainer, engine = Trainer(client, world=1), Engine(client)
    (owner,), (fence,) = trainer.clients, trainer.fences
    name = owner.put_binding(fence, b"where it lies")
    trainer.put(1, binding_fp=name)
    restart()
    worker, own = engine.workers[0], engine.worker_fences[0]
    assert worker.get_binding(own, name, 5.0) == b"where it lies"
    trainer.put(2, binding_fp=name)
    restart()
    assert worker.get_binding(own, name, 5.0) == b"where it lies"


def test_a_binding_goes_by_its_own_hash(restart, client):
    restart()
    trainer = Trainer(client, world=1)
    (owner,), (fence,) = trainer.clients, trainer.fences
    with pytest.raises(ManifestError, match="hash"):
        owner.request(m.PutBinding(fence, b"x" * 16, b"where"))
