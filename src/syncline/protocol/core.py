"""What all rules of the protocol share: members and their fences, tables, waits, events."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncline.errors import FencedError, ProtocolError, SynclineError, UnknownVersionError
from syncline.protocol.lease import Leases, Pin
from syncline.protocol.replies import Event

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncline.protocol.ids import Fence, VersionKey
    from syncline.protocol.instance import Instance
    from syncline.protocol.messages import Reply
    from syncline.protocol.parts import Message
    from syncline.protocol.version import Version
    from syncline.protocol.writers import WriterGroup

MAX_DEADLINE = 86400.0
MAX_ENDED = 256  # fences whose end is remembered, for the message only


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times in seconds, and bounds.

    Attributes:
        lease: a member not heard of for this long is dead.
        stall: a pin whose bytes did not move for this long is revoked.
        recovery: after a restart, how long the writers of the newest epoch may take to come back.
        history: versions kept a table.
        events: events kept for watchers.
    """

    lease: float = 10.0
    stall: float = 10.0
    recovery: float = 30.0
    history: int = 16
    events: int = 1024


@dataclass(frozen=True, slots=True)
class Member:
    """One registered process in one role. ``instance`` is None for a writer; rank -1 is a controller."""

    number: int
    table: str
    epoch: int
    instance: str | None
    rank: int
    process: str
    previous: Fence | None
    host: str
    endpoint: str
    manifest_fp: bytes
    options: tuple[tuple[str, str], ...]
    rules: bytes = b""

    @property
    def who(self) -> str:
        """The member in words, as errors and events name it."""
        if self.instance is None:
            return f"writer {self.rank}"
        return f"instance {self.instance}, " + ("controller" if self.rank < 0 else f"rank {self.rank}")


@dataclass(slots=True)
class Table:
    """One table: its writers' newest epoch, its versions and its reader instances.

    Attributes:
        epoch: the newest epoch known, from the run directory, registrations and claims.
        sealed: the newest version known to have been sealed.
        recovering: after a restart: the newest epoch's writers are not all back, and their time is not up.
        refusals: who could not register -> (instance or None, error fields, until when it counts).
    """

    name: str
    epoch: int
    recovering: bool
    group: WriterGroup | None = None
    sealed: VersionKey | None = None
    versions: dict[VersionKey, Version] = field(default_factory=dict)
    instances: dict[str, Instance] = field(default_factory=dict)
    refusals: dict[str, tuple[str | None, dict[str, str | None], float]] = field(default_factory=dict)

    def lacks(self) -> str:
        """Name the writers that are missing, for a message."""
        if self.group is None:
            return "all writers (none has registered" + (" again)" if self.recovering else ")")
        return self.group.names()


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes that one member stored, for others to fetch by name."""

    owner: int
    blob: bytes


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a handler returns that cannot answer yet: whom it waits for, in words."""

    whom: str


@dataclass(frozen=True, slots=True)
class Wait:
    """A deferred request, re-examined whenever anything changed."""

    ticket: int
    request: Message
    member: int | None
    since: float
    until: float


@dataclass(frozen=True, slots=True)
class Resolved:
    """The end of a deferred request: a reply or an error."""

    ticket: int
    reply: Reply | None
    error: SynclineError | None


