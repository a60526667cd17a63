"""How a segment of device memory goes from one process to another: described, opened, closed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from syncline.errors import TransportError
from syncline.memory import cuda_driver as driver
from syncline.transport.cuda_ipc_chunks import Chunks

if TYPE_CHECKING:
    from syncline.memory.cuda import Segment

_MAX_BYTES = 1 << 20
_SECONDS = 20.0


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader needs to open a segment. Travels in a descriptor, so only to the peer that was let in.

    Attributes:
        pid: the owner's process; a reader in the same process uses the address itself.
        address: of the segment there.
        nbytes: of the segment.
        device: UUID of its device.
        event: IPC handle of the event that its writes are recorded in.
        handle: IPC handle of an ordinary allocation; empty for virtual memory.
        sizes: bytes of each piece of virtual memory; empty for an ordinary allocation.
        chunks: path at which the pieces' descriptors are handed out.
        secret: what to ask for there.
    """

    pid: int
    address: int
    nbytes: int
    device: str
    event: bytes
    handle: bytes = b""
    sizes: list[int] = []
    chunks: str = ""
    secret: bytes = b""

    def to_descriptor(self) -> int:
        """Return a new descriptor that `from_descriptor` reads."""
        descriptor = os.memfd_create("syncline-segment", os.MFD_CLOEXEC)
        os.write(descriptor, msgspec.msgpack.encode(self))
        return descriptor

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Description:
        """Decode `to_descriptor`.

        Raises:
            TransportError: something else.
        """
        try:
            return msgspec.msgpack.decode(os.pread(descriptor, _MAX_BYTES, 0), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise TransportError("not the description of a segment of device memory", found=error) from error


def describe(segment: Segment, device: int, event: bytes, chunks: str, secret: bytes) -> Description:
    """Describe a segment of this process.

    Raises:
        TransportError: the driver hands such memory out in no way.
    """
    region = segment.region
    common = {
        "pid": os.getpid(),
        "address": region.ptr,
        "nbytes": region.nbytes,
        "device": uuid(device),
        "event": event,
    }
    with driver.current(device):
        if segment.legacy:
            return Description(**common, handle=driver.memory_handle(region.ptr))
        if not driver.attribute(region.ptr, driver.Attribute.HANDLE_TYPES) & 1:
            raise TransportError(
                "this virtual memory was made to stay in its process",
                expected="memory that can be exported as POSIX descriptors",
                found=region,
                hint="make the allocator request them (CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)",
            )
    return Description(**common, sizes=[p.nbytes for p in segment.pieces], chunks=chunks, secret=secret)


def uuid(device: int) -> str:
    """Return a device's UUID, the same in every process whatever it calls the device."""
    return str(torch.cuda.get_device_properties(device).uuid)


class OpenedSegment:
    """Another process's segment, readable by kernels of ``device``, until `close`."""

    def __init__(self, description: Description, device: int) -> None:
        self.device = device
        self._nbytes = description.nbytes
        self._mapped: list[tuple[int, int]] = []
        self._own = description.pid == os.getpid()
        self._virtual = bool(description.sizes)
        self._address = description.address
        if self._own:
            return
        with driver.current(device):
            if self._virtual:
                self._map(description)
            else:
                self._address = driver.open_memory(description.handle)

    @property
    def address(self) -> int:
        """Address of the first byte, for kernels of the device it was opened for."""
        if not self._address:
            raise TransportError("the segment is no longer open")
        return self._address

    def close(self) -> None:
        """Unmap it; nothing may read it any more. A second call does nothing."""
        address, self._address = self._address, 0
        if not address or self._own:
            return
        with contextlib.suppress(TransportError), driver.current(self.device):  # the context may be lost
            if self._virtual:
                self._unmap(address)
            else:
                driver.close_memory(address)

    def _map(self, description: Description) -> None:
        if sum(description.sizes) != description.nbytes:
            raise TransportError(
                "a segment that lies about its size",
                expected=description.nbytes,
                found=sum(description.sizes),
            )
        self._address = driver.reserve(self._nbytes)
        chunks = Chunks(Path(description.chunks), _SECONDS)
        try:
            at = self._address
            for size, descriptor in zip(
                description.sizes, chunks.fetch(description.secret, len(description.sizes)), strict=True
            ):
                driver.map_piece(at, size, descriptor)
                self._mapped.append((at, size))
                at += size
            driver.allow_reads(self._address, self._nbytes, self.device)
        except BaseException:
            self._unmap(self._address)
            self._address = 0
            raise
        finally:
            chunks.close()

    def _unmap(self, address: int) -> None:
        mapped, self._mapped = self._mapped, []
        for at, size in mapped:
            driver.unmap(at, size)
        driver.free_reserved(address, self._nbytes)
