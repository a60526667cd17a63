"""A world's ranks connected by one transport, all in this process: what the conformance suite runs on."""

from __future__ import annotations

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from syncline.layout.dtype import name_of
from syncline.memory.binding import Binding
from syncline.protocol.ids import Fence
from syncline.transport.base import (
    Endpoint,
    Limits,
    Program,
    Remote,
    Rights,
    Side,
    Staging,
    Ticket,
    Transport,
)
from syncline.transport.gloo import GlooTransport
from syncline.transport.host import endpoint
from syncline.transport.nccl import NcclTransport
from syncline.transport.shm import ShmTransport
from syncline.transport.sources import source_digests

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from syncline.transport.nccl_device import Device
    from tests.transport.world import World

JOB = "test"
FENCE = Fence(JOB, 1, 1, 7, 1)
LIMITS = Limits(deadline=30.0)


class Meeting:
    """One in-process store for each name."""

    def __init__(self) -> None:
        self._stores: dict[str, dist.HashStore] = {}
        self._mutex = threading.Lock()

    def __call__(self, name: str) -> dist.HashStore:
        with self._mutex:
            return self._stores.setdefault(name, dist.HashStore())


class Fabric:
    """All writers and readers of a world, linked, with compiled and bound programs.

    ``device`` makes, for ``nccl``, the device of a writer (True) or reader of some rank.
    """

    def __init__(
        self,
        kind: str,
        world: World,
        staging: Staging | None = None,
        device: Callable[[bool, int], Device] | None = None,
    ) -> None:
        self.kind, self.world = kind, world
        self.staging = staging or Staging()
        self._directory = tempfile.TemporaryDirectory(prefix="sl-")
        meeting = Meeting()
        self.writers: list[Transport] = []
        self.readers: list[Transport] = []
        for side, count in ((self.writers, len(world.writers)), (self.readers, len(world.readers))):
            for rank in range(count):
                if kind == "shm":
                    path = Path(self._directory.name) / f"{len(side)}.sock" if side is self.writers else None
                    side.append(ShmTransport(JOB, path))
                elif device is not None:
                    side.append(NcclTransport(JOB, meeting, device=device(side is self.writers, rank)))
                else:
                    side.append(GlooTransport(JOB, meeting))
                assert rank == len(side) - 1
        self.writer_ends = [self._endpoint(t, f"writer {r}") for r, t in enumerate(self.writers)]
        self.reader_ends = [self._endpoint(t, f"reader {r}") for r, t in enumerate(self.readers)]
        self.attempt = 0
        self.programs: list[Program] = []
        self.sources: dict[tuple[int, int], Program] = {}
        self.link_all()
        self.compile_all()

    @staticmethod
    def _endpoint(transport: Transport, name: str) -> Endpoint:
        return endpoint(JOB, name, transport.process_id, [transport])  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def fence(self) -> Fence:
        return FENCE.at(self.attempt)

    def tickets(self, rank: int) -> list[Ticket]:
        """Register a writer's region and export it."""
        writer, memory = self.writers[rank], self.world.writers[rank]
        registration = writer.register(memory.region, memory.fd)
        return [writer.export(registration, Rights.READ, self.fence)]

    def link_all(self) -> None:
        self.attempt += 1
        world = self.world
        self.to_writers: list[dict[int, Remote]] = [{} for _ in world.readers]
        self.to_readers: list[dict[int, Remote]] = [{} for _ in world.writers]
        with ThreadPoolExecutor(2 * len(world.readers) * len(world.writers)) as pool:
            for w in range(len(world.writers)):
                tickets = self.tickets(w)
                wire = Binding.from_wire(world.writers[w].binding.to_wire())
                for r in range(len(world.readers)):
                    theirs = None
                    if self.kind != "shm":
                        theirs = pool.submit(self.writers[w].link, self.reader_ends[r], tickets, 10.0)
                    link = self.readers[r].link(self.writer_ends[w], tickets, 10.0)
                    self.to_writers[r][w] = Remote(link, wire)
                    if theirs is not None:
                        self.to_readers[w][r] = Remote(theirs.result())

    def compile_all(self) -> None:
        made, world = self.world.plan, self.world
        self.programs = [
            t.compile(made, made.reader("serve", r), Side.DESTINATION, self.staging)
            for r, t in enumerate(self.readers)
        ]
        self.sources = {
            (w, 0): t.compile(made, made.writer(w, "serve"), Side.SOURCE, self.staging)
            for w, t in enumerate(self.writers)
        }
        self.bind_all()
        assert len(world.writers) == len(self.sources)

    def bind_all(self) -> None:
        for r, program in enumerate(self.programs):
            program.rebind(self.world.readers[r].binding, self.to_writers[r])
        for (w, _), program in self.sources.items():
            program.rebind(self.world.writers[w].binding, self.to_readers[w])

    def start(self, *, digest: bool = False, limits: Limits = LIMITS):
        """Start every half; return the readers' transfers and the writers'."""
        sent = [
            self.writers[w].start(p, self.fence, limits, digest=digest) for (w, _), p in self.sources.items()
        ]
        got = [
            t.start(p, self.fence, limits, digest=digest)
            for t, p in zip(self.readers, self.programs, strict=True)
        ]
        return got, sent

    def transfer(self, *, digest: bool = False, limits: Limits = LIMITS):
        got, sent = self.start(digest=digest, limits=limits)
        for transfer in [*got, *sent]:
            transfer.wait(30.0)
        return got, sent

    def piece_digests(self) -> dict[int, int]:
        """Digest every writer's pieces at the source; replicas must agree."""
        found: dict[int, int] = {}
        for w, memory in enumerate(self.world.writers):
            rows = self.world.plan.digest_rows(w)
            running = source_digests(self.world.plan, rows, memory.binding).start(LIMITS)
            running.wait(30.0)
            assert running.digests is not None
            for piece, value in zip(rows.piece.tolist(), running.digests.tolist(), strict=True):
                assert found.setdefault(piece, value) == value, "replicas differ"
        return found

    def check_digests(self, rank: int, digests: np.ndarray) -> None:
        """A reader's digests equal the reference, and the sum of the source's pieces."""
        hops = self.world.plan.reader("serve", rank)
        pieces = self.piece_digests()
        for h in range(len(hops)):
            dtype = name_of(int(hops.dst_dtype[h]))
            expected = self.world.digest(int(hops.tensor[h]), hops.offset[h], hops.size[h], dtype)
            assert int(digests[h]) == expected
            own = hops.piece[hops.piece_ptr[h] : hops.piece_ptr[h + 1]].tolist()
            assert sum(pieces[p] for p in own) % 2**64 == expected

    def close(self) -> None:
        for transport in [*self.readers, *self.writers]:
            transport.close(5.0)
        self.world.close()
        self._directory.cleanup()
