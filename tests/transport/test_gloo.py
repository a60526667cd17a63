"""What is gloo's own: stores of any kind, sends that block until somebody listens, links that end."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from syncline.errors import DeadlineError, PeerLostError, TransportError
from syncline.transport.base import Limits, Refusal, Rights, Staging, Ticket
from syncline.transport.gloo import GlooTransport
from syncline.transport.gloo_link import GlooLink
from syncline.transport.host import endpoint
from tests.transport import fabric as fabrics
from tests.transport.fabric import FENCE, JOB, Fabric, Meeting
from tests.transport.world import World

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TICKET = Ticket("gloo", 0, 0, 0, int(Rights.READ), FENCE)


class DictStore(dist.Store):
    """A store written in Python, as one that stands on the MetaServer is."""

    def __init__(self, values: dict[str, bytes], changed: threading.Condition) -> None:
        super().__init__()
        self._values, self._changed = values, changed

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = 10.0 if timeout is None else timeout.total_seconds()
        with self._changed:
            if not self._changed.wait_for(lambda: all(k in self._values for k in keys), seconds):
                raise RuntimeError(f"nobody set {keys}")


def python_stores(_: Path) -> Callable[[str], dist.Store]:
    names: dict[str, tuple[dict[str, bytes], threading.Condition]] = {}
    mutex = threading.Lock()

    def meet(name: str) -> dist.Store:
        with mutex:
            return DictStore(*names.setdefault(name, ({}, threading.Condition())))

    return meet


def file_stores(directory: Path) -> Callable[[str], dist.Store]:
    return lambda name: dist.FileStore(str(directory / name.replace("/", "-")), 2)


def one_tcp_store(_: Path) -> Callable[[str], dist.Store]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def meet(name: str) -> dist.Store:  # a client of its own each time: one that waits answers nobody else
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        return dist.PrefixStore(name, client)

    return meet


@pytest.mark.parametrize("stores", [python_stores, file_stores, one_tcp_store])
def test_any_store_will_do(
    stores: Callable[[Path], Callable[[str], dist.Store]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet = stores(tmp_path)
    monkeypatch.setattr(fabrics, "Meeting", lambda: meet)
    world = World.random(3, tensors=3, largest=12)
    made = Fabric("gloo", world)
    try:
        made.transfer()
        made.link_all()  # a second meeting of the same two, under another attempt
        made.bind_all()
        made.transfer()
        for r in range(len(world.readers)):
            world.check_reader(r)
    finally:
        made.close()


def test_the_default_group_is_not_touched() -> None:
    assert not dist.is_initialized()
    world = World.random(4, tensors=2, largest=8)
    made = Fabric("gloo", world)
    try:
        made.transfer()
        assert not dist.is_initialized()
    finally:
        made.close()


class Rendezvous:
    """Makes a send block until its receive is posted, as transports between GPUs do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._changed = threading.Condition()
        self._posted: dict[tuple[str, str], int] = {}
        self._sent: dict[tuple[str, str], int] = {}
        self.blocked = 0
        really_send, really_receive = GlooLink.send, GlooLink.receive

        def send(link: GlooLink, message: torch.Tensor):
            way = (link.own, link.peer.id)
            with self._changed:
                number = self._sent[way] = self._sent.get(way, 0) + 1
                self.blocked += self._posted.get(way, 0) < number
                assert self._changed.wait_for(lambda: self._posted.get(way, 0) >= number, 10), (
                    f"nobody listens: {way}"
                )
            return really_send(link, message)

        def receive(link: GlooLink, message: torch.Tensor):
            found = really_receive(link, message)
            way = (link.peer.id, link.own)
            with self._changed:
                self._posted[way] = self._posted.get(way, 0) + 1
                self._changed.notify_all()
            return found

        really_link = GlooTransport.link

        def link(transport: GlooTransport, *arguments: object) -> GlooLink:
            found = really_link(transport, *arguments)
            found.own = transport.process_id
            return found

        monkeypatch.setattr(GlooTransport, "link", link)
        monkeypatch.setattr(GlooLink, "send", send)
        monkeypatch.setattr(GlooLink, "receive", receive)
        monkeypatch.setattr(GlooLink, "own", "", raising=False)


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (3, 3), (2, 3)])
def test_sends_may_block_until_somebody_listens(
    writers: int, readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Rendezvous(monkeypatch)
    world = World.random(9, writers=writers, readers=readers, tensors=6, largest=30)
    made = Fabric("gloo", world, Staging(bucket=512, inflight=2))
    try:
        for _ in range(3):
            made.transfer()
        for r in range(readers):
            world.check_reader(r)
    finally:
        made.close()


def test_a_writer_goes_on_with_its_own_collectives_while_a_slow_reader_pulls() -> None:
    """A transfer has a thread and groups of its own: the caller and its collectives go on."""
    world = World.random(12, writers=1, readers=1, tensors=6, largest=30)
    made = Fabric("gloo", world, Staging(bucket=256, inflight=1))
    store = dist.HashStore()
    group = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=10))
    try:
        sent = made.writers[0].start(made.sources[0, 0], made.fence, Limits(deadline=20.0))
        for step in range(30):
            value = torch.tensor([float(step)])
            group.allreduce([value]).wait()
            assert value.item() == step
        assert not sent.poll().done  # the reader has not even begun
        made.readers[0].start(made.programs[0], made.fence, Limits(deadline=20.0)).wait(20.0)
        sent.wait(20.0)
        world.check_reader(0)
    finally:
        made.close()