class Core:
    """State of one job's control plane, without the rules for requests."""

    def __init__(self, job: str, boot: int, epochs: Mapping[str, int], timing: Timing, now: float) -> None:
        self.job, self.boot, self.timing, self.now, self.started = job, boot, timing, now, now
        self.restarted = boot > 1
        self.members: dict[int, Member] = {}
        self.ended: dict[int, str] = {}
        self.progress: dict[int, int] = {}
        self.leases = Leases(timing.lease)
        self.manifests: dict[bytes, bytes] = {}
        self.bindings: dict[bytes, Blob] = {}
        self.tables: dict[str, Table] = {}
        self.waits: dict[int, Wait] = {}
        self.resolved: list[Resolved] = []
        self.seq = self.last_member = self.last_ticket = 0
        # Attempts grow over all instances and boots: "newer than the one I saw" keeps its meaning.
        self.last_attempt = (boot - 1) << 32
        self.log: deque[Event] = deque(maxlen=timing.events)
        self.outbox: deque[Event] = deque(maxlen=timing.events)
        for name, epoch in epochs.items():
            self.tables[name] = Table(name, epoch, self.restarted)

    # --- who speaks

    def check(self, fence: Fence, table: str | None = None) -> Member:
        """Return the live member behind a fence and renew its lease.

        Raises:
            FencedError: another job or boot, an ended member, a superseded epoch or attempt.
            ProtocolError: the member belongs to another table.
        """
        pairs = (("job", self.job, fence.job), ("boot", self.boot, fence.boot))
        for what, expected, found in pairs:
            if expected != found:
                raise FencedError(
                    f"the request carries another {what}",
                    expected=f"{what} {expected}",
                    found=f"{what} {found}",
                    hint="the server was restarted: register again" if what == "boot" else None,
                )
        member = self.members.get(fence.member)
        if member is None:
            reason = self.ended.get(fence.member, "it is not registered")
            raise FencedError(f"member {fence.member} was superseded: {reason}", hint="register again")
        if fence.epoch != member.epoch:
            raise FencedError(
                "the request carries another epoch", rank=member.who, expected=member.epoch, found=fence.epoch
            )
        self._check_attempt(fence, member)
        if table is not None and table != member.table:
            raise ProtocolError(
                "the member belongs to another table", rank=member.who, expected=member.table, found=table
            )
        self.leases.renew(member.number, self.now)
        return member

    def _check_attempt(self, fence: Fence, member: Member) -> None:
        if not fence.attempt:
            return
        attempts = self.instance_of(member).attempts if member.instance is not None else 0
        if fence.attempt != attempts:
            raise FencedError(
                "the request carries a superseded attempt",
                rank=member.who,
                expected=f"attempt {attempts}",
                found=f"attempt {fence.attempt}",
            )

    def instance_of(self, member: Member) -> Instance:
        """Return the instance of a reader."""
        return self.tables[member.table].instances[member.instance or ""]

    # --- what is meant

    def table(self, name: str) -> Table:
        """Return a table, made at its first mention by a registration."""
        return self.tables.setdefault(name, Table(name, 0, self.restarted and self.recovery_left > 0))

    @property
    def recovery_left(self) -> float:
        """Seconds that the writers of before a restart may still take to come back."""
        return self.started + self.timing.recovery - self.now if self.restarted else 0.0

    def version(self, member: Member, key: VersionKey) -> Version:
        """Return a known version.

        Raises:
            UnknownVersionError: never published, forgotten, or not yet put again after a restart.
        """
        version = self.tables[member.table].versions.get(key)
        if version is None:
            known = [str(one) for one in sorted(self.tables[member.table].versions)]
            raise UnknownVersionError(
                f"version {key} is not known", rank=member.who, expected=f"one of {known}", found=key
            )
        return version

    # --- pins

    def revoke(self, table: Table, version: Version, holder: tuple[int, int], why: str) -> None:
        """Take one pin; the attempt behind it, with all its other pins, can never commit."""
        pin = version.revoke(holder)
        self.tell("revoked", table.name, version.key, pin.instance, detail=f"{pin.who}: {why}")
        if pin.attempt:
            reason = f"the pin of {pin.who} was revoked: {why}"
            self.end_attempt(table, table.instances[pin.instance], reason, revoked=True)

    def drop_pins(self, version: Version, instance: str) -> None:
        """Drop all update pins that an instance has on a version: its attempt is over."""
        for holder in [one for one, pin in version.pins.items() if pin.attempt and pin.instance == instance]:
            del version.pins[holder]

    def end_attempt(self, table: Table, instance: Instance, reason: str, *, revoked: bool = False) -> None:
        """Fail an instance's undecided attempt, if there is one, and drop its pins."""
        attempt = instance.active
        if attempt is None or not instance.fail(reason, revoked=revoked):
            return
        self.tell("failed", table.name, attempt.key, instance.name, detail=reason)
        version = table.versions.get(attempt.key)
        if version is not None:
            self.drop_pins(version, instance.name)

    # --- events

    def tell(
        self,
        kind: str,
        table: str,
        key: VersionKey | None = None,
        instance: str = "",
        rank: int = -2,
        detail: str = "",
    ) -> None:
        """Append one event."""
        self.seq += 1
        event = Event(self.seq, kind, table, key, instance, rank, detail)
        self.log.append(event)
        self.outbox.append(event)


def check_deadline(seconds: float) -> float:
    """Return a deadline or time to live that is usable.

    Raises:
        ProtocolError: negative, not a number, or longer than a day.
    """
    if not math.isfinite(seconds) or not 0 <= seconds <= MAX_DEADLINE:
        raise ProtocolError("not a usable deadline", expected=f"0 to {MAX_DEADLINE:g} seconds", found=seconds)
    return seconds


def pin_of(version: Version, member: Member, attempt: int) -> Pin | None:
    """Return the pin that a member holds for one attempt."""
    return version.pins.get((member.number, attempt))
