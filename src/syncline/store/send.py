"""The writer's half of a pull over a two-sided transport: meet the instance's ranks, and send."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from syncline.store.lanes import ONE_SIDED, lane_of
from syncline.store.pull import meeting
from syncline.store.rank import update_fence
from syncline.transport.base import Endpoint, Limits, Remote, Side

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncline.memory import Binding
    from syncline.plan import Hops, Plan
    from syncline.protocol import messages as m
    from syncline.protocol.ids import Fence
    from syncline.store.member import Member
    from syncline.transport.base import Link, Program, Transport


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
        self._programs: dict[tuple[bytes, str, str], Program | None] = {}
        self._links: dict[tuple[str, str], Link] = {}

    def needed(self, pull: m.Pull) -> bool:
        """Return whether a rank of the instance cannot pull from this process by itself."""
        return not set(self._lanes(pull)[1].tolist()) <= ONE_SIDED

    def _lanes(self, pull: m.Pull) -> tuple[list[Endpoint], NDArray[np.str_]]:
        ends = [Endpoint.from_text(text) for text in pull.endpoints]
        return ends, np.array([lane_of(self._member.endpoint, end, self._only) for end in ends])

    def serve(self, pull: m.Pull, plan: Plan, binding: Binding) -> None:
        """Send this rank's share of a version to an instance; nothing to do for ranks that pull themselves.

        Raises:
            DeadlineError, PeerLostError, TransportError: a rank did not come, or died.
        """
        ends, names = self._lanes(pull)
        hops = plan.writer(self._rank, pull.instance)
        chosen = names[hops.dst] if len(hops) else np.zeros(0, dtype=np.str_)
        for name in sorted({str(n) for n in chosen} - ONE_SIDED):
            part = hops.take(np.flatnonzero(chosen == name))
            self._send(pull, plan, self._member.transport(name), part, ends, binding)

    def _send(
        self,
        pull: m.Pull,
        plan: Plan,
        transport: Transport,
        hops: Hops,
        ends: list[Endpoint],
        binding: Binding,
    ) -> None:
        program = self._program(plan, pull.instance, transport, hops)
        deadline = self._member.options.update_timeout
        until = time.monotonic() + deadline
        fence = update_fence(self._member, pull.begun)
        self._forget_links()
        remotes = {
            rank: Remote(self._link(transport, ends[rank], fence, until))
            for rank in np.unique(hops.dst).tolist()
        }
        program.rebind(binding, remotes)
        limits = Limits(deadline=deadline, threads=self._member.options.threads)
        transport.start(program, fence, limits, digest=False).wait(deadline)

    def _program(self, plan: Plan, instance: str, transport: Transport, hops: Hops) -> Program:
        key = (plan.id, instance, transport.name)
        known = self._programs.get(key)
        if known is None:
            self._programs = {k: p for k, p in self._programs.items() if k[0] == plan.id}
            known = self._programs[key] = transport.compile(plan, hops, Side.SOURCE)
        return known

    def _forget_links(self) -> None:
        """Close links to readers that died: one that comes back is another process."""
        for peer in [peer for peer, link in self._links.items() if not link.alive]:
            self._links.pop(peer).close()

    def _link(self, transport: Transport, peer: Endpoint, fence: Fence, until: float) -> Link:
        key = (transport.name, peer.id)
        known = self._links.get(key)
        if known is None or not known.alive:
            left = max(0.0, until - time.monotonic())
            known = self._links[key] = transport.link(peer, (meeting(transport.name, fence),), left)
        return known
