"""The writer's half of a pull over a two-sided transport: meet the instance's ranks, and send."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from syncline.store.pull import lane_of, meeting
from syncline.store.rank import update_fence
from syncline.transport.base import Endpoint, Limits, Remote, Side

if TYPE_CHECKING:
    from syncline.memory import Binding
    from syncline.plan import Hops, Plan
    from syncline.protocol import messages as m
    from syncline.protocol.ids import Fence
    from syncline.store.member import Member
    from syncline.transport.base import Link, Program


class Sender:
    """Serves instances that do not share this rank's memory. One thread at a time.

    Args:
        member: the process.
        rank: of the writer.
    """

    def __init__(self, member: Member, rank: int) -> None:
        self._member, self._rank = member, rank
        only = member.options.transport
        self._only = None if only == "auto" else only
        self._programs: dict[tuple[bytes, str], Program | None] = {}
        self._links: dict[str, Link] = {}

    def needed(self, pull: m.Pull) -> bool:
        """Return whether a rank of the instance cannot pull from this process by itself."""
        hosts = (Endpoint.from_text(text).host for text in pull.endpoints)
        return any(lane_of(self._member.endpoint.host, host, self._only) != "shm" for host in hosts)

    def serve(self, pull: m.Pull, plan: Plan, binding: Binding) -> None:
        """Send this rank's share of a version to an instance; nothing to do for ranks that pull themselves.

        Raises:
            DeadlineError, PeerLostError, TransportError: a rank did not come, or died.
        """
        hops = self._hops(plan, pull.instance)
        if not len(hops):
            return
        program = self._program(plan, pull.instance, hops)
        deadline = self._member.options.update_timeout
        until = time.monotonic() + deadline
        fence = update_fence(self._member, pull.begun)
        self._forget_links()
        remotes = {
            rank: Remote(self._link(Endpoint.from_text(pull.endpoints[rank]), fence, until))
            for rank in np.unique(hops.dst).tolist()
        }
        program.rebind(binding, remotes)
        limits = Limits(deadline=deadline, threads=self._member.options.threads)
        transfer = self._member.gloo.start(program, fence, limits, digest=False)
        transfer.wait(deadline)

    def _hops(self, plan: Plan, instance: str) -> Hops:
        hops = plan.writer(self._rank, instance)
        mine = plan.writer_hosts[self._rank]
        names = np.array([lane_of(mine, host, self._only) for host in plan.reader_hosts[instance]])
        return hops.take(np.flatnonzero(names[hops.dst] != "shm"))

    def _program(self, plan: Plan, instance: str, hops: Hops) -> Program:
        key = (plan.id, instance)
        known = self._programs.get(key)
        if known is None:
            self._programs = {k: p for k, p in self._programs.items() if k[0] == plan.id}
            known = self._programs[key] = self._member.gloo.compile(plan, hops, Side.SOURCE)
        return known

    def _forget_links(self) -> None:
        """Close links to readers that died: one that comes back is another process."""
        for peer in [peer for peer, link in self._links.items() if not link.alive]:
            self._links.pop(peer).close()

    def _link(self, peer: Endpoint, fence: Fence, until: float) -> Link:
        known = self._links.get(peer.id)
        if known is None or not known.alive:
            left = max(0.0, until - time.monotonic())
            known = self._links[peer.id] = self._member.gloo.link(peer, (meeting("gloo", fence),), left)
        return known
