"""A trainer's process and an engine's, over cuda_ipc: Qwen3-30B-A3B, from live memory to live memory."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.gpu import clock, qwen
from syncline.kernels.engine import Op
from syncline.memory.binding import Binding
from syncline.memory.cuda import DeviceSegments
from syncline.protocol.ids import Fence
from syncline.store.proof import _live_rows
from syncline.transport.base import Endpoint, Limits, Remote, Rights, Side, Ticket
from syncline.transport.cuda_ipc import CudaIpcTransport
from syncline.transport.cuda_ipc_sources import DeviceSourceDigests
from syncline.transport.host import endpoint

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

JOB = "bench"
FENCE = Fence(JOB, 1, 1, 7, 1)
ROUNDS = 7


def serve(
    pipe: Connection, device: int, directory: str, layers: int, tp: int, dtypes: tuple[str, str]
) -> None:
    """Hold both trainer ranks' parameters and hand them out until told to stop."""
    torch.cuda.set_device(device)
    torch.manual_seed(1)
    writers, _, plan = qwen.planned(layers, tp, *dtypes)
    made, kept = [], []
    for w, tensors in enumerate(writers):
        storages = qwen.allocate(tensors, device, fill=True)
        segments = DeviceSegments(device)
        transport = CudaIpcTransport(JOB, Path(directory) / f"{w}.sock", device=device, segments=segments)
        began = time.perf_counter()
        addresses, sizes = [s.data_ptr() for s in storages], [s.nbytes for s in storages]
        binding = segments.bind(tensors.manifest().fingerprint, addresses, sizes)
        tickets = [
            transport.export(transport.register(r), Rights.READ, FENCE) for r in binding.regions.values()
        ]
        took = time.perf_counter() - began
        transport.record()
        end = endpoint(JOB, f"writer {w}", transport.process_id, [transport])
        made.append((end.to_text(), [t.encode() for t in tickets], binding.to_wire(), took, len(storages)))
        kept.append((transport, storages, binding))
    torch.cuda.synchronize()
    pipe.send((made, torch.cuda.memory_reserved()))
    while (order := pipe.recv()) != "stop":
        if order == "digest":
            pipe.send(_digests(plan, kept, device))
    for transport, *_ in kept:
        transport.close(5.0)
    pipe.send("stopped")


def _digests(plan: Any, kept: list[Any], device: int) -> tuple[dict[int, int], float]:
    """Digest every rank's pieces; return them, and the seconds of a warm pass over both ranks."""
    found: dict[int, int] = {}
    took = 0.0
    for rank, (_, _, binding) in enumerate(kept):
        rows = plan.digest_rows(rank)
        program = DeviceSourceDigests(plan, rows, device)
        program.rebind(binding)
        for _ in range(3):
            began = time.perf_counter()
            running = program.start(Limits())
            running.wait(60.0)
            once = time.perf_counter() - began
        took += once
        if running.digests is not None:
            found |= dict(zip(rows.piece.tolist(), running.digests.tolist(), strict=True))
    return found, took


