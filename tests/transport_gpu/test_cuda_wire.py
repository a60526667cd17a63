"""What of cuda_ipc needs no GPU: descriptions, batches of descriptors, links of many regions."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from syncline.errors import RevokedError, TransportError
from syncline.memory.region import Kind, Region
from syncline.protocol.ids import Fence
from syncline.transport import cuda_ipc_chunks as chunks
from syncline.transport import frames
from syncline.transport.base import Endpoint, Rights, Ticket
from syncline.transport.clock import Deadline
from syncline.transport.cuda_ipc_chunks import Chunks, ChunkServer
from syncline.transport.cuda_ipc_link import CudaLink
from syncline.transport.cuda_ipc_memory import Description
from syncline.transport.loop import Loop
from syncline.transport.segments import SegmentServer

if TYPE_CHECKING:
    from collections.abc import Iterator

JOB = "wire"
FENCE = Fence(JOB, 1, 1, 7, 1)
COUNT = 150


class Server(SegmentServer):
    """Hands out descriptions of made-up segments of this process."""

    def _keep(self, descriptor: int, region: Region) -> int:
        return -1

    def _hand_over(self, peer, answer, segment) -> None:
        r = segment.region
        nbytes = r.nbytes + (r.id == 999)
        made = Description(pid=os.getpid(), address=r.ptr, nbytes=nbytes, device="d", event=b"")
        descriptor = made.to_descriptor()
        self._tell(peer, answer, descriptor)
        os.close(descriptor)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop("test")
    yield made
    made.close(5.0)


@pytest.fixture
def server(loop: Loop, tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "s", JOB, "server", loop)
    yield made
    made.close()


@pytest.fixture
def link(server: Server, loop: Loop, tmp_path: Path) -> Iterator[CudaLink]:
    peer = Endpoint(job=JOB, id="server", name="writer 0", host="h", uid=os.geteuid())
    hello = frames.Hello(frames.VERSION, JOB, "reader", "server")
    made = CudaLink(peer, str(tmp_path / "s"), hello, loop, Deadline(5.0), 0)
    yield made
    made.close()


def region(number: int, generation: int = 1, kind: Kind = Kind.CUDA) -> Region:
    return Region(number, number << 20, 4096, kind, generation)


def ticket(number: int, generation: int = 1) -> Ticket:
    return Ticket("cuda_ipc", number, generation, 4096, int(Rights.READ), FENCE)


def fetched(server: Server, link: CudaLink, *numbers: int) -> tuple[tuple[int, int], ...]:
    for number in numbers:
        server.export(region(number), FENCE.epoch, -1)
    link.fetch([ticket(n) for n in numbers], Deadline(5.0))
    return tuple((n, 1) for n in numbers)


def test_a_group_is_held_as_one_and_given_up_by_one(server: Server, link: CudaLink) -> None:
    keys = fetched(server, link, 1, 2, 3)
    assert link.pointers(keys) == {n: n << 20 for n in (1, 2, 3)}
    stopped = threading.Event()
    link.acquire(keys, stopped.set)
    assert link.pointers(keys) is link.pointers(keys)
    assert not server.revoke(ticket(2), 0.2).drained
    assert stopped.wait(5.0)
    assert link.release(keys, stopped.set)
    assert server.revoke(ticket(2), 5.0).drained
    with pytest.raises(RevokedError):
        link.acquire(keys, stopped.set)
    assert link.regions == 2


def test_an_idle_group_keeps_nobody_waiting(server: Server, link: CudaLink) -> None:
    keys = fetched(server, link, 1, 2)

    def stop() -> None:
        raise AssertionError("nobody uses it")

    for _ in range(3):
        link.acquire(keys, stop)
        assert not link.release(keys, stop)
    assert server.revoke(ticket(1), 5.0).drained
    assert link.regions == 1


def test_a_later_binding_gives_the_earlier_one_up(server: Server, link: CudaLink) -> None:
    first, second = fetched(server, link, 1, 2), fetched(server, link, 2, 3)
    stop = threading.Event().set
    link.acquire(first, stop)
    link.acquire(second, stop)
    assert not link.release(first, stop)
    assert not link.release(second, stop)
    third = fetched(server, link, 4)
    link.acquire(third, stop)
    assert not link.release(third, stop)
    for number in (1, 2, 3, 4):
        assert server.revoke(ticket(number), 5.0).drained
    assert link.regions == 0


def test_a_newer_generation_ends_groups_of_the_older(server: Server, link: CudaLink) -> None:
    keys = fetched(server, link, 1)
    stopped = threading.Event()
    link.acquire(keys, stopped.set)
    server.export(region(1, 2), FENCE.epoch, -1)
    link.fetch([ticket(1, 2)], Deadline(5.0))
    assert stopped.wait(5.0)
    assert link.release(keys, stopped.set)
    assert link.regions == 1


def test_lies_are_refused(server: Server, link: CudaLink) -> None:
    server.export(region(999), FENCE.epoch, -1)
    with pytest.raises(TransportError, match="lies about its size"):
        link.fetch([ticket(999)], Deadline(5.0))
    server.export(region(5, kind=Kind.SHARED), FENCE.epoch, -1)
    with pytest.raises(TransportError, match="not its device's"):
        link.fetch([ticket(5)], Deadline(5.0))


def test_descriptions_are_checked() -> None:
    made = Description(pid=1, address=2, nbytes=3, device="GPU-x", event=b"e" * 64, sizes=[1, 2])
    descriptor = made.to_descriptor()
    assert Description.from_descriptor(descriptor) == made
    os.close(descriptor)
    descriptor = os.memfd_create("x")
    os.write(descriptor, b"nonsense")
    with pytest.raises(TransportError, match="not the description"):
        Description.from_descriptor(descriptor)
    os.close(descriptor)


def piece(number: int) -> int:
    descriptor = os.memfd_create("piece")
    os.write(descriptor, str(number).encode())
    return descriptor


def test_many_pieces_come_in_batches_and_none_stays_open(loop: Loop, tmp_path: Path) -> None:
    def export(secret: bytes, first: int, count: int) -> list[int]:
        if secret != b"right":
            raise RevokedError("no such virtual memory")
        return [piece(n) for n in range(first, min(first + count, COUNT))]

    made = ChunkServer(tmp_path / "c", loop, export)
    before = len(list(Path("/proc/self/fd").iterdir()))
    client = Chunks(tmp_path / "c", 5.0)
    seen = [int(os.pread(d, 9, 0)) for d in client.fetch(b"right", COUNT)]
    assert seen == list(range(COUNT))
    with pytest.raises(RevokedError, match="no such virtual memory"):
        next(client.fetch(b"wrong", 1))
    with pytest.raises(TransportError, match="lost on the way"):
        list(client.fetch(b"right", COUNT + 1))
    client.close()
    made.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    assert not (tmp_path / "c").exists()
    with pytest.raises(TransportError, match="cannot be asked for"):
        Chunks(tmp_path / "c", 1.0)
    assert chunks.BATCH < 253