def pair() -> tuple[GlooTransport, GlooTransport]:
    meeting = Meeting()
    return GlooTransport(JOB, meeting), GlooTransport(JOB, meeting)


def test_nobody_comes() -> None:
    a, b = pair()
    peer = endpoint(JOB, "reader 0", b.process_id, [b])
    started = time.monotonic()
    with pytest.raises(DeadlineError, match="reader 0"):
        a.link(peer, [TICKET], 0.5)
    assert time.monotonic() - started < 5
    a.close(1.0)
    b.close(1.0)


def test_a_farewell_ends_the_link_on_both_sides() -> None:
    a, b = pair()
    ends = [endpoint(JOB, n, t.process_id, [t]) for n, t in (("a", a), ("b", b))]
    links: list[GlooLink] = []
    thread = threading.Thread(target=lambda: links.append(b.link(ends[0], [TICKET], 10.0)))
    thread.start()
    mine = a.link(ends[1], [TICKET], 10.0)
    thread.join(10)
    assert mine.alive
    assert links[0].alive
    b.close(5.0)
    deadline = time.monotonic() + 5
    while mine.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not mine.alive
    with pytest.raises(PeerLostError, match="closed"):
        mine.check()
    a.close(5.0)


def test_a_link_needs_a_ticket_and_another_process() -> None:
    a, b = pair()
    with pytest.raises(TransportError, match="tickets"):
        a.link(endpoint(JOB, "b", b.process_id, [b]), [], 1.0)
    with pytest.raises(TransportError, match="itself"):
        a.link(endpoint(JOB, "a", a.process_id, [a]), [TICKET], 1.0)
    a.close(1.0)
    b.close(1.0)
    with pytest.raises(TransportError, match="closed"):
        a.link(endpoint(JOB, "b", b.process_id, [b]), [TICKET], 1.0)


def test_loopback_does_not_reach_another_host() -> None:
    a, b = pair()
    near = endpoint(JOB, "b", b.process_id, [b])
    far = type(near)(job=JOB, id="f", name="far", host="elsewhere", uid=0, addresses={"gloo": "10.0.0.1"})
    found = a.caps(near, far)
    assert isinstance(found, Refusal)
    assert "loopback" in found.reason
    mute = type(near)(job=JOB, id="f", name="far", host="elsewhere", uid=0)
    assert isinstance(a.caps(near, mute), Refusal)
