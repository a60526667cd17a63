"""One side's half of a plan over gloo: buckets for every peer, all driven by one thread."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from syncline.errors import PlanError, TransportError
from syncline.faults import point
from syncline.kernels import host
from syncline.transport.base import Side
from syncline.transport.buckets import pack
from syncline.transport.gloo_link import MARK_BYTES, GlooLink
from syncline.transport.gloo_stream import VERSION, Agreement, Stream
from syncline.transport.running import Running
from syncline.transport.tables import Place, Slots, boxes_of, picked

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from syncline.memory.binding import Binding
    from syncline.memory.region import Region
    from syncline.plan import Hops, Plan
    from syncline.protocol.ids import Fence
    from syncline.transport.base import Limits, Remote, Staging
    from syncline.transport.buckets import Bucket
    from syncline.transport.tables import Table

_SHORT_NAP, _LONG_NAP = 20e-6, 1e-3  # seconds between two looks at silent peers


@dataclass
class Peer:
    """What goes to, or comes from, one rank of the other side."""

    rank: int
    tables: list[Table]
    buckets: list[Bucket]
    nbytes: int
    staging: list[torch.Tensor] = field(default_factory=list)

    def bind(self, side: Side, address: NDArray[np.int64]) -> None:
        """Point the live half of the tables at this side's storages."""
        for table in self.tables:
            if side is Side.SOURCE:
                table.bind_src(address)
            else:
                table.bind_dst(address)

    def stage(self, staging: Staging, side: Side) -> None:
        """Allocate the staging slots, once, and point the wire half of the tables at them."""
        if self.staging:
            return
        largest = max((b.nbytes for b in self.buckets), default=0) + MARK_BYTES
        count = max(1, min(staging.inflight, len(self.buckets)))
        self.staging = [torch.zeros(largest, dtype=torch.uint8) for _ in range(count)]
        address = np.array([slot.data_ptr() for slot in self.staging], np.int64)
        for table in self.tables:
            if side is Side.SOURCE:
                table.bind_dst(address)
            else:
                table.bind_src(address)


