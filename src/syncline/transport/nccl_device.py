"""What the two-sided transport asks of a device: memory, streams, kernels, and a communicator of its own.

NCCL is called directly, through the library that torch has loaded. torch's own process group watches its
operations from a thread that ends the process when a peer dies: a trainer would die with its reader. Here a
communicator never blocks, is asked for errors, and is aborted from wherever the need is seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from syncline.errors import DeadlineError, MemoryBudgetError, TransportError
from syncline.kernels.device import DeviceSweep
from syncline.memory import cuda_driver as driver
from syncline.transport.cuda_ipc_memory import uuid
from syncline.transport.nccl_card import Card

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from syncline.kernels.lower_device import DeviceRuns
    from syncline.transport.clock import Deadline

UID_BYTES = 128
_BYTE = 1  # ncclUint8
_IN_PROGRESS = 7
_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21400  # the first version of the configuration: `blocking` alone
_NAP = 50e-6
_CONNECT_SECONDS = 30.0


class Communicator(Protocol):
    """Two ranks that send to each other, in the order of each side's calls."""

    def send(self, message: torch.Tensor, stream: Any) -> None:
        """Queue uint8[n] on a stream; it must stay as it is until the stream has come so far."""
        ...

    def receive(self, message: torch.Tensor, stream: Any) -> None:
        """Queue the filling of uint8[n] on a stream."""
        ...

    def check(self) -> None:
        """Raise what went wrong in what was queued, if anything has been heard of it."""
        ...

    def abort(self) -> None:
        """End it: what is queued returns soon, done or not. A second call does nothing."""
        ...


class Device(Protocol):
    """One device. Streams and events are torch's, or work alike."""

    @property
    def card(self) -> Card:
        """What peers must know of it."""
        ...

    def memory(self, nbytes: int, count: int) -> list[torch.Tensor]:
        """Return ``count`` buffers of uint8[nbytes].

        Raises:
            MemoryBudgetError: the device has no room for them.
        """
        ...

    def sweep(self, runs: Sequence[DeviceRuns], groups: int) -> DeviceSweep:
        """Return what packs, or unpacks, in sections."""
        ...

    def stream(self, *, urgent: bool = False) -> Any:
        """Return a new stream; the work of an urgent one goes first."""
        ...

    def event(self) -> Any:
        """Return a new event."""
        ...

    def current(self) -> Any:
        """Return the calling thread's current stream."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Make a stream the calling thread's current one."""
        ...

    def name(self) -> bytes:
        """Return what the two ends of a new communicator must both know; one of them calls this."""
        ...

    def communicator(
        self, name: bytes, rank: int, check: Callable[[], None], deadline: Deadline
    ) -> Communicator:
        """Meet the peer; ``check`` is called meanwhile, and raises if there is no point in waiting.

        Raises:
            DeadlineError: it did not come.
        """
        ...


