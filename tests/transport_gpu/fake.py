"""A fake GPU, for tests of what surrounds the kernels: device memory is shared memory of the host.

Faked are the CUDA driver (allocations, IPC handles, virtual memory, events, contexts), `torch.cuda` as far as
it is used, and the sweeps, which run the CPU's kernels. Streams are threads with a queue, so that what is not
waited for is seen to be missing. Everything else is the product's own code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from syncline.adapters import module, trainer
from syncline.errors import DeadlineError, MemoryBudgetError, TransportError
from syncline.kernels import device as kernels
from syncline.kernels import host
from syncline.kernels.engine import Op, Sweep
from syncline.kernels.table import Table
from syncline.layout.dtype import itemsize
from syncline.memory import cuda_driver
from syncline.transport import cuda_ipc_program, cuda_ipc_sources
from syncline.transport.nccl_card import Card

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pytest

    from syncline.kernels.lower_device import DeviceRuns
    from syncline.transport.clock import Deadline

PAGE = 4096
_PROT_READ, _PROT_WRITE, _SHARED, _FIXED, _ANONYMOUS = 1, 2, 1, 0x10, 0x20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _map(nbytes: int, fd: int, prot: int, at: int = 0) -> int:
    flags = (_SHARED if fd >= 0 else _SHARED | _ANONYMOUS) | (_FIXED if at else 0)
    found = _libc.mmap(at, nbytes, prot, flags, fd, 0)
    assert found not in {None, ctypes.c_void_p(-1).value}, os.strerror(ctypes.get_errno())
    return found


@dataclass
class _Block:
    address: int
    nbytes: int
    fd: int
    identity: int
    legacy: bool
    descriptors: list[int] = field(default_factory=list)


class Driver:
    """The calls of ``libcuda`` that `syncline.memory.cuda_driver` makes, with their own arguments."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.depth = threading.local()
        self._mutex = threading.RLock()
        self._blocks: dict[int, _Block] = {}
        self._count = 0
        self._handles: dict[int, int] = {}

    # --- for tests

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return uint8[nbytes], a block of its own, as cudaMalloc makes it."""
        size = -(-nbytes // PAGE) * PAGE
        fd = self._memory(size)
        block = self._add(_map(size, fd, _PROT_READ | _PROT_WRITE), size, fd, legacy=True)
        return _tensor(block.address, nbytes)

    def virtual(self, sizes: Sequence[int], at: int = 0) -> int:
        """Map pieces of virtual memory behind each other, at a reserved address or a new one; return it."""
        start = at or _map(sum(sizes), -1, 0)
        here = start
        for size in sizes:
            fd = self._memory(size)
            _map(size, fd, _PROT_READ | _PROT_WRITE, here)
            self._add(here, size, fd, legacy=False)
            here += size
        return start

    def release(self, address: int, nbytes: int) -> None:
        """Free blocks in a range, leaving the addresses reserved."""
        with self._mutex:
            for block in [b for b in self._blocks.values() if address <= b.address < address + nbytes]:
                os.close(block.fd)
                del self._blocks[block.address]
                _map(block.nbytes, -1, 0, block.address)

    def holds(self, address: int) -> bool:
        """Whether an address is device memory."""
        return self._at(address) is not None

    def _memory(self, size: int) -> int:
        fd = os.memfd_create("fake-gpu")
        os.ftruncate(fd, size)
        return fd

    def _add(self, address: int, nbytes: int, fd: int, *, legacy: bool) -> _Block:
        with self._mutex:
            self._count += 1
            made = self._blocks[address] = _Block(address, nbytes, fd, self._count, legacy)
        return made

    def _at(self, address: int) -> _Block | None:
        with self._mutex:
            return next((b for b in self._blocks.values() if 0 <= address - b.address < b.nbytes), None)

    # --- contexts

    def cuInit(self, flags: Any) -> int:  # noqa: N802 - the driver's names, here and below
        return 0

    def cuDeviceGet(self, out: Any, ordinal: Any) -> int:  # noqa: N802
        out._obj.value = ordinal.value
        return 0

    def cuDevicePrimaryCtxRetain(self, out: Any, device: Any) -> int:  # noqa: N802
        out._obj.value = 100 + device.value
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self.depth.value = getattr(self.depth, "value", 0) + 1
        return 0

    def cuCtxPopCurrent_v2(self, out: Any) -> int:  # noqa: N802
        self.depth.value -= 1
        return 0

    def cuGetErrorName(self, code: int, out: Any) -> int:  # noqa: N802
        out._obj.value = f"FAKE_ERROR_{code}".encode()
        return 0

    def _current(self) -> bool:
        return getattr(self.depth, "value", 0) > 0

    # --- memory

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:  # noqa: N802
        block = self._at(address.value)
        if block is None or not self._current():
            return 1
        base._obj.value, size._obj.value = block.address, block.nbytes
        return 0

    def cuPointerGetAttribute(self, out: Any, which: Any, address: Any) -> int:  # noqa: N802
        block = self._at(address.value)
        if block is None or not self._current():
            return 1
        out._obj.value = {7: block.identity, 9: 0, 10: int(block.legacy), 14: 1}[which.value]
        return 0

    def cuIpcGetMemHandle(self, out: Any, address: Any) -> int:  # noqa: N802
        block = self._at(address.value)
        if block is None or not block.legacy or block.address != address.value:
            return 1
        raw = struct.pack("<qqq", os.getpid(), block.fd, block.nbytes).ljust(64, b"\0")
        ctypes.memmove(ctypes.addressof(out._obj), raw, 64)
        return 0

    def cuIpcOpenMemHandle_v2(self, out: Any, handle: Any, flags: Any) -> int:  # noqa: N802
        pid, number, nbytes = struct.unpack("<qqq", bytes(handle)[:24])
        if not self._current():
            return 201
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY)
        out._obj.value = _map(nbytes, fd, _PROT_READ)
        os.close(fd)
        self._handles[out._obj.value] = nbytes
        self.log.append(("open", nbytes))
        return 0

    def cuIpcCloseMemHandle(self, address: Any) -> int:  # noqa: N802
        nbytes = self._handles.pop(address.value)
        _libc.munmap(address.value, nbytes)
        self.log.append(("close", nbytes))
        return 0

    def cuMemRetainAllocationHandle(self, out: Any, address: Any) -> int:  # noqa: N802
        block = self._at(address.value)
        if block is None or block.legacy:
            return 1
        out._obj.value = block.fd
        return 0

    def cuMemExportToShareableHandle(self, out: Any, handle: Any, kind: Any, flags: Any) -> int:  # noqa: N802
        out._obj.value = os.dup(handle.value)
        return 0

    def cuMemRelease(self, handle: Any) -> int:  # noqa: N802
        if handle.value in self._handles:
            os.close(self._handles.pop(handle.value))
        return 0

    def cuMemAddressReserve(self, out: Any, size: Any, *rest: Any) -> int:  # noqa: N802
        out._obj.value = _map(size.value, -1, 0)
        return 0

    def cuMemImportFromShareableHandle(self, out: Any, descriptor: Any, kind: Any) -> int:  # noqa: N802
        out._obj.value = 1 << 40 | os.dup(descriptor.value)
        self._handles[out._obj.value] = out._obj.value & 0xFFFFFFFF
        return 0

    def cuMemMap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:  # noqa: N802
        _map(size.value, self._handles[handle.value], _PROT_READ, address.value)
        return 0

    def cuMemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> int:  # noqa: N802
        return 0

    def cuMemUnmap(self, address: Any, size: Any) -> int:  # noqa: N802
        _map(size.value, -1, 0, address.value)
        self.log.append(("unmap", size.value))
        return 0

    def cuMemAddressFree(self, address: Any, size: Any) -> int:  # noqa: N802
        _libc.munmap(address.value, size.value)
        return 0

    def cuMemcpyDtoH_v2(self, host: Any, address: Any, nbytes: Any) -> int:  # noqa: N802
        ctypes.memmove(host.value, address.value, nbytes.value)
        return 0

    # --- events: only that they are used in order is looked at; processes are ordered by the test

    def cuEventCreate(self, out: Any, flags: Any) -> int:  # noqa: N802
        with self._mutex:
            self._count += 1
            out._obj.value = self._count
        return 0

    def cuIpcGetEventHandle(self, out: Any, event: Any) -> int:  # noqa: N802
        ctypes.memmove(
            ctypes.addressof(out._obj), struct.pack("<qq", os.getpid(), event.value).ljust(64, b"e"), 64
        )
        return 0

    def cuIpcOpenEventHandle(self, out: Any, handle: Any) -> int:  # noqa: N802
        out._obj.value = struct.unpack("<qq", bytes(handle)[:16])[1]
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:  # noqa: N802
        self.log.append(("record", stream.value or 0))
        return 0

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: Any) -> int:  # noqa: N802
        self.log.append(("wait", stream.value or 0))
        return 0

    def cuEventDestroy_v2(self, event: Any) -> int:  # noqa: N802
        return 0


def _tensor(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


# --- streams and events


class Stream:
    """A queue of work with a thread of its own."""

    _count = 0

    def __init__(self, device: object = None) -> None:
        Stream._count += 1
        self.cuda_stream = Stream._count
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.errors: list[BaseException] = []
        threading.Thread(target=self._run, daemon=True, name=f"fake stream {self.cuda_stream}").start()

    def submit(self, work: Callable[[], None]) -> None:
        """Do ``work`` after all that was submitted before."""
        self._queue.put(work)

    def wait_event(self, event: Event) -> None:
        state = event.state
        if state is not None:
            self.submit(lambda: _hold(state))

    def synchronize(self) -> None:
        done = threading.Event()
        self.submit(done.set)
        _hold(done)
        if self.errors:
            raise RuntimeError(f"a fake kernel failed: {self.errors[0]}")

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)


def _hold(state: threading.Event) -> None:
    if not state.wait(60.0):
        raise RuntimeError("a fake stream waited for an event that never came")


class Event:
    """What was on a stream when it was recorded last."""

    def __init__(self, **_: object) -> None:
        self.state: threading.Event | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.state = threading.Event()
        (stream or current_stream()).submit(self.state.set)

    def query(self) -> bool:
        return self.state is None or self.state.is_set()

    def synchronize(self) -> None:
        if self.state is not None:
            _hold(self.state)


_here = threading.local()
_default = Stream()


def current_stream(device: object = None) -> Stream:
    """Return this thread's current stream."""
    return getattr(_here, "stream", _default)