class GlooProgram:
    """Compiled once, run any number of times, one at a time; the first run allocates the staging memory."""

    def __init__(self, plan: Plan, hops: Hops, side: Side, staging: Staging) -> None:
        instances = np.unique(hops.instance)
        if len(instances) > 1:
            raise PlanError(
                "a program serves one instance",
                expected="plan.writer(rank, instance)",
                found=f"{len(instances)} instances",
            )
        self._side, self.plan_id, self._staging = side, plan.id, staging
        self.hops, self.nbytes = len(hops), int(hops.nbytes.sum())
        self._empty_hops = int(np.count_nonzero(hops.nbytes == 0))
        self._load()
        boxes, src, dst = boxes_of(plan, hops)
        self._slots: Slots = src if side is Side.SOURCE else dst
        self._peers: list[Peer] = []
        other = hops.dst if side is Side.SOURCE else hops.src
        for rank in np.unique(other).tolist():
            at = np.nonzero(other == rank)[0]
            made, buckets = pack(picked(boxes, at), side, staging)
            self._peers.append(self._peer(rank, made, buckets))
        self._mutex = threading.Lock()
        self._busy = False
        self._links: dict[int, GlooLink] | None = None
        self.local_regions: tuple[Region, ...] = ()

    @property
    def side(self) -> Side:
        """Which half."""
        return self._side

    def rebind(self, local: Binding, remote: Mapping[int, Remote]) -> None:
        """Point the program at where this side's storages lie now; the peer resolves its own."""
        with self._mutex:
            if self._busy:
                raise TransportError("the program is running", hint="wait for its transfer, or cancel it")
            address = self._slots.resolve(dict.fromkeys(self._slots.ranks, Place.local(local)), "local rank")
            self._links = {peer.rank: self._link(remote, peer.rank) for peer in self._peers}
            self.local_regions = tuple(local.regions.values())
            for peer in self._peers:
                peer.bind(self._side, address)

    def run(self, fence: Fence, limits: Limits, *, digest: bool) -> Running:
        """Start one run in a thread of its own.

        Raises:
            TransportError: not bound, still running, or a link that is busy; PeerLostError: a link has ended.
        """
        with self._mutex:
            if self._links is None:
                raise TransportError("the program is not bound to any addresses", hint="call rebind first")
            if self._busy:
                raise TransportError("the program is running", hint="wait for its transfer, or cancel it")
            streams = [self._stream(peer, self._links[peer.rank], fence) for peer in self._peers]
            _reserve(streams)
            self._busy = True
        names = tuple(s.link.peer.name for s in streams)

        def body(running: Running) -> None:
            try:
                self._drive(running, streams, digest=digest)
            finally:
                self._rest(streams)

        try:
            return Running(f"gloo {self._side}", body, self.nbytes, self.hops, limits, names)
        except RuntimeError as error:
            self._rest(streams)
            raise TransportError("no thread for a transfer", found=error) from error

    def _rest(self, streams: list[Stream]) -> None:
        try:
            _leave(streams)
            self._settle(streams)
        finally:
            with self._mutex:
                self._busy = False

    def _load(self) -> None:
        host.load()  # compiling kernels is no part of a transfer and its deadline

    def _peer(self, rank: int, made: list[Table], buckets: list[Bucket]) -> Peer:
        return Peer(rank, made, buckets, sum(b.moved for b in buckets))

    def _stream(self, peer: Peer, link: GlooLink, fence: Fence) -> Stream:
        staging = self._staging
        agreement = Agreement(
            VERSION, self.plan_id, fence, staging.bucket, staging.inflight, len(peer.buckets), peer.nbytes
        )
        return self._joined(peer, link, agreement)

    def _joined(self, peer: Peer, link: GlooLink, agreement: Agreement) -> Stream:
        peer.stage(self._staging, self._side)
        return Stream(link, self._side, agreement, peer.buckets, peer.staging)

    def _settle(self, streams: list[Stream]) -> None:
        """Wait until nothing of these streams touches memory; here each has stopped when it returned."""

    def _drive(self, running: Running, streams: list[Stream], *, digest: bool) -> None:
        """Step every stream in turn until all have ended; nap while nobody gets on."""
        out = np.zeros(self.hops, np.uint64) if digest else None
        running.add(0, self._empty_hops)
        steps: list[Iterator[bool]] = [s.steps(running, out) for s in streams]
        nap = _SHORT_NAP
        while steps:
            running.check()
            point("gloo.before_step")
            moved = [next(s, None) for s in steps]
            steps = [s for s, m in zip(steps, moved, strict=True) if m is not None]
            if any(m is not False for m in moved):
                nap = _SHORT_NAP
            else:
                time.sleep(nap)
                nap = min(2 * nap, _LONG_NAP)
        running.digests = out

    def _link(self, remote: Mapping[int, Remote], rank: int) -> GlooLink:
        end = remote.get(rank)
        if end is None or not isinstance(end.link, GlooLink):
            raise TransportError(
                "a rank of the other side is not linked over gloo",
                expected=f"rank {rank}",
                found=sorted(remote),
                hint="link every rank that the plan names",
            )
        return end.link


def _reserve(streams: list[Stream]) -> None:
    taken: list[Stream] = []
    try:
        for stream in streams:
            stream.link.enter(stream)
            taken.append(stream)
    except TransportError:
        for stream in taken:
            stream.link.leave(stream)
        raise


def _leave(streams: list[Stream]) -> None:
    """Give the links back; one whose two ends may be out of step is broken off, and its peer told by that."""
    for stream in streams:
        if not stream.ended:
            stream.link.break_off("a transfer on it did not end well")
        stream.link.leave(stream)