class Update:
    """The engine's rank 0, linked and bound."""

    def __init__(
        self,
        writer_device: int,
        reader_device: int,
        layers: int,
        tp: int = 2,
        dtypes: tuple[str, str] = ("bfloat16", "bfloat16"),
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._directory = tempfile.TemporaryDirectory(prefix="sl-")
        arguments = (theirs, writer_device, self._directory.name, layers, tp, dtypes)
        self._child = context.Process(target=serve, args=arguments, daemon=True)
        self._child.start()
        theirs.close()
        torch.cuda.set_device(reader_device)
        began = time.perf_counter()
        _, self.tensors, self.plan = qwen.planned(layers, tp, *dtypes)
        self.plan_s = time.perf_counter() - began
        self.storages = qwen.allocate(self.tensors, reader_device, fill=False)
        clock.idle()
        if not self.pipe.poll(240):
            raise TimeoutError("the trainer's process did not come up")
        self.offer, self.trainer_bytes = self.pipe.recv()
        self.transport = CudaIpcTransport(JOB, device=reader_device)
        self.hops = self.plan.reader("serve", 0)
        began = time.perf_counter()
        self.program = self.transport.compile(self.plan, self.hops, Side.DESTINATION)
        self.compile_s = time.perf_counter() - began
        self._connect()
        self.nbytes = int(self.hops.nbytes.sum())

    def _connect(self) -> None:
        began = time.perf_counter()
        remote = {}
        for w, (end, tickets, binding, *_) in enumerate(self.offer):
            link = self.transport.link(Endpoint.from_text(end), [Ticket.decode(t) for t in tickets], 60.0)
            remote[w] = Remote(link, Binding.from_wire(binding))
        self.link_s = time.perf_counter() - began
        addresses = [s.data_ptr() for s in self.storages]
        self.local = Binding.private(self.tensors.manifest().fingerprint, addresses)
        self.remote = remote
        began = time.perf_counter()
        self.program.rebind(self.local, remote)
        clock.idle()
        self.bind_s = time.perf_counter() - began
        began = time.perf_counter()
        self.program.rebind(self.local, remote)
        clock.idle()
        self.rebind_s = time.perf_counter() - began
        export_s = sum(o[3] for o in self.offer)
        self.connect_s = export_s + self.link_s + self.bind_s

    @property
    def regions(self) -> int:
        """Segments that were opened."""
        return sum(len(o[1]) for o in self.offer)

    @property
    def source_bytes(self) -> int:
        """Bytes that leave the trainer's memory."""
        return self.nbytes * getattr(torch, self.offer_dtype).itemsize // 2

    @property
    def offer_dtype(self) -> str:
        """The trainer's dtype."""
        from syncline.layout.dtype import name_of  # noqa: PLC0415 - beside its use

        return name_of(int(self.hops.src_dtype[0]))

    def pull(self, *, digest: bool = False, sms: int | None = None) -> np.ndarray | None:
        """Run one update to its end."""
        running = self.transport.start(self.program, FENCE, Limits(deadline=60.0, sms=sms), digest=digest)
        running.wait(60.0)
        return running.digests

    def seconds(self, *, digest: bool = False, sms: int | None = None) -> float:
        """Return the median wall time of an update."""
        return clock.median(lambda: self.pull(digest=digest, sms=sms), ROUNDS)

    def read_back(self) -> float:
        """Return the seconds of a pass that digests what it reads back from the destination."""
        sweep = self.program._sweep  # noqa: SLF001 - a launch of the kernel by itself
        return clock.median(lambda: sweep.run(Op.COPY_DIGEST, again=True), ROUNDS)

    def plain(self) -> float:
        """Return the seconds of the kernels by themselves."""
        sweep = self.program._sweep  # noqa: SLF001 - a launch of the kernel by itself
        return clock.median(lambda: sweep.run(Op.COPY), ROUNDS)

    def installed(self) -> float:
        """Return the seconds of a pass that reads live memory once more."""
        again = DeviceSourceDigests(self.plan, _live_rows(self.hops), self.transport.device)
        again.rebind(self.local)

        def run() -> None:
            again.start(Limits()).wait(60.0)

        return clock.median(run, 5)

    def host_ms(self) -> float:
        """Return the milliseconds that starting an update takes: everything but waiting for its end."""
        total = []
        for _ in range(ROUNDS):
            clock.idle()
            began = time.perf_counter()
            running = self.transport.start(self.program, FENCE, Limits(deadline=60.0))
            started = time.perf_counter() - began
            running.wait(60.0)
            total.append(1e3 * started)
        return statistics.median(total)

    def proved(self) -> tuple[bool, float]:
        """Whether every hop's digest is the sum of its pieces' at the source; and that pass's seconds."""
        got = self.pull(digest=True)
        self.pipe.send("digest")
        pieces, took = self.pipe.recv()
        at, piece = self.hops.piece_ptr, self.hops.piece
        source = np.array([pieces[int(p)] for p in piece], np.uint64)
        want = np.add.reduceat(source, at[:-1])
        return got is not None and bool(np.array_equal(want, got)), took

    def close(self) -> None:
        """Stop the trainer and free the memory."""
        self.transport.close(5.0)
        self.pipe.send("stop")
        self.pipe.poll(30)
        self._child.join(20)
        if self._child.is_alive():
            self._child.kill()
        self._directory.cleanup()
        del self.program, self.storages
        torch.cuda.empty_cache()
