"""GPUs of one host, or two processes on one: readers open a writer's live device memory and gather from it.

As with shared memory the writer's half of a plan is empty: it exports segments, records an event after its
writes, and revokes; memory leaves only after its tickets are drained. A reader opens each segment once,
with its own device current, which is what makes a kernel's loads from it legal, and then one kernel a form
moves every fragment, casts and digests included, on a stream of the program's own.

Other users' and other jobs' processes are refused as in shared memory: handles travel in descriptors, to
peers that were let in.
"""

from __future__ import annotations

import os
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from syncline.errors import RevokedError, TransportError
from syncline.memory import cuda_driver as driver
from syncline.memory.region import Kind
from syncline.transport.base import Limits, Rights, Ticket
from syncline.transport.cuda_ipc_chunks import ChunkServer
from syncline.transport.cuda_ipc_link import CudaLink, LentEvent
from syncline.transport.cuda_ipc_memory import Description, describe
from syncline.transport.cuda_ipc_program import CudaProgram
from syncline.transport.cuda_ipc_sources import DeviceSourceDigests
from syncline.transport.segments import SegmentServer
from syncline.transport.shm import ShmTransport

if TYPE_CHECKING:
    from syncline.memory.cuda import DeviceSegments, Segment
    from syncline.memory.region import Region
    from syncline.plan import DigestRows, Hops, Plan
    from syncline.protocol.ids import Fence
    from syncline.transport import frames
    from syncline.transport.base import Endpoint, Program, Registration, Side, Staging
    from syncline.transport.clock import Deadline
    from syncline.transport.loop import Loop
    from syncline.transport.running import Running
    from syncline.transport.segments import _Peer, _Segment
    from syncline.transport.shm_link import ShmLink

NAME = "cuda_ipc"


class CudaIpcTransport(ShmTransport):
    """The `Transport` between GPUs of one host, and between processes that share one.

    Args:
        job: name of the job.
        socket: as in `ShmTransport`; None: a reader, which serves nothing.
        process_id: this process's `Endpoint.id`; made here if not given.
        device: index of the one device that this process computes on; None: the current one.
        segments: of this process's device, where its regions come from; None: a reader.
    """

    def __init__(
        self,
        job: str,
        socket: Path | None = None,
        process_id: str | None = None,
        device: int | None = None,
        segments: DeviceSegments | None = None,
    ) -> None:
        super().__init__(job, socket, process_id)
        if not torch.cuda.is_available():
            raise TransportError("no CUDA device in this process", expected="a GPU", found="none")
        self.device = torch.cuda.current_device() if device is None else device
        self._segments = segments
        self._event: LentEvent | None = None
        self._event_mutex = threading.Lock()

    @property
    def name(self) -> str:
        """``"cuda_ipc"``."""
        return NAME

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let readers that start from now on wait for the work of a stream so far: a version's last writes.

        Call it before the version is sealed, for every stream that wrote; it blocks nobody.

        Args:
            stream: None: the current one.
        """
        of = stream or torch.cuda.current_stream(self.device)
        with driver.current(self.device):
            self._written().record(of.cuda_stream)

    def hold(self, stream: int) -> None:
        """Let later work of a stream of this process (its raw handle) wait for all that was recorded."""
        if self._segments is not None:
            with driver.current(self.device):
                self._written().hold(stream)

    def digests(self, plan: Plan, rows: DigestRows) -> DeviceSourceDigests:
        """Return what digests rows of this process's device memory, after all that was recorded."""
        return DeviceSourceDigests(plan, rows, self.device, self.hold)

    def export(self, registration: Registration, rights: Rights, fence: Fence) -> Ticket:
        """Let peers of this user and job read a segment; see `Transport.export`."""
        region = registration.region
        if rights != Rights.READ:
            raise TransportError("device memory is handed out to be read", expected=Rights.READ, found=rights)
        if region.kind is not Kind.CUDA or self._segments is None:
            raise TransportError(
                "memory that is not this device's cannot be handed out",
                expected="a region of the `DeviceSegments` that the transport was made with",
                found=region,
            )
        with self._mutex:
            known = self._regions.get(region.id, (None, -1))[0]
            if known != region:
                raise RevokedError(
                    f"region {region.id} is not registered (any more)",
                    expected=f"generation {known.generation}" if known else "a registration",
                    found=f"generation {region.generation}",
                )
            self._segments.segment(region)
            self._written()
            self._serve().export(region, fence.epoch, -1)
        return Ticket(self.name, region.id, region.generation, region.nbytes, int(Rights.READ), fence)

    def compile(self, plan: Plan, hops: Hops, side: Side, staging: Staging | None = None) -> CudaProgram:
        """Lower a rank's rows to tables on the device; the source half is empty. Nothing is staged."""
        return CudaProgram(plan, hops, side, self.device)

    def start(
        self, program: Program, fence: Fence, limits: Limits | None = None, *, digest: bool = False
    ) -> Running:
        """Gather everything, after the work that is on the current stream now; see `Transport.start`."""
        if not isinstance(program, CudaProgram):
            raise TransportError(
                "a program of another transport", expected=self.name, found=type(program).__name__
            )
        return super().start(program, fence, limits, digest=digest)

    def close(self, deadline: float) -> None:
        """Cancel transfers, close everything, hand out nothing more."""
        super().close(deadline)
        with self._event_mutex, driver.current(self.device):
            event, self._event = self._event, None
            if event is not None:
                event.retire()

    def _written(self) -> LentEvent:
        with self._event_mutex:
            if self._event is None:
                with driver.current(self.device):
                    self._event = LentEvent()
            return self._event

    def _make_server(self, path: Path) -> SegmentServer:
        if self._segments is None:
            raise TransportError("this process serves no memory", expected="its segments", found="none")
        event = self._written().bytes
        return _HandleServer(path, self._job, self.process_id, self._loop, self._segments, event)

    def _make_link(self, peer: Endpoint, path: str, hello: frames.Hello, deadline: Deadline) -> ShmLink:
        return CudaLink(peer, path, hello, self._loop, deadline, self.device)