@contextlib.contextmanager
def on(stream: Stream) -> Iterator[None]:
    """Make a stream this thread's current one."""
    before = current_stream()
    _here.stream = stream
    try:
        yield
    finally:
        _here.stream = before


# --- sweeps


class HostSweep:
    """`syncline.kernels.device.DeviceSweep` by the CPU's kernels."""

    def __init__(self, runs: Sequence[DeviceRuns], groups: int, device: object) -> None:
        self.runs, self.groups = [r for r in runs if len(r)], groups
        self.launches, self.table_bytes = len(self.runs), 0
        self._digests = np.zeros(max(groups, 1), np.uint64)
        self._bound: list[Table] = []

    def bind(self, src: np.ndarray, dst: np.ndarray) -> None:
        self._bound = [_table(r, src, dst) for r in self.runs]

    def run(self, op: Op, sms: int | None = None, *, again: bool = False) -> torch.Tensor | None:
        """Run in the caller's thread, once the current stream has come so far."""
        current_stream().synchronize()
        self._digests[:] = 0
        for table in self._bound:
            self._one(table, op)
        return None if op is Op.COPY else self._result()

    def begin(self, op: Op) -> None:
        """Start a run in sections."""
        current_stream().submit(lambda: self._digests.fill(0))

    def section(self, number: int, op: Op, sms: int | None = None) -> None:
        """Queue one section on the current stream."""
        tables = list(self._bound)

        def work() -> None:
            for runs, table in zip(self.runs, tables, strict=True):
                if runs.section is not None:
                    self._one(table.take(np.flatnonzero(runs.section == number)), op)

        current_stream().submit(work)

    def digests(self) -> np.ndarray:
        """Return what the sections added up to, once the current stream has come so far."""
        current_stream().synchronize()
        return self._digests[: self.groups].copy()

    def _one(self, table: Table, op: Op) -> None:
        got = Sweep(table, max(self.groups, 1)).run(op)
        assert got is not None
        self._digests += got

    def _result(self) -> torch.Tensor:
        return torch.from_numpy(self._digests[: self.groups].view(np.int64).copy())


