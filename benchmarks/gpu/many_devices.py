"""One rank's GPU, real or faked: memory, and the transports over it. All else is the same program of work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from benchmarks.gpu import clock
from benchmarks.gpu.messages import meeting
from syncline.memory.cuda import DeviceSegments
from syncline.transport.cuda_ipc import CudaIpcTransport
from syncline.transport.nccl import BUCKET, NcclTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncline.transport.nccl_device import Device

JOB = "many"


class Gpu(Protocol):
    """What a rank needs of its GPU.

    Attributes:
        index: what this process calls it; device: for tensors.
        bucket: bytes of a bucket of messages.
    """

    index: int
    device: torch.device
    bucket: int

    def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return uint8 storages."""
        ...

    def nccl(self) -> int | Device:
        """Return the device that the two-sided transport takes."""
        ...

    def idle(self) -> None:
        """Wait until it does nothing."""
        ...

    def empty(self) -> None:
        """Give freed memory back."""
        ...


class RealGpu:
    """A GPU of this host."""

    bucket = BUCKET

    def __init__(self, gpu: int) -> None:
        torch.cuda.set_device(gpu)
        self.index, self.device = gpu, torch.device("cuda", gpu)

    def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return uint8 storages."""
        return [torch.empty(n, dtype=torch.uint8, device=self.device) for n in sizes]

    def nccl(self) -> int:
        """Return its index."""
        return self.index

    def idle(self) -> None:
        """Wait until it does nothing."""
        torch.cuda.synchronize(self.device)

    def empty(self) -> None:
        """Give the allocator's free memory back."""
        torch.cuda.empty_cache()


class Transports:
    """A rank's two transports, new for each case.

    Args:
        directory: of sockets and meetings.
        name: of the rank, for the socket; serves: whether it hands memory out.
    """

    def __init__(self, gpu: Gpu, directory: str, name: str, *, serves: bool) -> None:
        self.segments = DeviceSegments(gpu.index) if serves else None
        socket = Path(directory) / f"{name}.sock" if serves else None
        self.cuda_ipc = CudaIpcTransport(JOB, socket, device=gpu.index, segments=self.segments)
        after: Callable[[int], None] | None = self.cuda_ipc.hold if serves else None
        self.nccl = NcclTransport(
            JOB, meeting(directory), self.cuda_ipc.process_id, device=gpu.nccl(), after=after
        )

    def close(self) -> None:
        """Close both."""
        self.nccl.close(5.0)
        self.cuda_ipc.close(5.0)


def free() -> list[int]:
    """Return every GPU's free bytes."""
    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]


def median_copy(dst: torch.Tensor, src: torch.Tensor) -> float:
    """Return the median seconds of one large copy."""
    return clock.median(lambda: dst.copy_(src), 5)
