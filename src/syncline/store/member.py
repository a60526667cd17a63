"""One process of a job: its run directory, its way to the MetaServer, its transports, its endpoint."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import msgspec
import torch

from syncline.errors import ProtocolError, TransportError
from syncline.kernels import host
from syncline.memory import Kind
from syncline.meta import JobDir, MetaClient, MetaServer
from syncline.options import Options
from syncline.store.plans import PlanBook
from syncline.transport.host import endpoint, host_id, new_id
from syncline.transport.shm import ShmTransport
from syncline.transport.sources import SourceDigests

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from syncline.kernels.engine import Op
    from syncline.layout import Manifest
    from syncline.memory import Region
    from syncline.memory.cuda import DeviceSegments
    from syncline.plan import DigestRows, Plan
    from syncline.protocol.ids import Fence
    from syncline.protocol.messages import Message
    from syncline.transport.base import Endpoint, Transport
    from syncline.transport.cuda_ipc import CudaIpcTransport
    from syncline.transport.cuda_ipc_sources import DeviceSourceDigests

logger = logging.getLogger(__name__)

_FAREWELL = 2.0  # seconds for each thing that is put away at the end
_MEET_SECONDS = 60.0
_INTERFACE = "127.0.0.1"


class Member:
    """What every face of the store stands on. Closing it leaves nothing behind.

    Args:
        job: the job's name; trainers and engines of one job use the same.
        name: who this process is, in messages: ``"writer 0"``.
        options: deadlines and bounds; from the environment if left out.
        serve: run the job's MetaServer in this process, unless the job has a live one.
        exports: whether peers may map memory of this process.
        progress: running count of bytes moved, for heartbeats.
        device: index of the CUDA device that this process's weights lie on; None: host memory.
        segments: of that device, for a process that exports.

    Attributes:
        serves: whether the job's MetaServer runs in this process.
        cuda_ipc: the transport for device memory; None without ``device``.
    """

    def __init__(
        self,
        job: str,
        name: str,
        options: Options | None = None,
        *,
        serve: bool = False,
        exports: bool = False,
        progress: Callable[[], int] | None = None,
        device: int | None = None,
        segments: DeviceSegments | None = None,
    ) -> None:
        self.job, self.name, self.device = job, name, device
        self.options = options or Options.from_environment()
        self.process_id = new_id()
        self.serves = False
        self.cuda_ipc: CudaIpcTransport | None = None
        with contextlib.ExitStack() as opening:
            self.directory = JobDir.create(job)
            if serve:
                self._start_server(opening)
            hold = self.directory.hold_sockets()
            opening.callback(hold.release)
            path = hold.path(f"{self.process_id}.shm") if exports else None
            self.shm = ShmTransport(job, path, self.process_id)
            opening.callback(self.shm.close, _FAREWELL)
            if device is not None:
                path = hold.path(f"{self.process_id}.cuda") if exports else None
                self.cuda_ipc = _cuda_ipc(job, path, self.process_id, device, segments)
                opening.callback(self.cuda_ipc.close, _FAREWELL)
            self.client = MetaClient(job, self.options, progress=progress)
            self._closing = opening.pop_all()
        self._reason = ""

    @cached_property
    def gloo(self) -> Transport:
        """The two-sided transport; made when a plan first needs it."""
        from syncline.transport.gloo import GlooTransport  # noqa: PLC0415 - torch.distributed, only if needed

        made = GlooTransport(self.job, self._meet, self.process_id, _INTERFACE)
        self._closing.callback(made.close, _FAREWELL)
        return made

    @cached_property
    def nccl(self) -> Transport:
        """The two-sided transport of devices; made when a plan first needs it."""
        from syncline.transport.nccl import NcclTransport  # noqa: PLC0415 - only where there are devices

        device = self._on_device("nccl")
        after = self.cuda_ipc.hold if self.cuda_ipc is not None else None
        made = NcclTransport(self.job, self._meet, self.process_id, _INTERFACE, device=device, after=after)
        self._closing.callback(made.close, _FAREWELL)
        return made

    @cached_property
    def endpoint(self) -> Endpoint:
        """Where peers meet this process."""
        own = [self.shm] if self.cuda_ipc is None else [self.shm, self.cuda_ipc]
        found = endpoint(self.job, self.name, self.process_id, own)
        addresses = found.addresses | {"gloo": _INTERFACE}
        if self.device is not None:
            from syncline.transport.nccl_device import card  # noqa: PLC0415 - as above

            addresses["nccl"] = card(self.device).encode()
        return msgspec.structs.replace(found, addresses=addresses)

    @property
    def host(self) -> str:
        """Name of this host, as the planner compares it."""
        return host_id()

    def transport(self, name: str) -> Transport:
        """Return a transport of this process by name."""
        if name == "cuda_ipc" and self.cuda_ipc is not None:
            return self.cuda_ipc
        if name not in {"shm", "gloo", "cuda_ipc", "nccl"}:
            raise TransportError("no such transport", expected="shm, gloo, cuda_ipc or nccl", found=name)
        self._on_device(name)
        return getattr(self, name)

    def exporter(self, region: Region) -> ShmTransport:
        """Return the transport by which a region of this process is handed out."""
        if region.kind is Kind.CUDA and self.cuda_ipc is not None:
            return self.cuda_ipc
        return self.shm

    def digests(self, plan: Plan, rows: DigestRows) -> SourceDigests | DeviceSourceDigests:
        """Return what digests rows of this process's own memory."""
        return SourceDigests(plan, rows) if self.cuda_ipc is None else self.cuda_ipc.digests(plan, rows)

    def written(self) -> None:
        """Let readers, and digests, of device memory wait for the work on the caller's current stream."""
        if self.cuda_ipc is not None:
            self.cuda_ipc.record()

    def compiled(self, *ops: Op) -> None:
        """Compile what transfers and digests run, before there is one whose progress is watched."""
        if self.device is None:
            host.load()
        else:
            from syncline.kernels import device as kernels  # noqa: PLC0415 - Triton, only where there are GPUs

            kernels.load(self.device, ops)

    def use_device(self) -> None:
        """Make the member's device the calling thread's current one: threads begin on device 0."""
        if self.device is not None:
            torch.cuda.set_device(self.device)

    def ask(self, request: Message, deadline: float | None = None) -> Any:
        """Send a request to the MetaServer and return its answer; see `MetaClient.request`."""
        return self.client.request(request, deadline)

    def plans(self, fence: Fence) -> PlanBook:
        """Return a book of plans that fetches manifests as this member."""
        return PlanBook(lambda fingerprint: self._manifest(fence, fingerprint))

    def fail(self, error: BaseException) -> None:
        """Remember why this process leaves: it is told to whoever waits for it."""
        self._reason = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Take leave, and free threads, sockets, mappings; again, do nothing."""
        self.client.close(self._reason)
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def _on_device(self, transport: str) -> int:
        if self.device is None and transport in {"cuda_ipc", "nccl"}:
            raise TransportError(
                f"the transport {transport!r} moves device memory",
                expected="weights on a GPU",
                found="weights in host memory",
                rank=self.name,
            )
        return -1 if self.device is None else self.device

    def _manifest(self, fence: Fence, fingerprint: bytes) -> Manifest:
        return self.client.get_manifest(fence, fingerprint)

    def _start_server(self, opening: contextlib.ExitStack) -> None:
        server = MetaServer(self.job, options=self.options)
        try:
            server.start()
        except ProtocolError:
            logger.info("job %s has a MetaServer already; using that one", self.job)
            return
        opening.callback(server.stop)
        self.serves = True

    def _meet(self, name: str) -> Any:
        """Return a store in which two processes of this host find each other under a name that both know."""
        from torch._C._distributed_c10d import FileStore  # noqa: PLC0415 - only for two-sided transports

        place = self.directory.path / "meet"
        place.mkdir(mode=0o700, exist_ok=True)
        store = FileStore(str(place / hashlib.blake2b(name.encode(), digest_size=16).hexdigest()), 2)
        store.set_timeout(timedelta(seconds=_MEET_SECONDS))
        return store


def _cuda_ipc(
    job: str, path: Path | None, process_id: str, device: int, segments: DeviceSegments | None
) -> CudaIpcTransport:
    from syncline.transport.cuda_ipc import CudaIpcTransport  # noqa: PLC0415 - only where there are devices

    return CudaIpcTransport(job, path, process_id, device, segments)
