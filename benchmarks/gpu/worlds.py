"""Random models on GPUs: a writer process that serves them by cuda_ipc, a reader that pulls and compares.

The models and their cuts are those of the transport tests (`tests.transport.world`): any layout, dtype,
padding and alignment. Both processes make the same world from its seed, so that only handles cross between
them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tests.transport.world import World

from syncline.memory.binding import Binding
from syncline.memory.cuda import DeviceSegments
from syncline.protocol.ids import Fence
from syncline.transport.base import Endpoint, Limits, Remote, Rights, Side, Ticket
from syncline.transport.cuda_ipc import CudaIpcTransport
from syncline.transport.cuda_ipc_sources import DeviceSourceDigests
from syncline.transport.host import endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    import numpy as np
    from tests.transport.world import Rank

    from syncline.transport.cuda_ipc_program import CudaProgram

JOB = "gpu"
FENCE = Fence(JOB, 1, 1, 7, 1)
LIMITS = Limits(deadline=30.0)
SLOW = 40


class DeviceRank:
    """A rank's buffers on a device, at odd addresses as well as even ones."""

    def __init__(self, rank: Rank, device: int, *, shift: int = 0) -> None:
        self.rank, self.device = rank, device
        self.buffers: list[torch.Tensor] = []
        for held in rank.held:
            offset = held.buffer.element_size() * shift
            whole = torch.empty(held.buffer.nbytes + offset, dtype=torch.uint8, device=f"cuda:{device}")
            self.buffers.append(whole[offset:])
        self.upload()

    @property
    def addresses(self) -> list[int]:
        """Addresses of the storages."""
        return [b.data_ptr() for b in self.buffers]

    @property
    def sizes(self) -> list[int]:
        """Sizes of the storages."""
        return [b.nbytes for b in self.buffers]

    def upload(self) -> None:
        """Copy the rank's host buffers to the device, on the current stream."""
        for held, buffer in zip(self.rank.held, self.buffers, strict=True):
            buffer.copy_(held.buffer.view(torch.uint8))

    def download(self) -> None:
        """Copy the device's bytes into the rank's host buffers."""
        for held, buffer in zip(self.rank.held, self.buffers, strict=True):
            held.buffer.view(torch.uint8).copy_(buffer)


class Writers:
    """The writer ranks of one world, all in this process, each with a transport of its own."""

    def __init__(self, seed: int, device: int, directory: str, *, casts: bool = True) -> None:
        self.world = World.random(seed, writers=2, readers=2, tensors=6, casts=casts)
        self.device = device
        self.segments = [DeviceSegments(device) for _ in self.world.writers]
        self.transports = [
            CudaIpcTransport(JOB, Path(directory) / f"{seed}-{w}.sock", device=device, segments=s)
            for w, s in enumerate(self.segments)
        ]
        self.ranks = [DeviceRank(r, device, shift=(seed + w) % 3) for w, r in enumerate(self.world.writers)]
        self.tickets: list[list[Ticket]] = []

    def offer(self) -> list[tuple[str, list[bytes], bytes]]:
        """Bind and export everything; return what a reader needs of each rank."""
        found = []
        self.tickets = []
        for w, rank in enumerate(self.ranks):
            transport = self.transports[w]
            binding = self.segments[w].bind(rank.rank.manifest.fingerprint, rank.addresses, rank.sizes)
            tickets = [
                transport.export(transport.register(region), Rights.READ, FENCE)
                for region in binding.regions.values()
                if region.nbytes
            ]
            transport.record()
            self.tickets.append(tickets)
            end = endpoint(JOB, f"writer {w}", transport.process_id, [transport])
            found.append((end.to_text(), [t.encode() for t in tickets], binding.to_wire()))
        return found

    def change(self, step: int) -> None:
        """Take a step: late, on a stream of its own: only the exported event orders readers after it."""
        self.world.change(step)
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            busy = torch.randn(4096, 4096, device=f"cuda:{self.device}")
            for _ in range(SLOW):
                busy = (busy @ busy).clamp(-1, 1)
            for transport, rank in zip(self.transports, self.ranks, strict=True):
                rank.upload()
                transport.record(stream)

    def move(self) -> None:
        """Take everything to other addresses, as an offload and reload does."""
        self.ranks = [DeviceRank(r.rank, self.device, shift=i % 2) for i, r in enumerate(self.ranks)]

    def close(self) -> None:
        """Hand out nothing more."""
        for transport in self.transports:
            transport.close(5.0)
        self.world.close()