class CudaDevice:
    """A GPU; satisfies `Device`.

    Args:
        index: of the device.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._device = torch.device("cuda", index)

    @property
    def card(self) -> Card:
        """What peers must know of it."""
        return card(self.index)

    def memory(self, nbytes: int, count: int) -> list[torch.Tensor]:
        """Return buffers; see `Device.memory`."""
        try:
            return [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(count)]
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self._device)
            raise MemoryBudgetError(
                f"no room for {count} buckets of {nbytes} bytes on device {self.index}",
                expected=f"{count * nbytes} bytes",
                found=f"{free} of {total} bytes free",
                hint="leave the device some memory, or send in smaller buckets (Staging.bucket)",
            ) from error

    def sweep(self, runs: Sequence[DeviceRuns], groups: int) -> DeviceSweep:
        """Return what packs, or unpacks."""
        return DeviceSweep(runs, groups, self._device)

    def stream(self, *, urgent: bool = False) -> torch.cuda.Stream:
        """Return a new stream."""
        return torch.cuda.Stream(self._device, priority=-1 if urgent else 0)

    def event(self) -> torch.cuda.Event:
        """Return a new event."""
        return torch.cuda.Event()

    def current(self) -> torch.cuda.Stream:
        """Return the calling thread's current stream."""
        return torch.cuda.current_stream(self._device)

    @contextlib.contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Make a stream, and its device, current."""
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield

    def name(self) -> bytes:
        """Return a new unique id of NCCL."""
        made = _Uid()
        _check(_nccl().ncclGetUniqueId(ctypes.byref(made)), "ncclGetUniqueId")
        return bytes(made)

    def communicator(
        self, name: bytes, rank: int, check: Callable[[], None], deadline: Deadline
    ) -> NcclCommunicator:
        """Meet the peer; see `Device.communicator`."""
        return NcclCommunicator(self.index, name, rank, check, deadline)


class NcclCommunicator:
    """A communicator of two ranks that nobody else knows; satisfies `Communicator`.

    One thread at a time, but for `abort`.
    """

    def __init__(
        self, device: int, name: bytes, rank: int, check: Callable[[], None], deadline: Deadline
    ) -> None:
        self._device, self._peer, self._alive = device, 1 - rank, check
        self._comm = ctypes.c_void_p()
        self._aborted = False
        uid = _Uid.from_buffer_copy(name.ljust(UID_BYTES, b"\0")[:UID_BYTES])
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, 0)
        try:
            with self._current():
                made = ctypes.byref(self._comm), 2, uid, rank, ctypes.byref(config)
                _check(_nccl().ncclCommInitRankConfig(*made), "ncclCommInitRankConfig", _IN_PROGRESS)
            self._settle("meet the peer over NCCL", deadline.left)
        except BaseException:
            self.abort()
            raise

    def send(self, message: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Queue uint8[n] on a stream."""
        self._move(_nccl().ncclSend, message, stream)

    def receive(self, message: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Queue the filling of uint8[n] on a stream."""
        self._move(_nccl().ncclRecv, message, stream)

    def check(self) -> None:
        """Raise what went wrong in what was queued."""
        if self._aborted:
            raise TransportError("the communicator was aborted")
        state = ctypes.c_int()
        _check(_nccl().ncclCommGetAsyncError(self._comm, ctypes.byref(state)), "ncclCommGetAsyncError")
        _check(state.value, "an operation of NCCL", _IN_PROGRESS)

    def abort(self) -> None:
        """End it; its kernels return soon, done or not."""
        comm, aborted, self._aborted = self._comm, self._aborted, True
        if comm.value and not aborted:
            with contextlib.suppress(TransportError), self._current():  # the context may be lost
                _nccl().ncclCommAbort(comm)

    def _move(self, call: Any, message: torch.Tensor, stream: torch.cuda.Stream) -> None:
        if self._aborted:
            raise TransportError("the communicator was aborted")
        with self._current():
            code = call(
                ctypes.c_void_p(message.data_ptr()),
                ctypes.c_size_t(message.numel()),
                _BYTE,
                self._peer,
                self._comm,
                ctypes.c_void_p(stream.cuda_stream),
            )
            _check(code, call.__name__, _IN_PROGRESS)
        if code == _IN_PROGRESS:  # the first message makes connections
            self._settle("connect over NCCL", _CONNECT_SECONDS)

    def _settle(self, what: str, seconds: float) -> None:
        """Wait until the last call has done what it does on the host."""
        until = time.monotonic() + seconds
        state = ctypes.c_int(_IN_PROGRESS)
        while True:
            code = _nccl().ncclCommGetAsyncError(self._comm, ctypes.byref(state))
            _check(code, "ncclCommGetAsyncError")
            if state.value != _IN_PROGRESS:
                _check(state.value, what)
                return
            if self._aborted:
                raise TransportError("the communicator was aborted")
            self._alive()
            if time.monotonic() > until:
                raise DeadlineError(f"could not {what} in time", hint="is the peer alive, and as far?")
            time.sleep(_NAP)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        with driver.current(self._device), torch.cuda.device(self._device):
            yield


class _Uid(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_ubyte * UID_BYTES)]


class _Config(ctypes.Structure):
    """The beginning of ``ncclConfig_t``, as version 2.14 made it; later versions accept it as such."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


@cache
def _nccl() -> Any:
    """Return the NCCL that torch has loaded.

    Raises:
        TransportError: there is none.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise TransportError(
            "NCCL is missing", expected="libnccl.so.2, as torch for CUDA brings it", found=error
        ) from error
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetErrorString.argtypes = [number]
    library.ncclCommInitRankConfig.argtypes = [pointer, number, _Uid, number, pointer]
    library.ncclSend.argtypes = [pointer, size, number, number, pointer, pointer]
    library.ncclRecv.argtypes = [pointer, size, number, number, pointer, pointer]
    library.ncclCommGetAsyncError.argtypes = [pointer, pointer]
    library.ncclCommAbort.argtypes = [pointer]
    return library


def _check(code: int, what: str, *allowed: int) -> None:
    if code and code not in allowed:
        text = _nccl().ncclGetErrorString(code)
        raise TransportError(f"NCCL failed: {what}", found=text.decode() if text else f"error {code}")


@cache
def card(index: int) -> Card:
    """Return what peers must know of a device of this process."""
    count = torch.cuda.device_count()
    others = [n for n in range(count) if n != index]
    apart = [uuid(n) for n in others if not torch.cuda.can_device_access_peer(index, n)]
    return Card(device=uuid(index), version=_version(), apart=apart)


def _version() -> int:
    version = ctypes.c_int()
    try:
        _check(_nccl().ncclGetVersion(ctypes.byref(version)), "ncclGetVersion")
    except TransportError:
        return 0
    return version.value
