"""Real processes: what dies, what is left of it, and who may touch whose memory."""

from __future__ import annotations

import mmap
import multiprocessing as mp
import os
import select
import socket
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from syncline.errors import (
    AuthError,
    FencedError,
    PeerLostError,
    RevokedError,
    TransportError,
    WireVersionError,
)
from syncline.memory.binding import Binding
from syncline.transport import frames, segments, shm_link
from syncline.transport.base import Endpoint, Limits, Refusal, Remote, Rights, Side, Ticket
from syncline.transport.gloo import GlooTransport
from syncline.transport.host import endpoint
from syncline.transport.loop import Loop
from syncline.transport.segments import SegmentServer
from syncline.transport.shm import ShmTransport
from syncline.transport.sockets import connect
from tests.transport import children
from tests.transport.children import FENCE, JOB, STAGING, stamped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

WALL = 40.0
# Every child is a process of its own, forked from a server that has done the imports: they take seconds.
SPAWN = mp.get_context("forkserver")
SPAWN.set_forkserver_preload(["tests.transport.preload"])


class Child:
    """A spawned process with a pipe; killed at the end, whatever happened."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self.pipe: Connection
        self.pipe, theirs = SPAWN.Pipe()
        self.process: BaseProcess = SPAWN.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self) -> object:
        assert self.pipe.poll(WALL), "the child says nothing"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WALL)

    def close(self) -> None:
        with suppress(OSError):
            self.pipe.send("end")
        self.process.join(5.0)
        if self.process.is_alive():
            self.kill()
        self.pipe.close()


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory that only this user enters."""
    with tempfile.TemporaryDirectory(prefix="sl-") as directory:
        yield Path(directory)


@contextmanager
def child(target: Callable[..., None], *arguments: object) -> Iterator[Child]:
    made = Child(target, *arguments)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def serving(short: Path) -> Iterator[tuple[ShmTransport, Ticket, Endpoint]]:
    """Serve a stamped world's memory in this process."""
    world = stamped(4)
    memory = world.writers[0]
    transport = ShmTransport(JOB, short / "seg")
    ticket = transport.export(transport.register(memory.region, memory.fd), Rights.READ, FENCE)
    end = endpoint(JOB, "writer 0", transport.process_id, [transport])
    try:
        yield transport, ticket, end
    finally:
        transport.close(5.0)
        world.close()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def pull(transport: ShmTransport, world, link, binding: bytes) -> None:
    program = transport.compile(world.plan, world.plan.reader("serve", 0), Side.DESTINATION)
    program.rebind(world.readers[0].binding, {0: Remote(link, Binding.from_wire(binding))})
    transport.start(program, FENCE, Limits(deadline=20.0)).wait(20.0)
    world.check_reader(0)