def serve(pipe: Connection, device: int, directory: str, expandable: bool) -> None:  # noqa: C901 - orders
    """Be the writers' process: do as told until told to stop."""
    if expandable:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")  # noqa: SLF001
    torch.set_num_threads(1)
    torch.cuda.set_device(device)
    writers: Writers | None = None
    while True:
        order, *given = pipe.recv()
        answer: Any = None
        if order == "make":
            if writers is not None:
                writers.close()
            writers = Writers(given[0], device, directory)
            answer = writers.offer()
        elif writers is None:
            return
        elif order == "change":
            writers.change(given[0])
        elif order == "move":
            writers.move()
            answer = writers.offer()
        elif order == "offer":
            answer = writers.offer()
        elif order == "revoke":
            answer = [
                t.revoke(ticket, given[0]).drained
                for t, own in zip(writers.transports, writers.tickets, strict=True)
                for ticket in own
            ]
        elif order == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            writers.close()
            pipe.send(None)
            return
        pipe.send(answer)


class Pull:
    """One reader rank, linked to the writers, with a bound program."""

    def __init__(
        self, world: World, rank: int, offer: list[tuple[str, list[bytes], bytes]], device: int
    ) -> None:
        self.world, self.rank = world, rank
        self.transport = CudaIpcTransport(JOB, device=device)
        self.memory = DeviceRank(world.readers[rank], device, shift=rank)
        self.program: CudaProgram = self.transport.compile(
            world.plan, world.plan.reader("serve", rank), Side.DESTINATION
        )
        self.link(offer)

    def link(self, offer: list[tuple[str, list[bytes], bytes]]) -> None:
        """Link what the writers offer, and bind."""
        remote = {}
        for w, (end, tickets, binding) in enumerate(offer):
            decoded = [Ticket.decode(t) for t in tickets]
            link = self.transport.link(Endpoint.from_text(end), decoded, 20.0)
            remote[w] = Remote(link, Binding.from_wire(binding))
        self.local = Binding.private(
            self.world.readers[self.rank].manifest.fingerprint, self.memory.addresses
        )
        self.program.rebind(self.local, remote)

    def run(self, limits: Limits = LIMITS) -> str:
        """Pull with digests; return what is wrong, or nothing."""
        running = self.transport.start(self.program, FENCE, limits, digest=True)
        running.wait(30.0)
        self.memory.download()
        try:
            self.world.check_reader(self.rank)
        except AssertionError as error:
            return str(error)
        return self._digests(running.digests)

    def _digests(self, got: np.ndarray | None) -> str:
        hops = self.world.plan.reader("serve", self.rank)
        if got is None:
            return "no digests"
        from syncline.layout.dtype import name_of  # noqa: PLC0415 - beside its use
        from syncline.store.proof import _live_rows  # noqa: PLC0415 - as above

        again = DeviceSourceDigests(self.world.plan, _live_rows(hops), self.transport.device)
        again.rebind(self.local)
        running = again.start(LIMITS)
        running.wait(30.0)
        for h in range(len(hops)):
            dtype = name_of(int(hops.dst_dtype[h]))
            want = self.world.digest(int(hops.tensor[h]), hops.offset[h], hops.size[h], dtype)
            installed = running.digests[h] if running.digests is not None else 0
            if int(got[h]) != want or int(installed) != want:
                return f"digest of hop {h}"
        return ""

    def close(self) -> None:
        """Close the transport."""
        self.transport.close(5.0)


@contextlib.contextmanager
def process(device: int, *, expandable: bool = False) -> Iterator[Any]:
    """Yield a function that tells a writers' process what to do, and returns its answer."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="sl-") as directory:
        child = context.Process(target=serve, args=(theirs, device, directory, expandable), daemon=True)
        child.start()
        theirs.close()

        def tell(*order: Any, answer: bool = True) -> Any:
            ours.send(order)
            if not answer:
                child.join(30)
                return None
            if not ours.poll(60):
                raise TimeoutError(f"the writers' process did not answer {order}")
            return ours.recv()

        try:
            yield tell
            if child.is_alive():
                tell("stop")
        finally:
            child.join(10)
            if child.is_alive():
                child.kill()


def pulls(
    count: int, writer_device: int, reader_device: int, *, expandable: bool = False, seed: int = 0
) -> list[str]:
    """Pull ``count`` random models when fresh, after a step, and after a move; return what was wrong."""
    wrong = []
    torch.cuda.set_device(reader_device)
    with process(writer_device, expandable=expandable) as tell:
        for i in range(count):
            world = World.random(seed + i, writers=2, readers=2, tensors=6)
            rank = i % 2
            pull = Pull(world, rank, tell("make", seed + i), reader_device)
            wrong.append(pull.run())
            world.change(i)
            tell("change", i)
            wrong.append(pull.run(Limits(deadline=30.0, sms=24) if i % 3 == 0 else LIMITS))
            if i % 2:
                pull.link(tell("move"))
                wrong.append(pull.run())
            pull.close()
            world.close()
    return wrong
