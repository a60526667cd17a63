"""The two-sided transport between two processes with a GPU each: checked against the source, then timed."""

from __future__ import annotations

import hashlib
import multiprocessing
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tests.transport.world import World
from torch.distributed import FileStore

from benchmarks.gpu import qwen
from benchmarks.gpu.worlds import DeviceRank
from syncline.memory.binding import Binding
from syncline.protocol.ids import Fence
from syncline.transport.base import Endpoint, Limits, Remote, Side, Staging, Ticket
from syncline.transport.cuda_ipc_sources import DeviceSourceDigests
from syncline.transport.host import endpoint
from syncline.transport.nccl import BUCKET, NcclTransport

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from syncline.plan import Plan

JOB = "messages"
FENCE = Fence(JOB, 1, 1, 0, 1)
LIMITS = Limits(deadline=40.0)
ROUNDS = 6
_SECONDS = 60.0

Spec = tuple[Any, ...]
"""``("world", seed)``, or ``("qwen", layers, tp, dtype, wire dtype)``."""


def meeting(directory: str) -> Callable[[str], FileStore]:
    """Return what gives two processes a store by a name that both know."""

    def meet(name: str) -> FileStore:
        file = Path(directory) / hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
        store = FileStore(str(file), 2)
        store.set_timeout(timedelta(seconds=_SECONDS))
        return store

    return meet


class Holding:
    """A plan, and the storages of its writers, or of reader 0, on a device."""

    def __init__(self, spec: Spec, device: int, side: Side) -> None:
        self.device, self.world = device, None
        source = side is Side.SOURCE
        if spec[0] == "world":
            self.world = World.random(spec[1], writers=2, readers=2, tensors=6)
            self.plan: Plan = self.world.plan
            ranks = self.world.writers if source else self.world.readers[:1]
            self.ranks = [DeviceRank(rank, device) for rank in ranks]
            held = [(r.rank.manifest.fingerprint, r.addresses) for r in self.ranks]
        else:
            torch.manual_seed(1)
            writers, reader, self.plan = qwen.planned(*spec[1:])
            self.kept = []
            held = []
            for tensors in writers if source else [reader]:
                storages = qwen.allocate(tensors, device, fill=source)
                self.kept.append(storages)
                held.append((tensors.manifest().fingerprint, [s.data_ptr() for s in storages]))
        self.bindings = [Binding.private(fingerprint, addresses) for fingerprint, addresses in held]

    def digests(self) -> dict[int, int]:
        """Return the digest of every piece that the writers hold."""
        found: dict[int, int] = {}
        for rank, binding in enumerate(self.bindings):
            rows = self.plan.digest_rows(rank)
            program = DeviceSourceDigests(self.plan, rows, self.device)
            program.rebind(binding)
            running = program.start(Limits())
            running.wait(_SECONDS)
            if running.digests is not None:
                found |= dict(zip(rows.piece.tolist(), running.digests.tolist(), strict=True))
        return found


def serve(pipe: Connection, device: int, directory: str, staging: Staging) -> None:
    """Be the writers' process: one transport a rank, as ranks of their own have."""
    torch.set_num_threads(1)
    torch.cuda.set_device(device)
    while (order := pipe.recv())[0] != "stop":
        _, spec, reader = order
        holding = Holding(spec, device, Side.SOURCE)
        count = len(holding.bindings)
        transports = [NcclTransport(JOB, meeting(directory), device=device) for _ in range(count)]
        ends = [endpoint(JOB, f"writer {w}", t.process_id, [t]).to_text() for w, t in enumerate(transports)]
        pipe.send(ends)
        programs = []
        for w, transport in enumerate(transports):
            link = transport.link(Endpoint.from_text(reader), (ticket(),), _SECONDS)
            hops = holding.plan.writer(w, "serve")
            hops = hops.take(np.flatnonzero(hops.dst == 0))
            program = transport.compile(holding.plan, hops, Side.SOURCE, staging)
            program.rebind(holding.bindings[w], {0: Remote(link)})
            programs.append(program)
        torch.cuda.synchronize()
        pipe.send(holding.digests())
        while (step := pipe.recv()) != "done":
            pipe.send("going")
            fence = FENCE.at(step)
            running = [t.start(p, fence, LIMITS) for t, p in zip(transports, programs, strict=True)]
            for one in running:
                one.wait(_SECONDS)
        for transport in transports:
            transport.close(5.0)
        del holding, programs, transports
        torch.cuda.empty_cache()
    pipe.send("stopped")


