"""One trainer's or engine's rank, in a process with a GPU: as `many` tells it, over both transports.

A pair of ranks on one GPU always uses cuda_ipc, as the product has it; what ``nccl`` names is how all other
pairs move their bytes. Updates start at one time on the clock that all processes of a host share.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.gpu.many_cases import INSTANCE, Case, Contents
from benchmarks.gpu.many_devices import JOB, RealGpu, Transports
from syncline.memory.binding import Binding
from syncline.protocol.ids import Fence
from syncline.transport.base import Endpoint, Limits, Remote, Rights, Side, Staging, Ticket
from syncline.transport.host import endpoint

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from benchmarks.gpu.many_devices import Gpu
    from syncline.plan import Hops, Plan
    from syncline.transport.base import Link, Program, Transfer, Transport

FENCE = Fence(JOB, 1, 1, 0, 1)
SECONDS = 60.0
NEAR = "cuda_ipc"


@dataclass(frozen=True)
class Setup:
    """What all ranks share.

    Attributes:
        directory: for sockets, and where processes meet.
        bits: path and number of elements of `Contents`.
        fake: whether GPUs are faked.
    """

    directory: str
    bits: tuple[str, int]
    fake: bool


@dataclass(frozen=True)
class Offer:
    """What a rank tells the others.

    Attributes:
        endpoint: as text; tickets, binding: on the wire, a writer's.
    """

    endpoint: str
    tickets: tuple[bytes, ...] = ()
    binding: bytes = b""


@dataclass(frozen=True)
class Order:
    """How bytes are to be moved.

    Attributes:
        transport: between ranks on different GPUs.
        staggered: whether each reader begins at another writer, as planned; otherwise all begin at the first.
    """

    transport: str
    staggered: bool = True


class Half:
    """One rank's part of a case: its memory, its transports, and a program for each `Order`."""

    def __init__(self, setup: Setup, gpu: Gpu, case: Case, side: Side, rank: int) -> None:
        self.gpu, self.case, self.side, self.rank = gpu, case, side, rank
        self.source = side is Side.SOURCE
        self.plan: Plan = case.plan()
        self.manifest = case.manifests()[0 if self.source else 1][rank]
        self.storages = gpu.allocate(self.manifest.storage_nbytes.tolist())
        self.transports = Transports(gpu, setup.directory, f"{side}-{rank}", serves=self.source)
        contents = Contents.read(*setup.bits)
        self.contents = Contents(contents.bits.to(gpu.device))
        self.binding = self._bind()
        self.links: dict[tuple[str, int], Link] = {}
        self.programs: dict[Order, list[tuple[Transport, Program]]] = {}

    def offer(self) -> Offer:
        """Return what the other side needs; a writer hands its memory out."""
        near = self.transports.cuda_ipc
        end = endpoint(JOB, f"{self.side} {self.rank}", near.process_id, [near, self.transports.nccl])
        if not self.source:
            return Offer(end.to_text())
        regions = [r for r in self.binding.regions.values() if r.nbytes]
        tickets = [near.export(near.register(region), Rights.READ, FENCE) for region in regions]
        return Offer(end.to_text(), tuple(t.encode() for t in tickets), self.binding.to_wire())

    def write(self, version: int) -> None:
        """Fill a writer's memory with a version."""
        self.contents.fill(self.manifest, self.storages, version)
        self.transports.cuda_ipc.record()

    def spoil(self) -> None:
        """Leave nothing of an earlier update in a reader's memory."""
        for storage in self.storages:
            storage.fill_(0xA5)

    def check(self, version: int) -> tuple[int, int]:
        """Return how many of the rank's tensors are right, and how many there are."""
        return self.contents.check(self.manifest, self.storages, version)

    def link(self, order: Order, offers: dict[int, Offer]) -> dict[str, Any]:
        """Link to the ranks of the other side that bytes go to, compile and bind; return what that took."""
        began = time.perf_counter()
        made: list[tuple[Transport, Program]] = []
        for name in sorted({self._lane(order, peer) for peer in offers}):
            peers = {peer: one for peer, one in offers.items() if self._lane(order, peer) == name}
            one = self._program(order, name, peers)
            if one is not None:
                made.append(one)
        self.programs[order] = made
        self.gpu.idle()
        return {"connect_s": time.perf_counter() - began}

    def run(self, order: Order, step: int, at: float) -> tuple[float, int]:
        """Start at a time, and move everything; return when all was over, and the bytes that arrived here."""
        self.gpu.idle()
        while time.perf_counter() < at:
            pass
        fence = FENCE.at(step)
        limits = Limits(deadline=SECONDS)
        running: list[Transfer] = [t.start(p, fence, limits) for t, p in self.programs[order]]
        for transfer in running:
            transfer.wait(SECONDS)
        ended = time.perf_counter()
        return ended, 0 if self.source else sum(t.poll().nbytes for t in running)

    def close(self) -> None:
        """Let go of everything."""
        self.transports.close()
        del self.programs, self.storages, self.contents
        gc.collect()
        self.gpu.empty()

    def _bind(self) -> Binding:
        addresses = [s.data_ptr() for s in self.storages]
        if self.transports.segments is None:
            return Binding.private(self.manifest.fingerprint, addresses)
        sizes = [s.nbytes for s in self.storages]
        return self.transports.segments.bind(self.manifest.fingerprint, addresses, sizes)

    def _lane(self, order: Order, peer: int) -> str:
        ends = (self.rank, peer) if self.source else (peer, self.rank)
        same = self.case.writer_gpus[ends[0]] == self.case.reader_gpus[ends[1]]
        return NEAR if same else order.transport

    def _program(self, order: Order, name: str, peers: dict[int, Offer]) -> tuple[Transport, Program] | None:
        """Return a program over one transport; none where nothing is moved by it, or by this side."""
        if self.source and name == NEAR:
            return None
        hops = self._hops(order, sorted(peers))
        if not len(hops):
            return None
        transport: Transport = self.transports.cuda_ipc if name == NEAR else self.transports.nccl
        remote = {}
        for peer in np.unique(hops.dst if self.source else hops.src).tolist():
            binding = Binding.from_wire(peers[peer].binding) if name == NEAR else None
            remote[peer] = Remote(self._link(transport, peer, peers[peer]), binding)
        program = transport.compile(self.plan, hops, self.side, Staging(bucket=self.gpu.bucket))
        program.rebind(self.binding, remote)
        return transport, program

    def _hops(self, order: Order, peers: list[int]) -> Hops:
        if self.source:
            hops = self.plan.writer(self.rank, INSTANCE)
            return hops.take(np.flatnonzero(np.isin(hops.dst, peers)))
        hops = self.plan.reader(INSTANCE, self.rank)
        kept = np.flatnonzero(np.isin(hops.src, peers))
        if not order.staggered:
            kept = kept[np.argsort(hops.src[kept], kind="stable")]
        return hops.take(kept)

    def _link(self, transport: Transport, peer: int, offer: Offer) -> Link:
        """Return a link, made once: all ranks make theirs in one order, so that nobody waits in a circle."""
        key = transport.name, peer
        if key not in self.links:
            tickets = [Ticket.decode(t) for t in offer.tickets]
            if transport.name != NEAR:
                tickets = [Ticket(transport.name, 0, 0, 0, int(Rights.READ), FENCE)]
            self.links[key] = transport.link(Endpoint.from_text(offer.endpoint), tickets, SECONDS)
        return self.links[key]


def serve(pipe: Connection, setup: Setup, side: Side, rank: int, gpu: int) -> None:
    """Be a rank until the pipe ends: every order is (name of a method of `Half`, arguments)."""
    torch.set_num_threads(1)
    device: Gpu
    if setup.fake:
        from benchmarks.gpu.many_fake import FakeGpu  # noqa: PLC0415 - needs the tests' packages

        device = FakeGpu(gpu)
    else:
        device = RealGpu(gpu)
    half: Half | None = None
    while True:
        name, *given = pipe.recv()
        answer: Any = None
        if name == "make":
            half = Half(setup, device, given[0], side, rank)
            answer = half.offer()
        elif half is None:
            raise ValueError(f"no case was made, and asked to {name}")
        elif name == "close":
            half.close()
            half = None
        else:
            answer = getattr(half, name)(*given)
        device.idle()
        pipe.send((True, answer))