def _table(runs: DeviceRuns, src: np.ndarray, dst: np.ndarray) -> Table:
    return Table(
        dst=dst[runs.dst_slot] + runs.dst,
        src=src[runs.src_slot] + runs.src,
        rows=runs.rows,
        elems=runs.elems,
        dst_stride=runs.dst_stride,
        src_stride=runs.src_stride,
        pos=runs.pos,
        pos_stride=runs.pos_stride,
        itemsize=runs.itemsize.astype(np.uint8),
        group=runs.group.astype(np.int32),
        dst_dtype=runs.dst_dtype,
        src_dtype=runs.src_dtype,
        src_itemsize=itemsize(runs.src_dtype) if runs.casts else 0,
    )


# --- a device for the two-sided transport


class FakeDevice:
    """`syncline.transport.nccl_device.Device` in host memory.

    Args:
        uuid: of the device; a new one if left out.
        version: of its NCCL.
        room: bytes that it has for buckets.
    """

    def __init__(self, uuid: str = "", version: int = 22703, room: int = 1 << 30) -> None:
        self.card = Card(device=uuid or os.urandom(8).hex(), version=version)
        self.room = room
        self.taken: list[int] = []

    def memory(self, nbytes: int, count: int) -> list[torch.Tensor]:
        if nbytes * count > self.room:
            raise MemoryBudgetError("no room for buckets", expected=nbytes * count, found=self.room)
        if nbytes > 16:
            self.taken += [nbytes] * count
        return [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count)]

    def sweep(self, runs: Sequence[DeviceRuns], groups: int) -> Any:
        return HostSweep(runs, groups, None)

    def stream(self, *, urgent: bool = False) -> Stream:
        return Stream()

    def event(self) -> Event:
        return Event()

    def current(self) -> Stream:
        return current_stream()

    def on(self, stream: Stream) -> Any:
        return on(stream)

    def name(self) -> bytes:
        return os.urandom(16)

    def communicator(self, name: bytes, rank: int, check: Callable[[], None], deadline: Deadline) -> Any:
        return SocketCommunicator(name, rank, check, deadline)