class TestShm:
    def test_mapped_memory_survives_the_writer(self, short: Path) -> None:
        with child(children.shm_writer, str(short / "seg")) as writer, ExitStack() as stack:
            text, blob, binding = writer.hear()
            transport = ShmTransport(JOB)
            stack.callback(transport.close, 5.0)
            world = stamped()
            stack.callback(world.close)
            end, ticket = Endpoint.from_text(text), Ticket.decode(blob)
            me = endpoint(JOB, "reader 0", transport.process_id, [transport])
            assert not isinstance(transport.caps(end, me), Refusal)
            link = transport.link(end, [ticket], 10.0)
            writer.kill()
            assert until(lambda: not link.alive)
            pull(transport, world, link, binding)
            assert isinstance(transport.caps(end, me), Refusal)
            with pytest.raises(PeerLostError, match="writer 0"):
                transport.link(end, [ticket], 5.0)

    def test_a_forked_child_does_not_keep_the_writer_alive(self, short: Path) -> None:
        with child(children.shm_writer, str(short / "seg")) as writer, ExitStack() as stack:
            text, blob, _ = writer.hear()
            transport = ShmTransport(JOB)
            stack.callback(transport.close, 5.0)
            link = transport.link(Endpoint.from_text(text), [Ticket.decode(blob)], 10.0)
            writer.pipe.send("fork")
            grandchild = writer.hear()
            assert isinstance(grandchild, int)
            try:
                writer.process.kill()  # not joined yet: the grandchild holds the sentinel of its parent
                assert until(lambda: not link.alive)
            finally:
                with suppress(ProcessLookupError):
                    os.kill(grandchild, 9)

    def test_a_dead_reader_lets_go(self, short: Path) -> None:
        world = stamped()
        memory = world.writers[0]
        transport = ShmTransport(JOB, short / "seg")
        ticket = transport.export(transport.register(memory.region, memory.fd), Rights.READ, FENCE)
        end = endpoint(JOB, "writer 0", transport.process_id, [transport])
        arguments = (end.to_text(), ticket.encode(), memory.binding.to_wire())
        try:
            with (
                child(children.shm_reader, *arguments, "shm.before_part") as dying,
                child(children.shm_reader, *arguments, "") as living,
            ):
                assert dying.hear() == living.hear() == "linked"
                dying.pipe.send("go")
                dying.process.join(WALL)
                assert dying.process.exitcode == -9
                living.pipe.send("go")
                assert living.hear() == "pulled"
                living.pipe.send("end")
                living.process.join(WALL)
                assert living.process.exitcode == 0
            assert transport.revoke(ticket, 5.0).drained
        finally:
            transport.close(5.0)
            world.close()

    def test_a_reader_in_another_process_lets_go_when_told(self, short: Path) -> None:
        with child(children.shm_writer, str(short / "seg")) as writer, ExitStack() as stack:
            text, blob, _ = writer.hear()
            transport = ShmTransport(JOB)
            stack.callback(transport.close, 5.0)
            link = transport.link(Endpoint.from_text(text), [Ticket.decode(blob)], 10.0)
            writer.pipe.send("revoke")
            assert writer.hear() is True
            assert link.regions == 0
            assert link.alive

    def test_a_new_process_at_an_old_address_is_not_mistaken(self, short: Path) -> None:
        with serving(short) as (_, ticket, end):
            gone = msgspec.structs.replace(end, id="of-the-dead")
            reader = ShmTransport(JOB)
            with pytest.raises(FencedError, match="another's"):
                reader.link(gone, [ticket], 5.0)
            reader.close(5.0)

    def test_two_servers_need_two_paths(self, short: Path) -> None:
        with serving(short), pytest.raises(TransportError, match="cannot listen"):
            SegmentServer(short / "seg", JOB, "other", Loop("other"))

    def test_nothing_is_left_after_close(self, short: Path) -> None:
        with serving(short):
            assert [p.name for p in short.iterdir()] == ["seg"]
            assert (short / "seg").stat().st_mode & 0o777 == 0o600
        assert list(short.iterdir()) == []

    def test_long_directories(self, short: Path) -> None:
        deep = short
        while len(str(deep)) < 200:
            deep /= "directory"
        deep.mkdir(parents=True)
        with serving(deep) as (_, ticket, end):
            reader = ShmTransport(JOB)
            assert reader.link(end, [ticket], 5.0).regions == 1
            reader.close(5.0)

    def test_private_memory_is_not_handed_out(self, short: Path) -> None:
        transport = ShmTransport(JOB, short / "seg")
        world = stamped(2)
        registration = transport.register(world.readers[0].region)
        with pytest.raises(TransportError, match="private"):
            transport.export(registration, Rights.READ, FENCE)
        memory = world.writers[0]
        shared = transport.register(memory.region, memory.fd)
        with pytest.raises(TransportError, match="read-only"):
            transport.export(shared, Rights.READ | Rights.WRITE, FENCE)
        transport.close(5.0)
        world.close()


class Raw:
    """A peer that speaks the frames by hand."""

    def __init__(self, end: Endpoint) -> None:
        self.sock = connect(Path(end.addresses["shm"]), 5.0, "server")
        self.inbox = frames.Inbox()

    def say(self, message: frames.Message) -> None:
        frames.send(self.sock, message)

    def hear(self) -> tuple[frames.Message, int] | None:
        """Return the next message, None when hung up on."""
        self.sock.settimeout(10.0)
        while True:
            data, descriptors = frames.receive(self.sock, descriptors=True)
            if not data:
                return None
            found = self.inbox.feed(data, descriptors)
            if found:
                return found[0]

    def close(self) -> None:
        self.sock.close()


