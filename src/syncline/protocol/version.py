"""One version of a table: OPEN -> SEALED -> RETIRED, or OPEN -> ABORTED, SEALED -> BROKEN.

Steps in which a process can die, and what the state is then: a writer before its put (OPEN: ABORTED once its
lease ends); after the last put (SEALED: BROKEN by name, readers that hold a pin may finish if all digests are
there); a reader at any time (its pins drop).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from syncline.errors import ProtocolError, VersionAbortedError

if TYPE_CHECKING:
    from syncline.protocol.ids import VersionKey
    from syncline.protocol.lease import Pin
    from syncline.protocol.parts import InstanceLayout, Source, WriterSource

MAX_PLANS = 8  # plans (memberships) a version can serve; a late instance makes a new one


class VersionState(StrEnum):
    """Life cycle of a version."""

    OPEN = "OPEN"
    SEALED = "SEALED"
    RETIRED = "RETIRED"
    ABORTED = "ABORTED"
    BROKEN = "BROKEN"


class Version:
    """State of one version. Pins are keyed by (member, attempt), attempt 0 being plain retention.

    Attributes:
        puts: writer rank -> where its shards lie.
        closed: writer ranks whose memory takes no new pin.
        digests: plan id -> writer rank -> blob.
        memberships: the plans' memberships, the newest last.
        revoked: who lost a pin, in order.
        torn: members that lost a retention pin and have not been told.
    """

    def __init__(
        self, key: VersionKey, world: int, source: Source, members: tuple[InstanceLayout, ...]
    ) -> None:
        self.key, self.world = key, world
        self.source: Source = source
        self.state = VersionState.OPEN
        self.reason = ""
        self.puts: dict[int, WriterSource] = {}
        self.closed: set[int] = set()
        self.pins: dict[tuple[int, int], Pin] = {}
        self.digests: dict[bytes, dict[int, bytes]] = {}
        self.memberships: list[tuple[InstanceLayout, ...]] = [members]
        self.revoked: list[str] = []
        self.torn: set[int] = set()

    # --- writers

    @property
    def missing(self) -> list[int]:
        """Writer ranks that have not put."""
        return [rank for rank in range(self.world) if rank not in self.puts]

    def put(self, place: WriterSource) -> None:
        """Record one rank's put; the same put again changes nothing.

        Raises:
            VersionAbortedError: the version cannot be sealed any more.
            ProtocolError: this rank put other contents before, or another kind of source than its peers.
        """
        known = self.puts.get(place.rank)
        if known is not None:
            if _contents(known) != _contents(place):
                raise ProtocolError(
                    f"version {self.key} was put twice with different contents",
                    rank=f"writer {place.rank}",
                    expected=f"binding generation {known.binding_generation}",
                    found=f"binding generation {place.binding_generation}",
                    hint="a version is immutable: publish a new number",
                )
            return
        if self.state is not VersionState.OPEN:
            raise VersionAbortedError(
                f"version {self.key} is {self.state}: {self.reason}", rank=f"writer {place.rank}"
            )
        if place.source != self.source:
            raise ProtocolError(
                f"the ranks of version {self.key} offer different sources",
                rank=f"writer {place.rank}",
                expected=self.source,
                found=place.source,
            )
        self.puts[place.rank] = place

    def seal(self) -> bool:
        """Seal if every rank has put; say whether that happened now."""
        if self.state is not VersionState.OPEN or self.missing:
            return False
        self.state = VersionState.SEALED
        return True

    def retire(self) -> bool:
        """Retire if a writer closed its window and nobody reads any more; say whether that happened now."""
        if self.state is not VersionState.SEALED or not self.closed or self.pins:
            return False
        self.state = VersionState.RETIRED
        return True

    def fail(self, reason: str) -> bool:
        """Lose a source: OPEN becomes ABORTED, SEALED becomes BROKEN; say whether the state changed."""
        following = {VersionState.OPEN: VersionState.ABORTED, VersionState.SEALED: VersionState.BROKEN}
        if self.state not in following:
            return False
        self.state, self.reason = following[self.state], reason
        return True

    # --- readers

    @property
    def pinnable(self) -> bool:
        """Whether a new pin can be had: sealed, and every writer still offers its memory."""
        return self.state is VersionState.SEALED and not self.closed

    def release(self, member: int, attempt: int) -> None:
        """Drop a pin whose holder has read what it wanted."""
        self.pins.pop((member, attempt), None)

    def revoke(self, holder: tuple[int, int]) -> Pin:
        """Take a pin from its holder: what it read may be torn from now on."""
        pin = self.pins.pop(holder)
        self.revoked.append(pin.who)
        if not pin.attempt:
            self.torn.add(holder[0])
        return pin

    # --- proof

    def undigested(self, plan_id: bytes) -> list[int]:
        """Writer ranks whose digests under this plan are missing."""
        known = self.digests.get(plan_id, {})
        return [rank for rank in range(self.world) if rank not in known]

    def digest(self, rank: int, plan_id: bytes, blob: bytes) -> bool:
        """Record a rank's digests; say whether the plan's are complete by that.

        Raises:
            ProtocolError: other digests than this rank gave before, or more plans than can be served.
        """
        if plan_id not in self.digests and len(self.digests) >= MAX_PLANS:
            raise ProtocolError(
                f"digests of too many plans for version {self.key}", expected=f"at most {MAX_PLANS}"
            )
        known = self.digests.setdefault(plan_id, {})
        if known.setdefault(rank, blob) != blob:
            raise ProtocolError(
                f"digests of version {self.key} changed between two reports",
                rank=f"writer {rank}",
                hint="the weights changed inside the read window: call the mutation hook before they do",
            )
        return not self.undigested(plan_id)

    def owed(self, rank: int) -> tuple[tuple[InstanceLayout, ...], ...]:
        """Return the memberships that this rank has yet to serve, taken to be served in their order."""
        served = sum(rank in known for known in self.digests.values())
        return tuple([membership for membership in self.memberships if membership][served:])

    def admit(self, layout: InstanceLayout) -> bool:
        """Take an instance into the version's plan; say whether that makes a new plan."""
        newest = self.memberships[-1]
        if layout in newest:
            return False
        if len(self.memberships) >= MAX_PLANS:
            raise ProtocolError(
                f"version {self.key} serves {MAX_PLANS} plans already",
                rank=f"instance {layout.name}",
                hint="take the next version: its plan counts every instance that is registered by then",
            )
        others = [one for one in newest if one.name != layout.name]
        self.memberships.append(tuple(sorted([*others, layout], key=lambda one: one.name)))
        return True


def _contents(place: WriterSource) -> tuple[bytes, int, bytes, str]:
    return place.manifest_fp, place.binding_generation, place.binding_fp, place.source
