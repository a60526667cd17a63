"""A reader rank's half of a plan between GPUs: one kernel a form gathers from peers' live memory."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING

import numpy as np
import torch

from syncline.errors import TransportError
from syncline.faults import point
from syncline.kernels.device import DeviceSweep
from syncline.kernels.engine import Op
from syncline.kernels.lower_device import DeviceRuns
from syncline.memory import cuda_driver as driver
from syncline.transport.cuda_ipc_link import CudaLink
from syncline.transport.locate import Difference, first_difference
from syncline.transport.running import Running
from syncline.transport.shm_program import Bound, Hold, ShmProgram
from syncline.transport.tables import Table, tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from syncline.memory.binding import Binding
    from syncline.plan import Hops, Plan
    from syncline.transport.base import Limits, Remote, Side
    from syncline.transport.tables import Boxes
    from syncline.transport.work import Part


class CudaProgram(ShmProgram):
    """Compiled once; runs any number of times, one at a time, on a stream of its own.

    Args:
        device: whose kernels run; the destination's storages lie on it.
    """

    def __init__(self, plan: Plan, hops: Hops, side: Side, device: int) -> None:
        self._device = torch.device("cuda", device)
        super().__init__(plan, hops, side)

    @property
    def launches(self) -> int:
        """Kernels that one run launches, once bound."""
        return 0 if self._empty else self._sweep.launches

    @property
    def table_bytes(self) -> int:
        """Device memory beyond the weights, in bytes."""
        return 0 if self._empty else self._sweep.table_bytes

    def rebind(self, local: Binding, remote: Mapping[int, Remote]) -> None:
        """Point the program at where storages lie now; see `Program.rebind`."""
        wrong = next((r for r, end in remote.items() if not isinstance(end.link, CudaLink)), None)
        if wrong is not None and not self._empty:
            raise TransportError(
                "device memory needs a link of this transport",
                expected="cuda_ipc",
                found=type(remote[wrong].link).__name__,
                rank=f"writer {wrong}",
            )
        super().rebind(local, remote)

    def run(self, limits: Limits, *, digest: bool) -> Running:
        """Start one run, after the work that is on the current stream of the device now.

        Everything is queued by the caller's own thread; another one waits for the end.
        """
        if self._empty:
            return super().run(limits, digest=digest)
        with self._mutex:
            bound = self._ready()
            hold = Hold(bound.uses)
            self._busy = True
        peers = tuple(use.link.peer.name for use in bound.uses)
        launched = False
        try:
            point("cuda_ipc.before_first_byte")
            hold.check()
            with _named(peers):
                self._launch(hold, limits.sms, digest=digest)
            launched = True
            return Running("pull", self._body(hold, digest=digest), self.nbytes, self.hops, limits, peers)
        except BaseException as error:
            if launched:
                self._done.synchronize()
            self._rest(hold)
            if isinstance(error, RuntimeError):
                raise TransportError("no thread for a transfer", found=error) from error
            raise

    def tables(self, *, digest: bool) -> list[Table]:
        """Return the descriptor tables with host-side addresses; one set serves both kinds of run."""
        return self._made_tables

    def locate(self, hop: int) -> Difference | None:
        """Compare a hop's destination with its source, by copies in host memory; see `ShmProgram.locate`."""
        with self._mutex:
            bound = self._ready()
            hold = Hold(bound.uses)
        try:
            with driver.current(self._device.index):
                fetched = [_on_host(t, hop, bound) for t in self._made_tables]
            return first_difference(self._plan, self._hops, hop, [t for t, _ in fetched])
        finally:
            hold.release()

    def _compile(self, boxes: Boxes) -> None:
        self._made_tables = tables(boxes, positions=True)
        runs = [device_runs(t) for t in self._made_tables]
        self._sweep = DeviceSweep(runs, self.hops, self._device)
        self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.device(self._device):
            self._before, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._digests = _pinned(max(self.hops, 1))

    def _point(self, bound: Bound) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._sweep.bind(bound.src, bound.dst)

    def _made(self, *, digest: bool) -> list[Part]:
        return []

    def _body(self, hold: Hold, *, digest: bool) -> Callable[[Running], None]:
        """Return what waits for a run's end; nothing of it touches memory afterwards."""

        def body(running: Running) -> None:
            try:
                with _named(running.peers):
                    self._done.synchronize()
                point("cuda_ipc.after_last_byte")
                if digest:
                    running.digests = self._digests[: self.hops].numpy().view(np.uint64).copy()
            finally:
                self._rest(hold)
            hold.check()  # revoked while the last bytes came: they may be torn
            running.check()
            running.add(self.nbytes, self.hops)

        return body

    def _launch(self, hold: Hold, sms: int | None, *, digest: bool) -> None:
        """Queue everything on the program's own stream, and let its event stand for the end."""
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._before.record(current)
            self._stream.wait_event(self._before)
            for link in hold.links:
                if isinstance(link, CudaLink):
                    link.hold(self._stream.cuda_stream)
            got = self._sweep.run(Op.COPY_DIGEST if digest else Op.COPY, sms)
            if got is not None:
                self._digests[: self.hops].copy_(got, non_blocking=True)
            self._done.record(self._stream)