def ticket() -> Ticket:
    """Return what both ends of a link meet by."""
    return Ticket("nccl", 0, 0, 0, 1, FENCE)


class Messages:
    """Reader 0, and the writers' process beside it."""

    def __init__(self, writer_device: int, reader_device: int, staging: Staging | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.staging = staging or Staging(bucket=BUCKET)
        self.pipe, theirs = context.Pipe()
        self._directory = tempfile.TemporaryDirectory(prefix="sl-")
        arguments = (theirs, writer_device, self._directory.name, self.staging)
        self._child = context.Process(target=serve, args=arguments, daemon=True)
        self._child.start()
        theirs.close()
        self.device = reader_device
        torch.cuda.set_device(reader_device)

    def made(self, spec: Spec) -> None:
        """Make both sides of a model, link and bind them."""
        self.holding = Holding(spec, self.device, Side.DESTINATION)
        self.transport = NcclTransport(JOB, meeting(self._directory.name), device=self.device)
        here = endpoint(JOB, "reader 0", self.transport.process_id, [self.transport])
        self.pipe.send(("make", spec, here.to_text()))
        began = time.perf_counter()
        ends = self._heard()
        links = [self.transport.link(Endpoint.from_text(e), (ticket(),), _SECONDS) for e in ends]
        self.connect_s = time.perf_counter() - began
        self.hops = self.holding.plan.reader("serve", 0)
        program = self.transport.compile(self.holding.plan, self.hops, Side.DESTINATION, self.staging)
        program.rebind(self.holding.bindings[0], {w: Remote(link) for w, link in enumerate(links)})
        self.program, self.pieces, self.step = program, self._heard(), 1
        self.nbytes = program.nbytes

    def transfer(self, *, digest: bool = False) -> tuple[float, np.ndarray | None]:
        """Run both sides once; return the reader's seconds, and its digests."""
        self.step += 1
        torch.cuda.synchronize(self.device)
        self.pipe.send(self.step)
        self._heard()
        began = time.perf_counter()
        running = self.transport.start(self.program, FENCE.at(self.step), LIMITS, digest=digest)
        running.wait(_SECONDS)
        return time.perf_counter() - began, running.digests

    def wrong(self) -> str:
        """Transfer with digests; return what differs from the source, or nothing."""
        _, got = self.transfer(digest=True)
        if got is None:
            return "messages: no digests"
        at, piece = self.hops.piece_ptr, self.hops.piece
        sums = np.zeros(len(piece) + 1, np.uint64)
        np.cumsum(np.array([self.pieces[int(p)] for p in piece], np.uint64), out=sums[1:])
        want = sums[at[1:]] - sums[at[:-1]]
        if not np.array_equal(want, got):
            return f"messages: digests of {int((want != got).sum())} hops"
        if self.holding.world is not None:
            self.holding.ranks[0].download()
            try:
                self.holding.world.check_reader(0)
            except AssertionError as error:
                return f"messages: {error}"
        return ""

    def seconds(self, *, digest: bool = False) -> float:
        """Return the median of a transfer."""
        return statistics.median([self.transfer(digest=digest)[0] for _ in range(ROUNDS)][2:])

    def done(self) -> None:
        """Let this model go."""
        self.pipe.send("done")
        self.transport.close(5.0)
        del self.holding, self.program
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Stop the writers' process."""
        self.pipe.send(("stop",))
        self.pipe.poll(20)
        self._child.join(10)
        if self._child.is_alive():
            self._child.kill()
        self._directory.cleanup()

    def _heard(self) -> Any:
        if not self.pipe.poll(90):
            raise TimeoutError("the writers' process did not answer")
        return self.pipe.recv()


def exact(count: int, writer_device: int, reader_device: int) -> list[str]:
    """Transfer random models in small buckets; return what was wrong with each."""
    messages = Messages(writer_device, reader_device, Staging(bucket=64 << 10))
    wrong = []
    for seed in range(count):
        messages.made(("world", 400 + seed))
        wrong += [messages.wrong(), messages.wrong()]
        messages.done()
    messages.close()
    return wrong
