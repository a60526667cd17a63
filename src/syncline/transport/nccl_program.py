"""One side's half of a plan over NCCL: `GlooProgram`, with tables, staging and work on a device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from syncline.errors import TransportError
from syncline.transport.base import Side
from syncline.transport.cuda_ipc_program import device_runs
from syncline.transport.gloo_program import GlooProgram, Peer
from syncline.transport.nccl_link import NcclLink
from syncline.transport.nccl_stream import Lane, NcclStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from syncline.kernels.lower_device import DeviceRuns
    from syncline.plan import Hops, Plan
    from syncline.transport.base import Staging
    from syncline.transport.buckets import Bucket
    from syncline.transport.gloo_link import GlooLink
    from syncline.transport.gloo_stream import Agreement, Stream
    from syncline.transport.nccl_device import Device
    from syncline.transport.tables import Table


@dataclass
class NcclPeer(Peer):
    """What goes to, or comes from, one rank of the other side; on the device."""

    lane: Lane | None = None
    address: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    bound: bool = False

    def bind(self, side: Side, address: NDArray[np.int64]) -> None:
        """Note where this side's storages lie; the tables follow at the next transfer."""
        self.address, self.bound = address, False

    def prepare(self, side: Side, staging: Staging, make: Callable[[list[DeviceRuns]], Lane]) -> Lane:
        """Allocate the staging slots and make the tables, once; and point them at where storages lie now.

        Raises:
            MemoryBudgetError: the device has no room for the buckets.
        """
        if self.lane is None:
            self.lane = make(_sections(self.tables, self.buckets))
        if not self.staging:
            largest = max((b.nbytes for b in self.buckets), default=1)
            count = max(1, min(staging.inflight, len(self.buckets)))
            self.staging = self.lane.device.memory(largest, count)
        if not self.bound:
            wire = np.array([slot.data_ptr() for slot in self.staging], np.int64)
            with self.lane.device.on(self.lane.copying):
                ends = (self.address, wire) if side is Side.SOURCE else (wire, self.address)
                self.lane.sweep.bind(*ends)
            self.bound = True
        return self.lane


def _sections(tables: list[Table], buckets: list[Bucket]) -> list[DeviceRuns]:
    """Return the tables for the device, with the number of each run's bucket."""
    section = {id(table): np.zeros(len(table), np.int64) for table in tables}
    for k, bucket in enumerate(buckets):
        for part in bucket.parts:
            section[id(part.table)][part.start : part.stop] = k
    return [replace(device_runs(table), section=section[id(table)]) for table in tables]


class NcclProgram(GlooProgram):
    """Compiled once, run any number of times, one at a time; the first run allocates two buckets a peer.

    Args:
        device: of this process.
        after: makes a stream, given its raw handle, wait for the last writes to live memory; a source's.
    """

    def __init__(
        self,
        plan: Plan,
        hops: Hops,
        side: Side,
        staging: Staging,
        device: Device,
        after: Callable[[int], None] | None = None,
    ) -> None:
        self._device, self._after = device, after
        super().__init__(plan, hops, side, staging)

    @property
    def staged_bytes(self) -> int:
        """Device memory that buckets take, in bytes."""
        return sum(slot.nbytes for peer in self._peers for slot in peer.staging)

    def _load(self) -> None:
        """Do nothing: the device's kernels are compiled with their tables."""

    def _peer(self, rank: int, made: list[Table], buckets: list[Bucket]) -> NcclPeer:
        return NcclPeer(rank, made, buckets, sum(b.moved for b in buckets))

    def _joined(self, peer: Peer, link: GlooLink, agreement: Agreement) -> Stream:
        if not isinstance(peer, NcclPeer) or not isinstance(link, NcclLink):
            raise TransportError("device memory needs a link of this transport", found=type(link).__name__)
        lane = peer.prepare(self._side, self._staging, self._lane)
        stream = NcclStream(link, self._side, agreement, peer.buckets, peer.staging, lane=lane)
        stream.begin()
        return stream

    def _lane(self, runs: list[DeviceRuns]) -> Lane:
        device, slots = self._device, range(max(1, self._staging.inflight))
        copying, moving = device.stream(), device.stream(urgent=True)
        with device.on(copying):
            sweep = device.sweep(runs, self.hops)
        copied, moved = ([device.event() for _ in slots] for _ in range(2))
        return Lane(device, sweep, copying, moving, copied, moved, self._after)

    def _settle(self, streams: list[Stream]) -> None:
        """Wait, after the links of what failed were broken off, until the device touches no memory."""
        for stream in streams:
            if isinstance(stream, NcclStream):
                stream.drain()
