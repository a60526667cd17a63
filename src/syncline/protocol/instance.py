"""One reader instance: IDLE -> PULLING -> VERIFIED -> COMMITTED -> ..., and DIRTY beside it.

An instance is the ranks that take part in one forward pass, so it changes its version as a whole. It is
DIRTY from the moment an in-place attempt is granted (before the first byte), and from the moment a commit is
decided (ranks apply one after the other), until every rank has acknowledged one version. While it is DIRTY it
must not serve; only a full update, committed and acknowledged by all, cleans it.

Where a process can die: a worker while pulling (the attempt fails; DIRTY stays if it was in place), a worker
while applying (DIRTY until the next full update), the controller before the decision (the attempt fails), the
controller after it (the commit stands: its successor finds ``applying`` and goes on).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from syncline.errors import (
    FencedError,
    PlanError,
    ProtocolError,
    RevokedError,
    StaleVersionError,
    from_wire,
)

if TYPE_CHECKING:
    from syncline.protocol.ids import VersionKey
    from syncline.protocol.parts import InstanceLayout, Level, Mode

MAX_FAILURES = 4  # versions whose failure is remembered for the writers that wait


class InstanceState(StrEnum):
    """Where the instance stands in an update; DIRTY is a flag beside it."""

    IDLE = "IDLE"
    PULLING = "PULLING"
    VERIFIED = "VERIFIED"
    COMMITTED = "COMMITTED"


@dataclass(slots=True)
class Attempt:
    """One update attempt.

    Attributes:
        plans: worker rank -> plan id by which it verified its bytes.
        touched: worker rank -> whether it wrote live memory, told by the ranks that failed.
        moved: worker ranks that reported bytes.
        told: worker ranks that know that they may write.
        bound: worker ranks that know where every byte comes from and goes to.
        was_dirty: whether the instance was dirty before.
        failure: why the attempt can never commit; empty while it can.
        revoked: whether ``failure`` is the loss of a pin.
        error: what the first rank that failed met, as `syncline.errors.to_wire` says it.
        started: whether the engine is paused, so that worker ranks may write.
        reports: worker rank -> figures for display.
    """

    number: int
    key: VersionKey
    mode: Mode
    level: Level
    nonce: int
    membership: tuple[InstanceLayout, ...]
    was_dirty: bool
    plans: dict[int, bytes] = field(default_factory=dict)
    touched: dict[int, bool] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
    bound: set[int] = field(default_factory=set)
    failure: str = ""
    revoked: bool = False
    error: dict[str, str | None] | None = None
    started: bool = False
    reports: dict[int, dict[str, int | float | str]] = field(default_factory=dict)


class Instance:
    """State of one instance.

    Attributes:
        slots: rank -> live member; rank -1 is the controller.
        last: rank -> newest member that ever had the slot.
        holds: worker rank -> version that its live parameters hold, as it claimed or acknowledged.
        committed: the version that was committed last.
        attempts: number of the newest attempt.
        applying: ranks that have not acknowledged the commit that stands.
        failures: version -> why the newest attempt at it failed.
    """

    def __init__(self, name: str, world: int) -> None:
        self.name, self.world = name, world
        self.slots: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.holds: dict[int, VersionKey | None] = {}
        self.committed: VersionKey | None = None
        self.state = InstanceState.IDLE
        self.dirty = False
        self.attempt: Attempt | None = None
        self.attempts = 0
        self.nonce = -1
        self.applying: set[int] = set()
        self.failures: dict[VersionKey, str] = {}

    # --- who is there

    @property
    def missing(self) -> list[int]:
        """Ranks without a live process; -1 is the controller."""
        return [rank for rank in range(-1, self.world) if rank not in self.slots]

    @property
    def serving(self) -> bool:
        """Whether a forward pass may run: all ranks live and hold one version, and none is being changed."""
        return not self.missing and not self.dirty and not self.applying

    @property
    def active(self) -> Attempt | None:
        """The attempt that can still commit, if any."""
        attempt = self.attempt
        return attempt if attempt and not attempt.failure and self.pulling else None

    @property
    def pulling(self) -> bool:
        """Whether an attempt was begun and is not decided."""
        return self.state in (InstanceState.PULLING, InstanceState.VERIFIED)

    def claim(self, rank: int, committed: VersionKey | None, dirty: bool) -> None:
        """Take a registering process at its word about the weights that it holds."""
        if rank >= 0:
            self.holds[rank] = committed
        self.dirty |= dirty
        if committed is not None and (self.committed is None or committed > self.committed):
            self.committed, self.state = committed, InstanceState.COMMITTED
            self.applying.clear()
        present = {self.holds[r] for r in (*self.slots, rank) if r >= 0}
        if present - {self.committed}:
            # Ranks that disagree hold a mixture, whoever is right.
            self.dirty = True

    def lose(self, rank: int, reason: str) -> None:
        """Do without a rank that ended: an undecided attempt fails, a half-applied commit stays DIRTY."""
        self.slots.pop(rank, None)
        self.fail(reason)
        if rank < 0:
            self.nonce = -1  # a new controller counts for itself; a commit that was decided stands
            return
        if self.attempt and self.state is not InstanceState.COMMITTED:
            self.attempt.touched[rank] = True  # nobody can tell what a dead process wrote
        self.holds.pop(rank, None)
        if self.applying and self.committed is not None:
            self._remember(self.committed, reason)
        self.applying.clear()  # what the others apply from now on does not make the instance whole

    # --- one update

    def begin(self, attempt: Attempt) -> None:
        """Start an attempt; in place, the instance is DIRTY from here on."""
        self.attempts = attempt.number
        self.attempt, self.state = attempt, InstanceState.PULLING
        self.nonce = attempt.nonce
        self.failures.pop(attempt.key, None)
        self.applying.clear()
        if attempt.mode == "in_place":
            self.dirty = True

    def current(self, number: int, key: VersionKey, who: str) -> Attempt:
        """Return the newest attempt if the caller means that one.

        Raises:
            FencedError: the caller works for an attempt that was superseded, or never was.
            ProtocolError: right attempt, other version.
        """
        attempt = self.attempt
        if attempt is None or attempt.number != number:
            raise FencedError(
                f"update attempt {number} of instance {self.name} was superseded",
                rank=who,
                expected=f"attempt {self.attempts}",
                found=f"attempt {number}",
            )
        if attempt.key != key:
            raise ProtocolError(
                f"attempt {number} of instance {self.name} is at another version",
                rank=who,
                expected=attempt.key,
                found=key,
            )
        return attempt

    def alive(self, number: int, key: VersionKey, who: str) -> Attempt:
        """Return the attempt if it can still commit.

        Raises:
            RevokedError: its pin was revoked.
            FencedError, ProtocolError: as `current`; or the attempt failed otherwise.
        """
        attempt = self.current(number, key, who)
        if attempt.failure:
            kind = RevokedError if attempt.revoked else FencedError
            raise kind(
                f"attempt {number} of instance {self.name} at version {key} failed: {attempt.failure}",
                rank=who,
                hint="begin a new update",
            )
        return attempt

    @staticmethod
    def tell_error(attempt: Attempt) -> None:
        """Raise what a rank met, in its own class and words, if one failed at this attempt."""
        if attempt.error is not None:
            raise from_wire(attempt.error)

    def verified(self, rank: int, attempt: Attempt, plan_id: bytes) -> bool:
        """Count a rank that has proved its bytes; say whether it was the last one.

        Raises:
            ProtocolError: it reported another plan before.
        """
        if attempt.plans.setdefault(rank, plan_id) != plan_id:
            raise ProtocolError("a rank verified one attempt by two plans", rank=f"rank {rank}")
        if self.state is not InstanceState.PULLING or len(attempt.plans) < self.world:
            return False
        self.state = InstanceState.VERIFIED
        return True

    def fail(self, reason: str, *, revoked: bool = False) -> bool:
        """End an undecided attempt for ever; say whether there was one."""
        attempt = self.active
        if attempt is None:
            return False
        attempt.failure, attempt.revoked = reason, revoked
        self.state = InstanceState.IDLE
        self._remember(attempt.key, reason)
        return True

    def give_up(self, rank: int, attempt: Attempt, reason: str, touched: bool) -> None:
        """Take a rank's word that it stopped, and whether live memory was written.

        The controller (rank -1) speaks for ranks that were never told to start, and for no other: a rank may
        be about to write. If no rank wrote anything, the instance is as clean as before the attempt.
        """
        if self.state is InstanceState.COMMITTED:
            if rank in self.applying:
                self.applying.clear()  # a rank that could not apply leaves a mixture: DIRTY stays
                self._remember(attempt.key, reason)
            return
        self.fail(reason)
        wrote = touched or bool(attempt.moved) or bool(attempt.plans)
        untold = [one for one in range(self.world) if one not in attempt.told]
        for one in [rank] if rank >= 0 else untold:
            attempt.touched[one] = attempt.touched.get(one, False) or (touched if rank >= 0 else wrote)
        untouched = not any(attempt.touched.values()) and not attempt.plans
        if untouched and all(one in attempt.touched for one in range(self.world)):
            self.dirty = attempt.was_dirty

    def silent(self, attempt: Attempt) -> list[int]:
        """Return the ranks whose word decides whether anything was written; none once that is known."""
        wrote = attempt.plans or attempt.moved or any(attempt.touched.values())
        if wrote or self.state is InstanceState.COMMITTED:
            return []
        return sorted(attempt.told - attempt.touched.keys())

    def plan_of(self, attempt: Attempt) -> bytes:
        """Return the one plan by which all ranks verified.

        Raises:
            ProtocolError: ranks are missing, by number.
            PlanError: the ranks hold different plans.
        """
        absent = [rank for rank in range(self.world) if rank not in attempt.plans]
        if absent:
            raise ProtocolError(
                f"instance {self.name} cannot commit version {attempt.key} before every rank has verified it",
                expected=f"{self.world} ranks verified",
                found=f"ranks {absent} not verified",
            )
        plans = set(attempt.plans.values())
        if len(plans) > 1:
            raise PlanError(
                f"ranks of instance {self.name} verified by different plans",
                expected="one plan id",
                found={rank: plan.hex() for rank, plan in sorted(attempt.plans.items())},
            )
        return plans.pop()

    def check_from(self, from_: VersionKey | None, to: VersionKey) -> None:
        """Compare before the set.

        Raises:
            ProtocolError: the instance committed something else than the caller believes.
            StaleVersionError: the commit would go back.
        """
        if from_ != self.committed:
            raise ProtocolError(
                f"instance {self.name} committed another version than the caller believes",
                expected=f"from {self.committed}",
                found=f"from {from_}",
                hint="another controller decided; register again and take its decision",
            )
        if self.committed is not None and to < self.committed:
            raise StaleVersionError(
                f"instance {self.name} holds a newer version", expected=f"after {self.committed}", found=to
            )

    def commit(self, attempt: Attempt) -> None:
        """Record the decision: it stands from here on. The ranks apply, and the instance waits for them."""
        self.committed, self.state = attempt.key, InstanceState.COMMITTED
        self.applying = set(range(self.world))
        self.dirty = True

    def applied(self, rank: int, key: VersionKey) -> bool:
        """Count an acknowledgement; say whether it made the instance serve again.

        Raises:
            StaleVersionError: the commit was followed by another one, or never decided.
        """
        if key != self.committed:
            raise StaleVersionError(
                f"rank {rank} of instance {self.name} applied a version that is not the committed one",
                expected=self.committed,
                found=key,
            )
        self.holds[rank] = key
        if rank not in self.applying:
            return False
        self.applying.discard(rank)
        if self.applying:
            return False
        self.dirty = False
        return True

    def _remember(self, key: VersionKey, reason: str) -> None:
        self.failures.pop(key, None)
        self.failures[key] = reason
        while len(self.failures) > MAX_FAILURES:
            del self.failures[next(iter(self.failures))]
