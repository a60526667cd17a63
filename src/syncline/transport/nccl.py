"""NCCL between processes with a GPU each, two-sided: for GPUs that cannot map each other's memory.

Buckets are packed and unpacked by kernels and carried by a communicator of two ranks, which no group of the
user's knows of. Everything else is said over gloo, in host memory. The receiver unpacks from its own staging
memory, so it can stop at any time: nothing writes into live memory but itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.errors import SynclineError
from syncline.transport.base import Caps, Initiator, Reach, Refusal, Staging
from syncline.transport.gloo import GlooTransport
from syncline.transport.nccl_card import Card, check_pair
from syncline.transport.nccl_device import CudaDevice, Device
from syncline.transport.nccl_link import NcclLink
from syncline.transport.nccl_program import NcclProgram

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

    from syncline.plan import Hops, Plan
    from syncline.transport.base import Endpoint, Side
    from syncline.transport.clock import Deadline

NAME = "nccl"
BUCKET = 128 << 20
"""Bytes of a bucket: long beside what starts a message, and two for each peer are little beside a model."""


class NcclTransport(GlooTransport):
    """The `Transport` between any two GPUs that NCCL connects.

    Args:
        job: name of the job.
        meet: as in `GlooTransport`.
        process_id: this process's `Endpoint.id`; made here if not given.
        interface: host name or address at which the pair over gloo listens.
        device: index of the GPU that this process computes on, or what stands for one.
        after: makes a stream, given its raw handle, wait for the last writes to memory that is sent.
    """

    _program = NcclProgram

    def __init__(
        self,
        job: str,
        meet: Callable[[str], Store],
        process_id: str | None = None,
        interface: str = "127.0.0.1",
        *,
        device: int | Device = 0,
        after: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(job, meet, process_id, interface)
        self.device: Device = CudaDevice(device) if isinstance(device, int) else device
        self._after = after

    @property
    def name(self) -> str:
        """``"nccl"``."""
        return NAME

    @property
    def address(self) -> str:
        """The card of this process's device: see `syncline.transport.nccl_card`."""
        return self.device.card.encode()

    def caps(self, a: Endpoint, b: Endpoint) -> Caps | Refusal:
        """Say whether the two can talk over NCCL: a GPU each, and one version."""
        cards = []
        for end in (a, b):
            if not end.addresses.get(self.name):
                return Refusal(self.name, f"{end} has no GPU")
            cards.append(Card.decode(end.addresses[self.name]))
        try:
            check_pair(cards[0], cards[1], b)
        except SynclineError as error:
            return Refusal(self.name, f"{error.what}: {error.found}")
        return Caps(Initiator.BOTH, revocable=True, strided=False, min_run=0, reach=Reach.ANY)

    def compile(self, plan: Plan, hops: Hops, side: Side, staging: Staging | None = None) -> NcclProgram:
        """Lower a rank's rows of one instance to buckets; both sides must give the same staging."""
        return NcclProgram(plan, hops, side, staging or Staging(bucket=BUCKET), self.device, self._after)

    def _make_link(self, peer: Endpoint, rank: int, store: Store, deadline: Deadline) -> NcclLink:
        return NcclLink(peer, rank, store, self._interface, deadline, self.device)