class _HandleServer(SegmentServer):
    """A segment server whose descriptors hold descriptions; made when asked for, so none are kept."""

    def __init__(
        self, path: Path, job: str, server_id: str, loop: Loop, segments: DeviceSegments, event: bytes
    ) -> None:
        self._source, self._event, self._watching = segments, event, loop
        self._chunks: ChunkServer | None = None
        self._chunk_path = Path(f"{path}.chunks")
        self._secrets: dict[bytes, Segment] = {}
        super().__init__(path, job, server_id, loop)

    def close(self) -> None:
        super().close()
        chunks, self._chunks = self._chunks, None
        if chunks is not None:
            chunks.close()

    def _keep(self, descriptor: int, region: Region) -> int:
        return -1

    def _describe(self, region: Region) -> Description:
        segment = self._source.segment(region)
        secret = b""
        if not segment.legacy:
            secret = next((s for s, known in self._secrets.items() if known == segment), b"")
            if not secret:
                secret = secrets.token_bytes(16)
                self._secrets[secret] = segment
            if self._chunks is None:
                self._chunks = ChunkServer(self._chunk_path, self._watching, self._pieces)
        return describe(segment, self._source.device, self._event, str(self._chunk_path), secret)

    def _hand_over(self, peer: _Peer, answer: frames.Segment, segment: _Segment) -> None:
        descriptor = self._describe(segment.region).to_descriptor()
        try:
            self._tell(peer, answer, descriptor)
        finally:
            os.close(descriptor)

    def _pieces(self, secret: bytes, first: int, count: int) -> list[int]:
        segment = self._secrets.get(secret)
        with self._changed:
            served = [one.region for one in self._segments.values()]
        if segment is None or segment.region not in served:
            raise RevokedError("no such virtual memory is handed out (any more)")
        self._source.segment(segment.region)
        with driver.current(self._source.device):
            return [driver.export_piece(p.address) for p in segment.pieces[first : first + count]]
