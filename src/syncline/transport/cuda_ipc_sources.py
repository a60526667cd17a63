"""Digests of storages on a device: a writer's of its pieces, a reader's of what stands in its memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from syncline.errors import TransportError
from syncline.faults import point
from syncline.kernels.device import DeviceSweep
from syncline.kernels.engine import Op
from syncline.plan.lower import Stream
from syncline.transport.base import Limits
from syncline.transport.cuda_ipc_program import device_runs
from syncline.transport.running import Running
from syncline.transport.tables import Boxes, Place, slots_of, tables

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncline.memory.binding import Binding
    from syncline.plan import DigestRows, Plan


class DeviceSourceDigests:
    """As `syncline.transport.sources.SourceDigests`, on a device.

    Args:
        plan: the plan.
        rows: the boxes to digest, in their wire dtype.
        device: index of the device that they lie on.
        after: makes a stream, given its raw handle, wait for the last writes to that memory; None: what is
            on the current stream when a run starts is waited for.
    """

    def __init__(
        self,
        plan: Plan,
        rows: DigestRows,
        device: int,
        after: Callable[[int], None] | None = None,
    ) -> None:
        self.rows, self.nbytes = len(rows), int(rows.nbytes.sum())
        self._device, self._after = torch.device("cuda", device), after
        stream = rows.source_stream()
        nobody = np.zeros(len(rows), np.int64)
        slot, self._slots = slots_of(nobody, rows.src_storage, rows.size, stream)
        position = Stream.of_positions(rows.offset, plan.global_shape[rows.tensor])
        number = np.arange(len(rows))
        boxes = Boxes(number, rows.size, position, stream, None, rows.src_dtype, rows.dtype, slot, nobody)
        runs = [device_runs(table) for table in tables(boxes, positions=True)]
        self._sweep = DeviceSweep(runs, self.rows, self._device)
        self._stream = torch.cuda.Stream(self._device)
        self._mutex = threading.Lock()
        self._bound = self._busy = False

    def rebind(self, local: Binding) -> None:
        """Point the program at where this process's storages lie now.

        Raises:
            TransportError: it is running, or a range falls outside its region.
        """
        with self._mutex:
            self._rest()
            address = self._slots.resolve(dict.fromkeys(self._slots.ranks, Place.local(local)), "local rank")
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._sweep.bind(address, address[:1] if len(address) else np.zeros(1, np.int64))
            self._bound = True

    def start(self, limits: Limits | None = None) -> Running:
        """Digest everything, in a thread of its own, on a stream of its own."""
        with self._mutex:
            self._rest()
            if not self._bound:
                raise TransportError("the program is not bound to any addresses", hint="call rebind first")
            self._busy = True
        wait = self._after or _current(self._device)

        def body(running: Running) -> None:
            point("digest.before_source")
            try:
                with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                    wait(self._stream.cuda_stream)
                    got = self._sweep.run(Op.DIGEST, running.limits.sms)
                    digests = np.zeros(0, np.uint64) if got is None else got.cpu().numpy().view(np.uint64)
            finally:
                with self._mutex:
                    self._busy = False
            running.check()
            running.add(self.nbytes, self.rows)
            running.digests = digests.copy()

        return Running("digest of the source", body, self.nbytes, self.rows, limits or Limits())

    def _rest(self) -> None:
        if self._busy:
            raise TransportError("the program is running", hint="wait for its transfer, or cancel it")


def _current(device: torch.device) -> Callable[[int], None]:
    """Return what makes a stream wait for the work that is on the device's current one now."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))

    def wait(_stream: int) -> None:
        torch.cuda.current_stream(device).wait_event(event)

    return wait
