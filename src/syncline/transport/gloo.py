"""Gloo between any two processes, two-sided: the portable reference, and the opposite of `shm`.

Both halves of a plan run, packed into bounded buckets, over process groups of two that no user group knows
of. The
receiver unpacks from its own staging memory, so it can stop at any time: nothing writes into live memory but
itself.
"""

from __future__ import annotations

import hashlib
import threading
import time
from typing import TYPE_CHECKING, ClassVar

import msgspec

from syncline.errors import TransportError
from syncline.transport.base import (
    Caps,
    Drained,
    Initiator,
    Limits,
    Reach,
    Refusal,
    Registration,
    Rights,
    Side,
    Staging,
    Ticket,
    Wedged,
)
from syncline.transport.clock import Deadline
from syncline.transport.gloo_link import GlooLink
from syncline.transport.gloo_program import GlooProgram
from syncline.transport.host import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._C._distributed_c10d import Store

    from syncline.memory.region import Region
    from syncline.plan import Hops, Plan
    from syncline.protocol.ids import Fence
    from syncline.transport.base import Endpoint, Program
    from syncline.transport.running import Running

NAME = "gloo"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class GlooTransport:
    """The `Transport` for any two processes that can open TCP connections to each other.

    Args:
        job: name of the job.
        meet: called once on each end of a link, with a name that both know and nobody else uses; returns a
            store in which the two find each other: any `torch.distributed.Store`, one written in Python
            included, whose waits end by themselves.
        process_id: this process's `Endpoint.id`; made here if not given.
        interface: host name or address to listen at; the default is reached from this host only.
    """

    _program: ClassVar[type[GlooProgram]] = GlooProgram

    def __init__(
        self,
        job: str,
        meet: Callable[[str], Store],
        process_id: str | None = None,
        interface: str = "127.0.0.1",
    ) -> None:
        self._job, self._meet, self._interface = job, meet, interface
        self.process_id = process_id or new_id()
        self._mutex = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._links: dict[str, GlooLink] = {}
        self._running: list[tuple[Running, GlooProgram]] = []
        self._closed = False

    @property
    def name(self) -> str:
        """``"gloo"``."""
        return NAME

    @property
    def address(self) -> str:
        """The interface this process listens at."""
        return self._interface

    def caps(self, a: Endpoint, b: Endpoint) -> Caps | Refusal:
        """Say whether the two can connect; between hosts, neither may listen on loopback only."""
        for end in (a, b):
            if self.name not in end.addresses:
                return Refusal(self.name, f"{end} does not speak it")
            if a.host != b.host and end.addresses[self.name] in _LOOPBACK:
                return Refusal(
                    self.name, f"{end} listens on loopback only, and the two are on different hosts"
                )
        return Caps(Initiator.BOTH, revocable=True, strided=False, min_run=0, reach=Reach.ANY)

    def register(self, region: Region, descriptor: int | None = None) -> Registration:
        """Make a region known; any host memory will do. See `Transport.register`."""
        with self._mutex:
            known = self._regions.get(region.id, region)
            if known.generation > region.generation:
                raise TransportError(
                    f"region {region.id} has been registered anew since",
                    expected=f"generation {known.generation} or later",
                    found=f"generation {region.generation}",
                )
            self._regions[region.id] = region
        return Registration(self.name, region)

    def export(self, registration: Registration, rights: Rights, fence: Fence) -> Ticket:
        """Return a ticket for a meeting under ``fence``; peers never touch the region themselves."""
        region = registration.region
        if rights != Rights.READ:
            raise TransportError(
                "over messages a peer is sent what it reads", expected=Rights.READ, found=rights
            )
        with self._mutex:
            if self._regions.get(region.id) != region:
                raise TransportError(
                    f"region {region.id} is not registered (any more)",
                    expected=self._regions.get(region.id),
                    found=region,
                )
        return Ticket(self.name, region.id, region.generation, region.nbytes, int(rights), fence)

    def revoke(self, ticket: Ticket, deadline: float) -> Drained | Wedged:
        """Wait for the transfers of this process that read the region; peers have no access of their own."""
        until = Deadline(deadline)
        while readers := self._users(ticket.region, ticket.generation):
            if until.over:
                return Wedged(
                    tuple(readers), f"region {ticket.region} is still being read after {deadline:g} s"
                )
            time.sleep(0.001)
        return Drained()

    def link(self, peer: Endpoint, tickets: Sequence[Ticket], deadline: float) -> GlooLink:
        """Meet ``peer``, which must link to this process with the same tickets, and return a new link.

        Every meeting has tickets of its own: a fence whose attempt is new. An earlier link to the peer ends.
        """
        wrong = next((t for t in tickets if t.transport != self.name or t.fence.job != self._job), None)
        if wrong is not None or not tickets:
            raise TransportError(
                "two ends meet by tickets that both hold",
                expected=f"tickets for {self.name}, {self._job}",
                found=wrong,
            )
        if peer.id == self.process_id:
            raise TransportError("a process cannot meet itself", found=str(peer))
        until = Deadline(deadline)
        with self._mutex:
            if self._closed:
                raise TransportError("the transport is closed")
            old = self._links.pop(peer.id, None)
        if old is not None:
            old.close()
        pair = sorted((self.process_id, peer.id))
        name = f"syncline/{self._job}/{self.name}/{pair[0]}-{pair[1]}/{_nonce(tickets)}"
        link = self._make_link(peer, pair.index(self.process_id), self._meet(name), until)
        with self._mutex:
            closed = self._closed
            if not closed:
                self._links[peer.id] = link
        if closed:
            link.close()
            raise TransportError("the transport was closed")
        return link

    def compile(self, plan: Plan, hops: Hops, side: Side, staging: Staging | None = None) -> GlooProgram:
        """Lower a rank's rows of one instance to buckets; both sides must give the same staging."""
        return GlooProgram(plan, hops, side, staging or Staging())

    def start(
        self, program: Program, fence: Fence, limits: Limits | None = None, *, digest: bool = False
    ) -> Running:
        """Start one half in a thread of its own; the peers start theirs with the same fence."""
        if not isinstance(program, self._program):
            raise TransportError(
                "a program of another transport", expected=self.name, found=type(program).__name__
            )
        with self._mutex:
            if self._closed:
                raise TransportError("the transport is closed")
            for region in program.local_regions:
                newest = self._regions.get(region.id, region)
                if newest.generation != region.generation:
                    raise TransportError(
                        "the program is bound to memory of this process that was replaced",
                        expected=f"generation {newest.generation} of region {region.id}",
                        found=f"generation {region.generation}",
                        hint="rebind the program",
                    )
            running = program.run(fence, limits or Limits(), digest=digest)
            self._running = [(r, p) for r, p in self._running if not r.poll().done]
            self._running.append((running, program))
        return running

    def close(self, deadline: float) -> None:
        """Cancel what runs, say farewell on every link, and end."""
        until = Deadline(deadline)
        with self._mutex:
            self._closed = True
            running, self._running = self._running, []
            links, self._links = list(self._links.values()), {}
        for transfer, _ in running:
            transfer.cancel(until.left)
        for link in links:
            link.close()

    def _make_link(self, peer: Endpoint, rank: int, store: Store, deadline: Deadline) -> GlooLink:
        return GlooLink(peer, rank, store, self._interface, deadline)

    def _users(self, region: int, generation: int) -> list[str]:
        with self._mutex:
            live = [(r, p) for r, p in self._running if not r.poll().done]
        places = [(r, {(g.id, g.generation) for g in p.local_regions}) for r, p in live]
        return [name for r, held in places if (region, generation) in held for name in r.peers]


def _nonce(tickets: Sequence[Ticket]) -> str:
    fences = sorted({msgspec.msgpack.encode((t.fence, t.blob)) for t in tickets})
    return hashlib.blake2b(b"".join(fences), digest_size=12).hexdigest()