class SocketCommunicator:
    """Two ends of a Unix socket; what is queued runs on the streams."""

    def __init__(self, name: bytes, rank: int, check: Callable[[], None], deadline: Deadline) -> None:
        self.aborted = False
        self._error: BaseException | None = None
        address = b"\0fake-nccl-" + name.hex().encode()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if rank == 0:
            self._sock.bind(address)
            self._sock.listen(1)
            self._sock.settimeout(max(deadline.left, 0.01))
            listener, (self._sock, _) = self._sock, self._sock.accept()
            listener.close()
        else:
            while self._sock.connect_ex(address):
                check()
                if deadline.over:
                    raise DeadlineError("nobody came")
                time.sleep(0.01)
        self._sock.settimeout(None)

    def send(self, message: torch.Tensor, stream: Stream) -> None:
        stream.submit(lambda: self._do(lambda: self._sock.sendall(message.numpy().tobytes())))

    def receive(self, message: torch.Tensor, stream: Stream) -> None:
        def fill() -> None:
            view = memoryview(message.numpy())
            while view:
                got = self._sock.recv_into(view)
                if not got:
                    raise ConnectionError("the other end is gone")
                view = view[got:]

        stream.submit(lambda: self._do(fill))

    def check(self) -> None:
        if self._error is not None:
            raise TransportError("an operation failed", found=self._error)

    def abort(self) -> None:
        self.aborted = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            self._error = error


# --- putting it in place


def install(patch: pytest.MonkeyPatch) -> Driver:
    """Put the fake in place of the driver, of `torch.cuda`, and of the sweeps; return its driver."""
    driver = Driver()
    cuda_driver._context.cache_clear()
    patch.setattr(cuda_driver, "_driver", lambda: driver)
    nothing = contextlib.nullcontext
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda _device: None,
        "device": lambda _device: nothing(),
        "current_stream": current_stream,
        "stream": on,
        "Stream": Stream,
        "Event": Event,
        "get_device_properties": lambda _device: SimpleNamespace(uuid="fake-gpu", multi_processor_count=1),
    }.items():
        patch.setattr(torch.cuda, name, value)
    for where in (cuda_ipc_program, cuda_ipc_sources):
        patch.setattr(where, "DeviceSweep", HostSweep)
    patch.setattr(cuda_ipc_program, "_pinned", lambda count: torch.empty(count, dtype=torch.int64))

    def load(device: int, ops: object) -> None:
        host.load()  # the CPU's kernels stand for the device's, and take longer to compile than a pin lives
        driver.log.append(("load", device))

    patch.setattr(kernels, "load", load)

    def device_of(parts: Sequence[torch.Tensor], names: object, rank: object) -> torch.device:
        there = [driver.holds(p.data_ptr()) for p in parts if p.numel()]
        return torch.device("cuda", 0) if there and all(there) else torch.device("cpu")

    for adapter in (module, trainer):
        patch.setattr(adapter, "device_of", device_of)
    return driver


def placed(driver: Driver, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in fake device memory."""
    out = driver.allocate(max(tensor.nbytes, 1))[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return out.copy_(tensor)