def _pinned(count: int) -> torch.Tensor:
    """Return int64[count] of host memory that a device copies to without a host's help."""
    return torch.empty(count, dtype=torch.int64, pin_memory=True)


@contextlib.contextmanager
def _named(peers: tuple[str, ...]) -> Iterator[None]:
    """Turn the device's errors into ours, with the peers that were read from."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(
            "the device failed while it gathered",
            found=str(error).splitlines()[0],
            rank=", ".join(peers),
            hint="a peer's memory may be gone; after an illegal access this process must be restarted",
        ) from error


def device_runs(table: Table) -> DeviceRuns:
    """Return a descriptor table as the device kernels take it."""
    return DeviceRuns(
        src_dtype=table.src_dtype if table.casts else "",
        dst_dtype=table.wire_dtype if table.casts else "",
        rows=table.rows,
        elems=table.elems,
        itemsize=table.itemsize.astype(np.int64),
        src_slot=table.src_slot,
        src=table.src_base,
        src_stride=table.src_stride,
        dst_slot=table.dst_slot,
        dst=table.dst_base,
        dst_stride=table.dst_stride,
        pos=table.position,
        pos_stride=table.position_stride,
        group=table.hop.astype(np.int64),
    )


def _on_host(table: Table, hop: int, bound: Bound) -> tuple[Table, list[NDArray[np.uint8]]]:
    """Return a table whose descriptors of one hop point at host copies, which the second value keeps."""
    out = copy.copy(table)
    out.src, out.dst = np.zeros_like(table.src_base), np.zeros_like(table.dst_base)
    kept: list[NDArray[np.uint8]] = []
    for i in np.flatnonzero(table.hop == hop).tolist():
        for side, address, base, stride, size in (
            (out.src, bound.src[table.src_slot[i]], table.src_base[i], table.src_stride[i], None),
            (out.dst, bound.dst[table.dst_slot[i]], table.dst_base[i], table.dst_stride[i], table.nbytes[i]),
        ):
            row = int(size) if size is not None else _source_row(table, i)
            reach = int(table.rows[i] - 1) * int(stride)
            first = int(address + base) + min(reach, 0)
            copied = np.empty(abs(reach) + row, np.uint8)
            driver.read_to_host(copied.ctypes.data, first, len(copied))
            kept.append(copied)
            side[i] = copied.ctypes.data - min(reach, 0)
    return out, kept


def _source_row(table: Table, i: int) -> int:
    if not table.casts:
        return int(table.nbytes[i])
    return int(table.elems[i]) * getattr(torch, table.src_dtype).itemsize
