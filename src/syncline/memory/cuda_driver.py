"""The calls of the CUDA driver that torch does not offer: what an address is, what crosses processes.

Through ctypes, because the driver's library is wherever a GPU is, whatever toolkit torch was built for.
Every call works on the calling thread's current device: callers are within `current`. ``torch.cuda.device``
is not enough, since in a thread that has not computed yet it sets nothing.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from syncline.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Iterator

HANDLE_BYTES = 64
_ADDRESS = ctypes.c_ulonglong
_SIZE = ctypes.c_size_t
_POSIX_DESCRIPTOR = 1
_LAZY_PEER_ACCESS = 1
_EVENT_FLAGS = 0x2 | 0x4  # no timing, interprocess
_READ = 1
_DEVICE = 1
_GONE = {4: "the driver is shutting down", 201: "no context", 700: "an illegal address was accessed"}


class Attribute(IntEnum):
    """What can be asked of a pointer; the driver's numbers."""

    MEMORY_TYPE = 2
    BUFFER_ID = 7
    DEVICE_ORDINAL = 9
    LEGACY_IPC = 10
    HANDLE_TYPES = 14


class _Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char * HANDLE_BYTES)]


class _Access(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("device", ctypes.c_int), ("rights", ctypes.c_int)]


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportError(
            "no CUDA driver on this machine", expected="libcuda.so.1", found=error
        ) from error


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        found = text.value.decode() if text.value else f"error {code}"
        raise TransportError(f"the CUDA driver refused {name}", found=found, hint=_GONE.get(code))


@cache
def _context(device: int) -> int:
    """Return the device's primary context, the one that torch uses; kept for the life of the process."""
    found, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", ctypes.c_uint(0))
    _call("cuDeviceGet", ctypes.byref(found), ctypes.c_int(device))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), found)
    return context.value or 0


@contextmanager
def current(device: int) -> Iterator[None]:
    """Make a device this thread's current one within the block."""
    _call("cuCtxPushCurrent_v2", ctypes.c_void_p(_context(device)))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def address_range(address: int) -> tuple[int, int]:
    """Return first address and size of the allocation, or of the mapped piece, that an address lies in.

    Raises:
        TransportError: no CUDA memory is there (any more).
    """
    base, size = _ADDRESS(), _SIZE()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), _ADDRESS(address))
    return base.value, size.value


def attribute(address: int, which: Attribute) -> int:
    """Return an attribute of a pointer as a number."""
    value = ctypes.c_ulonglong(0)
    _call("cuPointerGetAttribute", ctypes.byref(value), ctypes.c_int(which), _ADDRESS(address))
    return value.value


def memory_handle(address: int) -> bytes:
    """Return the IPC handle of an ordinary allocation, by its first address."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), _ADDRESS(address))
    return bytes(handle)


def open_memory(handle: bytes) -> int:
    """Map another process's allocation; the current device must be the one whose kernels will read it."""
    address = _ADDRESS()
    flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _handle(handle), flags)
    return address.value


def close_memory(address: int) -> None:
    """Unmap what `open_memory` returned."""
    _call("cuIpcCloseMemHandle", _ADDRESS(address))


def export_piece(address: int) -> int:
    """Return a new descriptor of the physical memory mapped at an address (virtual memory management)."""
    handle, descriptor = _ADDRESS(), ctypes.c_int(-1)
    _call("cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(address))
    try:
        kind, flags = ctypes.c_int(_POSIX_DESCRIPTOR), _ADDRESS(0)
        _call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, kind, flags)
    finally:
        _call("cuMemRelease", handle)
    return descriptor.value


def reserve(nbytes: int) -> int:
    """Reserve a range of addresses of this process."""
    address = _ADDRESS()
    _call("cuMemAddressReserve", ctypes.byref(address), _SIZE(nbytes), _SIZE(0), _ADDRESS(0), _ADDRESS(0))
    return address.value


def map_piece(address: int, nbytes: int, descriptor: int) -> None:
    """Map another process's physical memory into a reserved range; the descriptor stays the caller's."""
    handle = _ADDRESS()
    kind = ctypes.c_int(_POSIX_DESCRIPTOR)
    _call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), kind)
    try:
        _call("cuMemMap", _ADDRESS(address), _SIZE(nbytes), _SIZE(0), handle, _ADDRESS(0))
    finally:
        _call("cuMemRelease", handle)  # the mapping keeps the memory


def allow_reads(address: int, nbytes: int, device: int) -> None:
    """Let a device read, and only read, a mapped range."""
    access = _Access(_DEVICE, device, _READ)
    _call("cuMemSetAccess", _ADDRESS(address), _SIZE(nbytes), ctypes.byref(access), _SIZE(1))


def unmap(address: int, nbytes: int) -> None:
    """Unmap a range of `map_piece`."""
    _call("cuMemUnmap", _ADDRESS(address), _SIZE(nbytes))


def free_reserved(address: int, nbytes: int) -> None:
    """Give a range of `reserve` back."""
    _call("cuMemAddressFree", _ADDRESS(address), _SIZE(nbytes))


def read_to_host(host: int, address: int, nbytes: int) -> None:
    """Copy device memory, a peer's included, to host memory; returns when it is there."""
    _call("cuMemcpyDtoH_v2", ctypes.c_void_p(host), _ADDRESS(address), _SIZE(nbytes))


class Event:
    """An event that other processes can wait for; torch's own crashes a process that waits on another device.

    Args:
        handle: of another process's event; None: a new one of the current device.
    """

    def __init__(self, handle: bytes | None = None) -> None:
        self._event = ctypes.c_void_p()
        if handle is None:
            _call("cuEventCreate", ctypes.byref(self._event), ctypes.c_uint(_EVENT_FLAGS))
        else:
            _call("cuIpcOpenEventHandle", ctypes.byref(self._event), _handle(handle))

    def handle(self) -> bytes:
        """Return what another process opens."""
        handle = _Handle()
        _call("cuIpcGetEventHandle", ctypes.byref(handle), self._event)
        return bytes(handle)

    def record(self, stream: int) -> None:
        """Let the event stand for all work of a stream so far."""
        _call("cuEventRecord", self._event, ctypes.c_void_p(stream))

    def hold(self, stream: int) -> None:
        """Let later work of a stream wait until what was recorded last, by any process, is done."""
        _call("cuStreamWaitEvent", ctypes.c_void_p(stream), self._event, ctypes.c_uint(0))

    def close(self) -> None:
        """Give it back; a second call does nothing."""
        event, self._event = self._event, ctypes.c_void_p()
        if event:
            _call("cuEventDestroy_v2", event)


def _handle(data: bytes) -> _Handle:
    if len(data) != HANDLE_BYTES:
        raise TransportError("not an IPC handle", expected=f"{HANDLE_BYTES} bytes", found=len(data))
    handle = _Handle()
    ctypes.memmove(ctypes.byref(handle), data, HANDLE_BYTES)
    return handle
