"""Leases and pins: two clocks that must not be mixed up.

A *lease* says that a member lives: any request renews it. A *pin* says that somebody still reads a version:
only bytes keep it. A reader that is stuck while its heartbeat thread beats keeps its lease and loses its pin.
"""

from __future__ import annotations

from dataclasses import dataclass


class Leases:
    """Expiry times of members, in seconds on the clock that is passed in."""

    def __init__(self, duration: float) -> None:
        self.duration = duration
        self.expires: dict[int, float] = {}

    def renew(self, member: int, now: float) -> None:
        """Count from ``now`` again."""
        self.expires[member] = now + self.duration

    def drop(self, member: int) -> None:
        """Forget a member that ended."""
        self.expires.pop(member, None)

    def expired(self, now: float) -> list[int]:
        """Return the members whose lease ran out, oldest registration first."""
        return sorted(member for member, at in self.expires.items() if at <= now)


@dataclass(slots=True)
class Pin:
    """One member's hold on one version.

    Attributes:
        who: the holder in words, for messages.
        instance: the holder's instance, empty for a retention pin of somebody else.
        attempt: the update attempt that it serves; 0 for plain retention.
        until: end in any case, whatever moves.
        moved: when bytes last moved.
        nbytes: bytes moved, as last reported for this attempt.
        awaiting: whether the holder has read everything and waits for the writers' digests, which stops the
            clock of its stall while that wait lasts.
        answered: whether that wait has ended; there is one.
    """

    who: str
    instance: str
    attempt: int
    until: float
    moved: float
    nbytes: int = 0
    awaiting: bool = False
    answered: bool = False

    def advance(self, nbytes: int, now: float) -> None:
        """Count a report; only more bytes than before are progress."""
        if nbytes > self.nbytes:
            self.nbytes, self.moved = nbytes, now

    def ends(self, stall: float) -> float:
        """Return when the pin is revoked if nothing moves any more."""
        stalls = self.attempt and not self.awaiting
        return min(self.until, self.moved + stall) if stalls else self.until