class TestServer:
    @pytest.fixture
    def raw(self, short: Path) -> Iterator[tuple[Raw, Ticket, Endpoint, ShmTransport]]:
        with serving(short) as (transport, ticket, end):
            peer = Raw(end)
            yield peer, ticket, end, transport
            peer.close()

    def test_the_descriptor_cannot_be_mapped_writable(self, raw) -> None:
        peer, ticket, end, _ = raw
        peer.say(frames.Hello(frames.VERSION, JOB, "raw", end.id))
        assert isinstance(peer.hear()[0], frames.Welcome)
        peer.say(frames.Fetch(ticket.region, ticket.generation, ticket.nbytes, FENCE))
        message, descriptor = peer.hear()
        assert isinstance(message, frames.Segment)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, ticket.nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with mmap.mmap(descriptor, ticket.nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
                assert len(memory) == ticket.nbytes
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(descriptor, b"x")
        finally:
            os.close(descriptor)

    @pytest.mark.parametrize(
        ("change", "kind"),
        [
            ({"version": frames.VERSION + 1}, WireVersionError),
            ({"job": "other"}, AuthError),
            ({"server": "other"}, FencedError),
        ],
    )
    def test_wrong_greetings(self, raw, change: dict[str, object], kind: type) -> None:
        peer, _, end, _ = raw
        fields = {"version": frames.VERSION, "job": JOB, "name": "raw", "server": end.id}
        peer.say(frames.Hello(**(fields | change)))
        answer, _ = peer.hear()
        assert isinstance(answer, frames.Denied)
        assert answer.error["kind"] == kind.__name__

    def test_nothing_without_a_greeting(self, raw) -> None:
        peer, ticket, _, _ = raw
        peer.say(frames.Fetch(ticket.region, ticket.generation, ticket.nbytes, FENCE))
        answer, descriptor = peer.hear()
        assert isinstance(answer, frames.Denied)
        assert answer.error["kind"] == "AuthError"
        assert descriptor == -1

    @pytest.mark.parametrize(
        "garbage", [b"\xff\xff\xff\xff", b"\x04\x00\x00\x00abcd", b"\x01\x00\x00\x00\xc0"]
    )
    def test_garbage_is_hung_up_on_and_others_are_served(self, raw, garbage: bytes) -> None:
        peer, ticket, end, _ = raw
        peer.sock.send(garbage)
        assert peer.hear() is None
        reader = ShmTransport(JOB)
        assert reader.link(end, [ticket], 5.0).regions == 1
        reader.close(5.0)

    def test_the_silent_are_dropped(self, raw, monkeypatch: pytest.MonkeyPatch) -> None:
        _, _, end, transport = raw
        monkeypatch.setattr(segments, "_HELLO_SECONDS", 0.1)
        silent = Raw(end)
        assert silent.hear() is None
        silent.close()
        assert transport._server is not None

    def test_unknown_regions_and_generations(self, raw) -> None:
        _, ticket, end, _ = raw
        reader = ShmTransport(JOB)
        for change in ({"region": 99}, {"generation": 99}):
            with pytest.raises(RevokedError):
                reader.link(end, [msgspec.structs.replace(ticket, **change)], 5.0)
        assert reader.link(end, [ticket], 5.0).regions == 1
        reader.close(5.0)

    @pytest.mark.parametrize("late", [False, True])
    def test_a_server_for_another_user_refuses_us(
        self, short: Path, late: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if late:  # we say hello to a server that has refused us and hung up already
            monkeypatch.setattr(shm_link, "connect", _connect_and_wait_for_the_end)
        loop = Loop("foreign")
        server = SegmentServer(short / "foreign", JOB, "x", loop, uid=os.geteuid() + 1)
        end = Endpoint(
            job=JOB, id="x", name="writer", host="h", uid=0, addresses={"shm": str(short / "foreign")}
        )
        reader = ShmTransport(JOB)
        with pytest.raises(AuthError, match="another user"):
            reader.link(end, [], 5.0)
        reader.close(5.0)
        server.close()
        loop.close(5.0)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_another_user_is_refused_by_what_the_kernel_says(self, short: Path) -> None:
        with serving(short) as (_, _, end):
            short.chmod(0o711)
            (short / "seg").chmod(0o666)
            child_id = os.fork()
            if child_id == 0:  # only bare calls here: the parent has threads
                os._exit(_as_nobody(end.addresses["shm"]))
            _, status = os.waitpid(child_id, 0)
            assert os.waitstatus_to_exitcode(status) == 0


def _connect_and_wait_for_the_end(path: Path, seconds: float, name: str) -> socket.socket:
    sock = connect(path, seconds, name)
    hung_up = select.poll()
    hung_up.register(sock, 0)  # only what is always reported: the other end's close
    assert hung_up.poll(seconds * 1000)
    return sock


def _as_nobody(path: str) -> int:
    try:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(5.0)
        sock.connect(path)
        data, descriptors, _, _ = sock.recvmsg(4096, 256)
        refused = b"AuthError" in data and not descriptors
        return 0 if refused and sock.recv(1) == b"" else 1
    except OSError:
        return 2


class TestGloo:
    @contextmanager
    def halves(self, short: Path, death_of: str = "", step: str = "") -> Iterator[tuple[Child, Child]]:
        ids = ("a" * 16, "b" * 16)
        with (
            child(
                children.gloo_half, str(short), "source", ids, step if death_of == "source" else ""
            ) as source,
            child(
                children.gloo_half,
                str(short),
                "destination",
                ids[::-1],
                step if death_of == "destination" else "",
            ) as dest,
        ):
            assert source.hear() == dest.hear() == "linked"
            yield source, dest

    def test_two_processes(self, short: Path) -> None:
        with self.halves(short) as (source, dest):
            assert source.hear() == dest.hear()

    @pytest.mark.parametrize(
        ("who", "step"),
        [
            ("source", "gloo.before_send"),
            ("source", "gloo.before_step"),
            ("destination", "gloo.before_install"),
            ("destination", "gloo.before_step"),
        ],
    )
    def test_a_dead_peer_is_noticed(self, short: Path, who: str, step: str) -> None:
        ids = ("a" * 16, "b" * 16)
        side = "destination" if who == "source" else "source"
        mine = ids[::-1] if who == "source" else ids
        theirs = mine[::-1]
        world = stamped()
        with child(children.gloo_half, str(short), who, theirs, step) as dying, ExitStack() as stack:
            transport = GlooTransport(JOB, children.store_at(str(short)), process_id=mine[0])
            stack.callback(transport.close, 5.0)
            stack.callback(world.close)
            peer = Endpoint(job=JOB, id=mine[1], name="the other", host="h", uid=0, addresses={"gloo": ""})
            link = transport.link(peer, [Ticket("gloo", 0, 0, 0, int(Rights.READ), FENCE)], 30.0)
            if side == "source":
                program = transport.compile(world.plan, world.plan.writer(0, "serve"), Side.SOURCE, STAGING)
                program.rebind(world.writers[0].binding, {0: Remote(link)})
            else:
                hops = world.plan.reader("serve", 0)
                program = transport.compile(world.plan, hops, Side.DESTINATION, STAGING)
                program.rebind(world.readers[0].binding, {0: Remote(link)})
            assert dying.hear() == "linked"
            running = transport.start(program, FENCE, Limits(deadline=30.0))
            dying.process.join(WALL)
            assert dying.process.exitcode == -9
            started = time.monotonic()
            with pytest.raises(PeerLostError, match="the other"):
                running.wait(20.0)
            assert time.monotonic() - started < 5.0
            assert not link.alive
            with pytest.raises(PeerLostError):
                transport.start(program, FENCE, Limits(deadline=5.0))
            assert threading.active_count() < 20
