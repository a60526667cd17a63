"""One transfer with one peer over NCCL: pack by kernel and send, receive and unpack by kernel.

Everything is queued on two streams of the device, one that copies and one that moves, which wait for each
other by events: bucket k+1 is packed while bucket k is sent. The host only looks how far they came.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from syncline.errors import TransportError
from syncline.faults import point
from syncline.kernels.engine import Op
from syncline.transport.base import Side
from syncline.transport.gloo_link import set_mark
from syncline.transport.gloo_stream import Stream
from syncline.transport.nccl_link import NcclLink

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from numpy.typing import NDArray

    from syncline.kernels.device import DeviceSweep
    from syncline.transport.nccl_device import Device
    from syncline.transport.running import Running

_PACKING_SMS = 48
"""Multiprocessors that packing takes unless told otherwise: memory is many times faster than the link, and
NCCL's own kernels need room beside it."""
_AHEAD = 8
"""Buckets that are queued before the first of them has to be through."""


@dataclass(eq=False)
class Lane:
    """What one peer of a program has on the device, for all of its transfers.

    Attributes:
        device: where.
        sweep: packs or unpacks; a section a bucket.
        copying, moving: streams.
        copied, moved: events, one a staging slot.
        after: makes a stream, given its raw handle, wait for the last writes to live memory.
    """

    device: Device
    sweep: DeviceSweep
    copying: Any
    moving: Any
    copied: list[Any]
    moved: list[Any]
    after: Callable[[int], None] | None


@dataclass(eq=False, kw_only=True)
class NcclStream(Stream):
    """One peer's part of a transfer; ``staging`` is the device's."""

    lane: Lane
    start: Any = None
    sms: int = _PACKING_SMS
    ends: list[Any] = field(default_factory=list)

    def begin(self) -> None:
        """Note where the caller's current stream stands: called by the thread that starts the transfer."""
        self.start = self.lane.device.event()
        self.start.record(self.lane.device.current())

    def drain(self) -> None:
        """Wait until nothing of this transfer runs on the device."""
        self.lane.moving.synchronize()
        self.lane.copying.synchronize()

    def _listen(self) -> None:
        """Do nothing: receives of buckets are queued in their order."""

    def _send_all(self, running: Running, out: NDArray[np.uint64] | None) -> Iterator[bool]:
        yield from self._offer()
        answer = self.answers[0]
        awaited = self.link.receive(answer)
        yield from self._queue_all(running, self._pack_and_send, Op.COPY if out is None else Op.COPY_DIGEST)
        self._add_digests(out)
        yield from self._arrive(answer, len(self.work) + 1)
        self.link.finish(awaited)
        installed, planned = int(answer[:8].numpy().view(np.int64)[0]), self.agreement.nbytes
        if installed != planned:
            raise TransportError(
                "the peer installed another number of bytes than were sent",
                expected=planned,
                found=installed,
                rank=self.link.peer.name,
            )

    def _receive_all(self, running: Running, out: NDArray[np.uint64] | None) -> Iterator[bool]:
        yield from self._accept()
        op = Op.COPY if out is None else Op.COPY_DIGEST
        yield from self._queue_all(running, self._receive_and_unpack, op)
        self._add_digests(out)
        answer = self.answers[0]
        answer[:8].numpy().view(np.int64)[0] = sum(bucket.moved for bucket in self.work)
        set_mark(answer, len(self.work) + 1)
        self.link.finish(self.link.send(answer))

    def _queue_all(self, running: Running, one: Callable[[int, Op], None], op: Op) -> Iterator[bool]:
        """Queue every bucket, and count each as its end is seen."""
        lane, self.sms = self.lane, running.limits.sms or _PACKING_SMS
        for stream in (lane.copying, lane.moving):
            stream.wait_event(self.start)
        if lane.after is not None and self.side is Side.SOURCE:
            lane.after(lane.copying.cuda_stream)
        with lane.device.on(lane.copying):
            lane.sweep.begin(op)
        counted = 0
        for k in range(len(self.work)):
            running.check()
            point("nccl.before_bucket")
            one(k, op)
            end = lane.device.event()
            end.record(lane.moving if self.side is Side.SOURCE else lane.copying)
            self.ends.append(end)
            yield True
            while counted < k + 1 - _AHEAD:
                counted = yield from self._count(running, counted)
        while counted < len(self.work):
            counted = yield from self._count(running, counted)

    def _count(self, running: Running, counted: int) -> Generator[bool, None, int]:
        """Count a bucket that is through, or wait a little; return the new count."""
        self.link.check()
        if self.ends[counted].query():
            running.add(self.work[counted].moved, self.work[counted].hops)
            return counted + 1
        self._check_messages()
        yield False
        return counted

    def _check_messages(self) -> None:
        communicator = self._communicator
        try:
            communicator.check()
        except TransportError as error:
            raise TransportError(
                f"messages between this process and {self.link.peer} failed",
                found=error.found or error.what,
                hint="the peer may be gone: make a new link and start again",
            ) from error

    def _pack_and_send(self, k: int, op: Op) -> None:
        lane, slot = self.lane, k % len(self.staging)
        if k >= len(self.staging):
            lane.copying.wait_event(lane.moved[slot])  # what was sent from this slot is gone
        with lane.device.on(lane.copying):
            lane.sweep.section(k, op, self.sms)
        lane.copied[slot].record(lane.copying)
        lane.moving.wait_event(lane.copied[slot])
        self._communicator.send(self._bucket(k), lane.moving)
        lane.moved[slot].record(lane.moving)

    def _receive_and_unpack(self, k: int, op: Op) -> None:
        lane, slot = self.lane, k % len(self.staging)
        if k >= len(self.staging):
            lane.moving.wait_event(lane.copied[slot])  # what came into this slot is unpacked
        self._communicator.receive(self._bucket(k), lane.moving)
        lane.moved[slot].record(lane.moving)
        lane.copying.wait_event(lane.moved[slot])
        with lane.device.on(lane.copying):
            lane.sweep.section(k, op, self.sms)
        lane.copied[slot].record(lane.copying)

    def _bucket(self, k: int) -> Any:
        return self.staging[k % len(self.staging)][: self.work[k].nbytes]

    def _add_digests(self, out: NDArray[np.uint64] | None) -> None:
        if out is not None:
            with self.lane.device.on(self.lane.copying):
                np.add(out, self.lane.sweep.digests(), out=out)

    @property
    def _communicator(self) -> Any:
        link = self.link
        if not isinstance(link, NcclLink):
            raise TransportError("a link without a communicator", found=type(link).__name__)
        return link.communicator
