from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from syncline.cli.clean import clean as clean_command
from syncline.cli.serve import serve as serve_command
from syncline.errors import ProtocolError
from syncline.meta import MetaClient, MetaServer
from syncline.meta.refill import Membership, across_restart
from syncline.protocol import messages as m
from syncline.protocol.ids import Fence
from tests.meta.jobs import FP, PLAN, QUICK, key, reader, writer

FENCE = Fence("job", 1, 1, 7)


def test_many_threads_ask_at_once(serve, client):
    serve()
    shared = client()
    fence = shared.register(writer()).fence
    answers = []

    def ask(number):
        for _ in range(50):
            shared.request(m.Heartbeat(fence))
        answers.append(shared.request(m.StatusQuery("t")).tables[0].name + str(number))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(answers) == [f"t{number}" for number in range(8)]


def test_a_watcher_hears_of_an_event_at_once(serve, client):
    serve()
    watcher, member = client(), client()
    watcher.connect()
    fence = member.register(writer()).fence
    heard = []

    def listen():
        for event in watcher.watch(10.0):
            heard.append((event, time.perf_counter()))
            if event.key == key(1, 40) and event.kind == "sealed":
                return

    thread = threading.Thread(target=listen)
    thread.start()
    said = {}
    for number in range(1, 41):
        time.sleep(0.005)
        said[key(1, number)] = time.perf_counter()
        member.request(m.Put(fence, "t", number, FP, 0, "live", b""))
    thread.join(10)
    sealed = {event.key: at for event, at in heard if event.kind == "sealed"}
    delays = sorted(sealed[one] - at for one, at in said.items())
    # The quickest shows the mechanism (measured: 0.5 ms); the median on a busy machine only bounds it.
    assert delays[0] < 0.01
    assert delays[len(delays) // 2] < 0.05


def open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_nothing_is_left_of_clients_and_servers():
    def census():
        return open_files(), threading.active_count()

    def round_trip():
        with MetaServer("job", options=QUICK) as server, MetaClient("job", QUICK) as one:
            one.register(writer())
            assert server.boot == one.boot

    round_trip()
    before = census()
    for _ in range(5):
        round_trip()
    assert census() == before


def test_nothing_is_left_of_a_client_that_met_nobody():
    before = open_files(), threading.active_count()
    for _ in range(3):
        MetaClient("job", QUICK).close()
    assert (open_files(), threading.active_count()) == before


def test_a_forked_child_makes_its_own_client(serve, client):
    serve()
    parent = client()
    parent.connect()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            parent.request(m.StatusQuery())
        except ProtocolError as error:
            os.write(write, str(error).encode())
        parent.close()
        os._exit(0)
    os.close(write)
    assert b"before a fork" in os.read(read, 1000)
    os.close(read)
    os.waitpid(child, 0)
    parent.connect()


def test_a_progress_callable_that_fails_does_not_cost_the_lease(serve, client):
    serve()

    def fail():
        raise ValueError("no figures")

    member = client(progress=fail)
    fence = member.register(writer()).fence
    time.sleep(1.5 * QUICK.lease)
    member.request(m.Heartbeat(fence))


# --- what a client remembers


def put(number, source="live"):
    request = m.Put(FENCE, "t", number, FP, 0, source, b"")
    return request, m.PutDone(key(1, number), "OPEN", ())


@pytest.fixture
def wrote():
    return Membership(writer(), m.Registered(FENCE, 1, 1, (), 10.0))


@pytest.fixture
def read():
    return Membership(reader(), m.Registered(FENCE, 1, 1, (), 10.0))


def claimed(membership):
    claim = membership.claim()
    return claim.committed, claim.dirty


def test_a_writer_offers_what_it_still_holds(wrote):
    for number in (1, 2):
        wrote.answered(*put(number))
    wrote.answered(m.Digests(FENCE, "t", key(1, 2), PLAN, b"d"), m.Done())
    new = Fence("job", 2, 1, 1)
    wrote.joined(m.Registered(new, 2, 1, (), 10.0))
    offers = wrote.offers()
    assert [type(one) for one in offers] == [m.Put, m.Digests]  # live memory holds the newest only
    assert offers[0] == m.Put(new, "t", 2, FP, 0, "live", b"", refill=True)
    assert wrote.claim().last == key(1, 2)
    assert wrote.claim().previous == new


def test_a_window_that_closed_is_told_as_closed(wrote):
    wrote.answered(*put(1))
    closed = m.WindowClosed(key(1, 1), "RETIRED", "", (), (), {}, ())
    wrote.answered(m.CloseWindow(FENCE, "t", key(1, 1), 1.0), closed)
    (offer,) = wrote.offers()
    assert offer.closed
    wrote.answered(m.AbortVersion(FENCE, "t", key(1, 1), "why"), m.Done())
    assert wrote.offers() == []
    assert wrote.claim().last == key(1, 1)


def test_snapshots_stay_on_offer_until_evicted(wrote):
    for number in (1, 2, 3):
        wrote.answered(*put(number, "snapshot"))
    closed = m.WindowClosed(key(1, 2), "SEALED", "", (), (), {}, ())
    wrote.answered(m.CloseWindow(FENCE, "t", key(1, 2), 1.0), closed)
    assert [one.number for one in wrote.offers()] == [1, 2, 3]
    wrote.answered(m.CloseWindow(FENCE, "t", key(1, 2), 1.0, evict=True), closed)
    assert [one.number for one in wrote.offers()] == [1, 3]
    for number in range(4, 60):
        wrote.answered(*put(number, "snapshot"))
    assert len(wrote.offers()) == 16


def test_a_reader_claims_what_its_parameters_hold(read):
    assert claimed(read) == (None, False)
    read.sent(m.Progress(FENCE, "t", key(1, 1), 1, 0))
    assert claimed(read) == (None, True)
    read.answered(m.Applied(FENCE, "t", key(1, 1)), m.AppliedDone(False))
    assert claimed(read) == (key(1, 1), False)
    read.answered(m.Failed(FENCE, "t", key(1, 2), 2, {}, touched=False), m.Done())
    assert claimed(read) == (key(1, 1), False)
    read.answered(m.Failed(FENCE, "t", key(1, 2), 2, {}, touched=True), m.Done())
    assert claimed(read) == (key(1, 1), True)


def test_a_controller_claims_what_it_decided(read):
    begun = m.Begun(key(1, 3), 1, (), (), None)
    read.answered(m.BeginUpdate(FENCE, "t", None, "staged", 1.0, 1), begun)
    assert claimed(read) == (None, False)
    read.answered(m.BeginUpdate(FENCE, "t", None, "in_place", 1.0, 1), begun)
    assert claimed(read) == (None, True)
    read.answered(m.Commit(FENCE, "t", "a", None, key(1, 3), 1), m.Committed(key(1, 3), ()))
    assert claimed(read) == (key(1, 3), False)


def test_what_is_sent_to_the_next_server_instead():
    assert across_restart(put(1)[0]).refill
    assert across_restart(m.Watch(9, 1.0)) == m.Watch(0, 1.0)
    beat = m.Heartbeat(FENCE)
    assert across_restart(beat) is beat


# --- commands


@pytest.fixture
def cli():
    app = Typer()
    app.command("serve")(serve_command)
    app.command("clean")(clean_command)
    return lambda *args: CliRunner().invoke(app, args)


def test_clean_command(cli, root, process):
    process("server", "alive").said()
    dead = process("server", "dead")
    dead.said()
    dead.kill()
    assert '"removed":["dead"]' in cli("clean", "--json").stdout
    refused = cli("clean", "--job", "alive")
    assert refused.exit_code == 1
    assert "live     alive (server.lock)" in refused.stdout
    assert cli("clean", "--job", "../x").exit_code == 1
    assert [path.name for path in root.iterdir()] == ["alive"]


def test_serve_command_refuses_a_second_server(cli, process):
    process("server", "job").said()
    result = cli("serve", "job")
    assert result.exit_code == 1
    assert "already has a MetaServer" in result.stderr


def test_serve_command_serves_until_it_is_told_to_stop(process, client):
    peer = process("serve_command", "job")
    assert peer.said() == "started"
    member = client()
    member.connect(10)
    assert member.boot == 1
    os.kill(peer.pid, 15)
    peer.process.join(10)
    assert peer.process.exitcode == 0
