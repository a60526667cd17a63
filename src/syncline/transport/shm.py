"""Shared memory on one host, one-sided: readers map a writer's live memory and gather from it into their own.

The writer's half of a plan is empty. It exports regions (`SegmentServer` hands their descriptors out,
read-only), and revokes them; it takes no part in a transfer. So a reader that dies harms nobody, and mapped
memory survives the writer's own death.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from syncline.errors import SynclineError, TransportError
from syncline.memory.region import Kind, Region
from syncline.transport import frames
from syncline.transport.base import (
    Caps,
    Drained,
    Endpoint,
    Initiator,
    Limits,
    Program,
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
from syncline.transport.host import host_id, new_id
from syncline.transport.loop import Loop
from syncline.transport.segments import SegmentServer
from syncline.transport.shm_link import ShmLink
from syncline.transport.shm_program import ShmProgram

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from syncline.plan import Hops, Plan
    from syncline.protocol.ids import Fence
    from syncline.transport.running import Running

NAME = "shm"
_PROBE_SECONDS = 2.0


class ShmTransport:
    """The `Transport` for processes of one user on one host.

    Args:
        job: name of the job.
        socket: path at which this process serves its regions: new for every process, in a directory that only
            this user can enter. None: a reader, which serves nothing.
        process_id: this process's `Endpoint.id`; made here if not given.
    """

    def __init__(self, job: str, socket: Path | None = None, process_id: str | None = None) -> None:
        self._job, self._path, self.process_id = job, socket, process_id or new_id()
        self._mutex = threading.RLock()
        self._linking = threading.Lock()
        self._loop = Loop(f"syncline {self.name}")
        self._server: SegmentServer | None = None
        self._regions: dict[int, tuple[Region, int]] = {}  # by id: the newest, and our descriptor of it or -1
        self._links: dict[str, ShmLink] = {}
        self._running: list[Running] = []
        self._closed = False

    @property
    def name(self) -> str:
        """``"shm"``."""
        return NAME

    @property
    def address(self) -> str:
        """Path of this process's socket; empty for a process that serves nothing."""
        return "" if self._path is None else str(self._path)

    def caps(self, a: Endpoint, b: Endpoint) -> Caps | Refusal:
        """Say whether ``b`` can map ``a``'s memory; where ``b`` is here, by greeting ``a``."""
        if a.host != b.host:
            return Refusal(self.name, f"two hosts: {a.host} and {b.host}")
        if a.uid != b.uid:
            return Refusal(self.name, f"two users: {a.uid} and {b.uid}")
        if not a.addresses.get(self.name):
            return Refusal(self.name, f"{a} serves no memory")
        if b.id == self.process_id and b.host == host_id():
            try:
                self._link(a, Deadline(_PROBE_SECONDS))
            except SynclineError as error:
                return Refusal(self.name, f"{a} cannot be reached: {error.what}")
        return Caps(Initiator.READER, revocable=True, strided=True, min_run=0, reach=Reach.HOST)

    def register(self, region: Region, descriptor: int | None = None) -> Registration:
        """Make a region known; see `Transport.register`. Private memory can only be a destination."""
        with self._mutex:
            known = self._regions.get(region.id)
            if known is not None and known[0].generation > region.generation:
                raise TransportError(
                    f"region {region.id} has been registered anew since",
                    expected=f"generation {known[0].generation} or later",
                    found=f"generation {region.generation}",
                )
            if known is not None and known[0] == region:
                return Registration(self.name, region)
            own = (
                -1
                if descriptor is None
                else os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            )
            if known is not None and known[1] >= 0:
                os.close(known[1])
            self._regions[region.id] = (region, own)
            if known is not None and self._server is not None:
                self._server.withdraw_before(region.id, region.generation)
        return Registration(self.name, region)

    def export(self, registration: Registration, rights: Rights, fence: Fence) -> Ticket:
        """Let peers of this user and job map a region read-only; see `Transport.export`."""
        region = registration.region
        if rights != Rights.READ:
            raise TransportError("shared memory is handed out read-only", expected=Rights.READ, found=rights)
        with self._mutex:
            known, descriptor = self._regions.get(region.id, (None, -1))
            if known != region:
                raise TransportError(
                    f"region {region.id} is not registered (any more)",
                    expected=f"generation {known.generation}" if known else "a registration",
                    found=f"generation {region.generation}",
                )
            if descriptor < 0 or region.kind is Kind.MALLOC:
                raise TransportError(
                    "private memory cannot be handed out",
                    expected="a region with a descriptor",
                    found=region,
                    hint="adopt the parameters into an Arena before publishing",
                )
            self._serve().export(region, fence.epoch, descriptor)
        return Ticket(self.name, region.id, region.generation, region.nbytes, int(Rights.READ), fence)

    def revoke(self, ticket: Ticket, deadline: float) -> Drained | Wedged:
        """End a ticket; `Drained` once no peer has the region mapped, or is dead. See `Transport.revoke`."""
        return Drained() if self._server is None else self._server.revoke(ticket, deadline)

    def link(self, peer: Endpoint, tickets: Sequence[Ticket], deadline: float) -> ShmLink:
        """Return the one link to ``peer``, with the tickets' regions mapped; descriptors are fetched once.

        A later generation of a region ends the earlier one; so does a new process at the peer's place.
        """
        until = Deadline(deadline)
        wrong = next((t for t in tickets if t.transport != self.name or t.fence.job != self._job), None)
        if wrong is not None:
            raise TransportError(
                "a ticket for another transport or job", expected=f"{self.name}, {self._job}", found=wrong
            )
        link = self._link(peer, until)
        link.fetch(tickets, until)
        return link

    def compile(self, plan: Plan, hops: Hops, side: Side, staging: Staging | None = None) -> ShmProgram:
        """Lower a rank's rows; the source half is empty. Nothing is staged."""
        return ShmProgram(plan, hops, side)

    def start(
        self, program: Program, fence: Fence, limits: Limits | None = None, *, digest: bool = False
    ) -> Running:
        """Gather everything in a thread of its own; see `Transport.start`."""
        if not isinstance(program, ShmProgram):
            raise TransportError(
                "a program of another transport", expected=self.name, found=type(program).__name__
            )
        if fence.job != self._job:
            raise TransportError("a fence of another job", expected=self._job, found=fence.job)
        with self._mutex:
            if self._closed:
                raise TransportError("the transport is closed")
            for region in program.local_regions:
                newest = self._regions.get(region.id, (region, -1))[0]
                if newest.generation != region.generation:
                    raise TransportError(
                        "the program is bound to memory of this process that was replaced",
                        expected=f"generation {newest.generation} of region {region.id}",
                        found=f"generation {region.generation}",
                        hint="rebind the program",
                    )
            self._running = [r for r in self._running if not r.poll().done]
            running = program.run(limits or Limits(), digest=digest)
            self._running.append(running)
        return running

    def close(self, deadline: float) -> None:
        """Cancel transfers, unmap everything, hand out nothing more, remove the socket."""
        until = Deadline(deadline)
        with self._mutex:
            self._closed = True
            running, self._running = self._running, []
            links, self._links = list(self._links.values()), {}
            server, self._server = self._server, None
            regions, self._regions = list(self._regions.values()), {}
        for transfer in running:
            transfer.cancel(until.left)
        for link in links:
            link.close()
        if server is not None:
            server.close()
        self._loop.close(until.left)
        for _, descriptor in regions:
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def _serve(self) -> SegmentServer:
        if self._closed:
            raise TransportError("the transport is closed")
        if self._path is None:
            raise TransportError("this process serves no memory", expected="a socket path", found="none")
        if self._server is None:
            self._server = self._make_server(self._path)
        return self._server

    def _make_server(self, path: Path) -> SegmentServer:
        return SegmentServer(path, self._job, self.process_id, self._loop)

    def _make_link(self, peer: Endpoint, path: str, hello: frames.Hello, deadline: Deadline) -> ShmLink:
        return ShmLink(peer, path, hello, self._loop, deadline)

    def _link(self, peer: Endpoint, deadline: Deadline) -> ShmLink:
        path = peer.addresses.get(self.name)
        if not path:
            raise TransportError(
                f"{peer} serves no memory", expected=f"an address for {self.name}", found="none"
            )
        with self._linking:  # one link a peer, also when two threads want one
            with self._mutex:
                if self._closed:
                    raise TransportError("the transport is closed")
                known = self._links.get(peer.id)
                if known is not None and known.alive:
                    return known
            hello = frames.Hello(
                frames.VERSION, self._job, f"process {os.getpid()} ({self.process_id})", peer.id
            )
            link = self._make_link(peer, path, hello, deadline)
            with self._mutex:
                old = self._links.pop(peer.id, None)
                self._links = {name: one for name, one in self._links.items() if not one.closed}
                self._links[peer.id] = link
        if old is not None:
            old.close()
        return link
