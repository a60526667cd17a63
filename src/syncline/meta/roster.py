"""The memberships of one client: their newest fences, heartbeats, and the refill of a new server. No I/O."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from syncline.errors import FencedError, SynclineError
from syncline.faults import point
from syncline.meta.refill import Membership
from syncline.protocol import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncline.layout import Manifest
    from syncline.protocol.ids import Fence

    Answer = m.Message | SynclineError
    Ask = Callable[[m.Message, Callable[[Answer], None]], None]

logger = logging.getLogger(__name__)

_BEATS_A_LEASE = 4  # a lost heartbeat or two must not cost the lease


class Roster:
    """All registrations of one client.

    Attributes:
        manifests: fingerprint -> manifest (encoded or not) that a server may ask for again.
        progress: the running count of bytes of members that have none of their own.
    """

    def __init__(self, heartbeat: float, progress: Callable[[], int] | None) -> None:
        self.manifests: dict[bytes, bytes | Manifest] = {}
        self.progress = progress
        self._heartbeat = heartbeat
        self._by_fence: dict[tuple[int, int], Membership] = {}  # every fence that any of them ever had

    def find(self, fence: Fence) -> Membership | None:
        """Return the membership that ``fence`` belongs to, however old the fence is."""
        return self._by_fence.get((fence.boot, fence.member))

    def members(self) -> list[Membership]:
        """Return the memberships, oldest first."""
        return list({id(one): one for one in list(self._by_fence.values())}.values())

    def current(self, message: m.Message) -> m.Message:
        """Return the message with its sender's newest fence.

        Raises:
            SynclineError: the membership is over, for the reason raised.
        """
        fence: Fence | None = getattr(message, "fence", None)
        membership = self.find(fence) if fence else None
        if fence is None or membership is None:
            return message
        if membership.error is not None:
            raise membership.error
        if (fence.boot, fence.member) == (membership.fence.boot, membership.fence.member):
            return message
        return msgspec.structs.replace(message, fence=membership.fence.at(fence.attempt))

    # --- what happened

    def sent(self, message: m.Message) -> None:
        """Remember a request that is about to leave."""
        membership = self._of(message)
        if membership is not None:
            membership.sent(message)

    def answered(self, message: m.Message, reply: m.Message) -> None:
        """Remember what a request achieved: a registration, an end of one, a put, a commit."""
        if isinstance(message, m.RegisterWriter | m.RegisterReader) and isinstance(reply, m.Registered):
            self._enter(Membership(message, reply))
            return
        if isinstance(message, m.PutManifest):
            self.manifests.setdefault(message.manifest_fp, message.blob)
        membership = self._of(message)
        if membership is None:
            return
        if isinstance(message, m.Deregister):
            self._leave(membership)
        else:
            membership.answered(message, reply)

    def _of(self, message: m.Message) -> Membership | None:
        fence: Fence | None = getattr(message, "fence", None)
        return self.find(fence) if fence else None

    def _enter(self, new: Membership) -> None:
        for old in self.members():
            if _slot(old) == _slot(new):
                self._leave(old)  # its owner registered anew
        self._by_fence[new.fence.boot, new.fence.member] = new

    def _leave(self, membership: Membership) -> None:
        for key in [key for key, one in self._by_fence.items() if one is membership]:
            del self._by_fence[key]

    # --- a new server

    def refill(self, boot: int, ask: Ask, finished: Callable[[], None]) -> None:
        """Tell the server of ``boot`` all that it does not know; ``finished`` is called when it does."""
        lacking = [one for one in self.members() if one.error is None]
        for one in lacking:
            one.refilled = one.refilled and one.fence.boot == boot
        self._refill([one for one in lacking if not one.refilled], ask, finished)

    def _refill(self, lacking: list[Membership], ask: Ask, finished: Callable[[], None]) -> None:
        if not lacking:
            finished()
            return
        membership, rest = lacking[0], lacking[1:]

        def claimed(answer: Answer) -> None:
            self._rejoined(membership, answer)
            if isinstance(answer, m.Registered):
                self._offer(membership, set(answer.missing), ask, told)
            else:
                self._refill(rest, ask, finished)

        def told(_answer: Answer) -> None:
            membership.refilled = True
            self._refill(rest, ask, finished)

        point("meta.before_refill")
        ask(membership.claim(), claimed)

    def _rejoined(self, membership: Membership, answer: Answer) -> None:
        if isinstance(answer, m.Registered):
            membership.joined(answer)
            self._by_fence[answer.fence.boot, answer.fence.member] = membership
        elif isinstance(answer, SynclineError):
            logger.warning("a membership of this process is over: %s", answer)
            membership.error = answer

    def _offer(
        self, membership: Membership, missing: set[bytes], ask: Ask, told: Callable[[Answer], None]
    ) -> None:
        """Send manifests, puts and digests; the server answers in order, so the last answer ends it."""
        offers = membership.offers()
        missing |= {one.manifest_fp for one in offers if isinstance(one, m.Put)} - {
            membership.request.manifest_fp
        }
        for name in sorted(missing & self.manifests.keys()):
            manifest = self.manifests[name]
            blob = manifest if isinstance(manifest, bytes) else manifest.encode()
            ask(m.PutManifest(membership.fence, name, blob), _log_refusal)
        for offer in [*membership.bindings(), *offers]:
            ask(offer, _log_refusal)
        ask(m.Heartbeat(membership.fence, self._count(membership)), told)

    # --- signs of life

    def beat(self, now: float, ask: Ask) -> None:
        """Send the heartbeats that are due."""
        for membership in self.members():
            if membership.error is None and not membership.beating and membership.next_beat <= now:
                self._beat(membership, now, ask)

    def next_beat(self) -> float:
        """Return when the next heartbeat is due; infinity without a member."""
        due = [one.next_beat for one in self.members() if one.error is None and not one.beating]
        return min(due, default=float("inf"))

    def disconnected(self) -> None:
        """Forget heartbeats under way: their answers were lost."""
        for membership in self.members():
            membership.beating, membership.next_beat = False, 0.0

    def _beat(self, membership: Membership, now: float, ask: Ask) -> None:
        def answered(answer: Answer) -> None:
            membership.beating = False
            if isinstance(answer, FencedError):
                self._rejoin(membership, ask)

        membership.beating = True
        membership.next_beat = now + min(self._heartbeat, membership.lease / _BEATS_A_LEASE)
        ask(m.Heartbeat(membership.fence, self._count(membership)), answered)

    def _rejoin(self, membership: Membership, ask: Ask) -> None:
        """Come back after the lease was lost; whoever has taken the rank meanwhile keeps it."""

        def claimed(answer: Answer) -> None:
            membership.beating = False
            self._rejoined(membership, answer)

        membership.beating = True
        ask(membership.claim(), claimed)

    def _count(self, membership: Membership) -> int:
        progress = membership.progress or self.progress
        if progress is None:
            return 0
        try:
            return progress()
        except Exception:  # the user's code; the lease does not depend on it
            logger.exception("the progress callable failed")
            return 0


def _slot(membership: Membership) -> tuple[str, str | None, int]:
    request = membership.request
    instance = request.instance if isinstance(request, m.RegisterReader) else None
    return request.table, instance, request.rank


def _log_refusal(answer: Answer) -> None:
    if isinstance(answer, SynclineError):
        logger.warning("the new MetaServer refused a part of the refill: %s", answer)
