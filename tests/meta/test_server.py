from __future__ import annotations

import os
import signal
import time

import pytest

from syncline.errors import DeadlineError, FencedError, ProtocolError
from syncline.meta.server import ListeningClock
from syncline.protocol import messages as m
from tests.meta.jobs import FP, QUICK, Engine, Trainer, instance_status, key, manifest, reader, status, writer


def test_a_version_goes_from_writers_to_an_instance(serve, client):
    serve()
    trainer, engine = Trainer(client), Engine(client, world=2)
    trainer.put(1)
    assert engine.update() == key(1, 1)
    found = instance_status(engine.control)
    assert (found.committed, found.dirty, found.serving) == (key(1, 1), False, True)
    assert [one.revoked for one in trainer.close_window(key(1, 1))] == [(), ()]
    assert [one.state for one in status(engine.control).versions] == ["RETIRED"]


def test_a_deferred_request_is_answered_when_its_version_is_sealed(serve, client):
    serve()
    trainer, engine = Trainer(client), Engine(client)
    waiting = engine.control.submit(engine.begin(7))
    trainer.put(7)
    assert waiting.result(5).key == key(1, 7)


def test_a_deferred_request_ends_with_the_servers_own_words(serve, client):
    serve()
    engine = Engine(client)
    with pytest.raises(DeadlineError, match="all writers"):
        engine.control.request(m.AwaitMembers(engine.fence, "t", 0.2))


def test_options_that_must_agree_are_compared_by_name(serve, client):
    serve()
    client().register(writer(options={"NCCL_CUMEM_ENABLE": "1"}))
    with pytest.raises(ProtocolError, match="NCCL_CUMEM_ENABLE") as caught:
        client().register(reader(options={"NCCL_CUMEM_ENABLE": "0"}))
    assert (caught.value.expected, caught.value.found) == ("1 as writer 0 has it", "0")


def test_library_versions_are_compared_too(serve, client):
    serve()
    client().register(writer())
    with pytest.raises(ProtocolError, match="option syncline differs"):
        client().register(reader(options={"syncline": "0.0.1"}))


def test_a_failure_before_registration_reaches_who_waits(serve, client):
    serve()
    engine = Engine(client)
    waiting = engine.control.submit(m.AwaitMembers(engine.fence, "t", 5.0))
    error = ProtocolError("the model has a tensor that no rule covers", tensor="x.weight").to_wire()
    client().request(m.JoinFailed("t", "writer 0", error))
    with pytest.raises(ProtocolError, match="no rule covers") as caught:
        waiting.result(5)
    assert caught.value.tensor == "x.weight"


def test_an_error_class_that_nobody_knows_arrives_whole(serve, client):
    serve()
    engine = Engine(client)
    waiting = engine.control.submit(m.AwaitMembers(engine.fence, "t", 5.0))
    error = {"kind": "TheirOwnError", "what": "TheirOwnError: no such head", "found": "Traceback: line 7"}
    client().request(m.JoinFailed("t", "writer 0", error))
    with pytest.raises(Exception, match="no such head") as caught:
        waiting.result(5)
    assert type(caught.value).__name__ == "RemoteError"
    assert "line 7" in str(caught.value)


def test_manifests_are_stored_once_and_fetched_by_fingerprint(serve, client):
    serve()
    first, second = client(), client()
    registered = first.register(writer(0, 2), manifest())
    assert registered.missing == (FP,)
    other = second.register(writer(1, 2))
    assert other.missing == ()
    assert second.get_manifest(other.fence, FP) == manifest()
    assert second.get_manifest(other.fence, FP) is second.get_manifest(other.fence, FP)


def test_fetching_a_manifest_waits_for_its_owner(serve, client):
    serve()
    owner, other = client(), client()
    owner_fence = owner.register(writer(0, 2)).fence
    fence = other.register(writer(1, 2)).fence
    waiting = other.submit(m.GetManifest(fence, FP, 5.0))
    owner.put_manifest(owner_fence, manifest())
    assert waiting.result(5).manifest_fp == FP
    with pytest.raises(DeadlineError, match="nobody registered"):
        other.get_manifest(fence, b"x" * 16, 0.1)


def test_a_rank_taken_by_a_new_process_fences_the_old_one(serve, client):
    serve()
    old, new = client(), client()
    fence = old.register(reader()).fence
    new.register(reader())
    with pytest.raises(FencedError, match="a new process took its rank"):
        old.request(m.Heartbeat(fence))


def test_heartbeats_keep_a_lease_while_user_threads_are_busy(serve, client):
    serve()
    busy = client()
    busy.register(writer())
    busy_until = time.monotonic() + 2 * QUICK.lease
    while time.monotonic() < busy_until:
        sum(range(10_000))
    assert status(client()).missing == ()


def test_a_server_that_was_suspended_blames_nobody(process, client):
    peer = process("server", "job")
    peer.said()
    member = client()
    fence = member.register(writer()).fence
    for pause, seconds in ((0.0, 1.5), (0.03, 1.2), (0.06, 0.9)):  # at any point of the server's round
        time.sleep(pause)
        os.kill(peer.pid, signal.SIGSTOP)
        time.sleep(seconds * QUICK.lease)
        os.kill(peer.pid, signal.SIGCONT)
    member.request(m.Heartbeat(fence))
    assert member.fence(fence) == fence  # it never had to come back


def test_time_counts_only_while_the_server_looks_at_the_clock(monkeypatch):
    clock = ListeningClock()
    at = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: at)
    begun = clock.look()
    at += 0.2
    assert clock.look() == pytest.approx(begun + 0.2)  # a short request
    at += 1.0
    assert clock.look(planned=1.0) == pytest.approx(begun + 1.2)  # it waited as long as it meant to
    at += 1.5
    assert clock.look(planned=1.0) == pytest.approx(begun + 1.2)  # suspended
    at += 0.1
    assert clock.look() == pytest.approx(begun + 1.3)


def test_progress_of_bytes_keeps_a_pin_and_heartbeats_alone_do_not(serve, client):
    serve()
    trainer, engine = Trainer(client), Engine(client, world=1)
    trainer.put(1)
    moved = iter(range(1, 1000))
    engine.workers[0].count_progress(engine.worker_fences[0], lambda: next(moved))
    begun = engine.control.request(engine.begin())
    with pytest.raises(DeadlineError):
        engine.control.request(m.AwaitMembers(engine.fence, "t", 1.6, instances=("nobody",)))
    assert instance_status(engine.control).state == "PULLING"  # longer than the stall
    engine.workers[0].count_progress(engine.worker_fences[0], lambda: 1000)
    closed = trainer.close_window(begun.key, deadline=8.0)
    assert closed[0].revoked == ("instance a, rank 0",)


def test_close_is_idempotent_and_says_goodbye(serve, client):
    serve()
    trainer, watcher = Trainer(client, world=1), client()
    watcher.connect()
    trainer.clients[0].close("the run ended")
    trainer.clients[0].close()
    with pytest.raises(ProtocolError, match="closed"):
        trainer.clients[0].request(m.StatusQuery())
    left = next(event for event in watcher.watch(5.0) if event.kind == "left")
    assert left.detail == "writer 0: the run ended"
