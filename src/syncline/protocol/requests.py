"""What members ask of the MetaServer. Every ``deadline`` is in seconds from the request's arrival."""

from __future__ import annotations

import msgspec

from syncline.protocol.ids import Fence, VersionKey  # noqa: TC001 - msgspec reads the annotations at run time
from syncline.protocol.parts import Level, Message, Mode, Source, Until

# --- membership


class RegisterWriter(Message, frozen=True):
    """Join a table as one of its ``world`` writer ranks; answered by `Registered`.

    Without ``previous`` the process joins the newest epoch if that still assembles, its rank is free there
    and ``world`` agrees; otherwise it opens a new epoch and fences the older one's writers. With
    ``previous`` it comes back to its own epoch, or meets `FencedError` if a newer one exists.

    Attributes:
        process: random text of this process, equal in every repetition of the request.
        manifest_fp: fingerprint of the rank's manifest.
        previous: the fence held before the connection, the lease or the server was lost.
        last: the newest version that this rank put, if any.
        options: settings on which all members of a table must agree where they name the same one.
        rules: what this side allows, for the planner; opaque here.
    """

    table: str
    rank: int
    world: int
    manifest_fp: bytes
    host: str
    endpoint: str
    process: str
    previous: Fence | None = None
    last: VersionKey | None = None
    options: dict[str, str] = msgspec.field(default_factory=dict)
    rules: bytes = b""


class RegisterReader(Message, frozen=True):
    """Join a table as rank 0..world-1 of a reader instance, or as its controller (rank -1, no manifest).

    A new process in an occupied slot fences the old one. A rank whose ``committed`` differs from what the
    instance committed makes the instance DIRTY.

    Attributes:
        process: random text of this process, equal in every repetition of the request.
        previous: the fence held before the connection, the lease or the server was lost.
        committed: the version that this rank's live parameters hold (controller: the last it saw committed).
        dirty: whether the live parameters were touched since, by an update that did not finish.
        options: settings on which all members of a table must agree where they name the same one.
        rules: what this side allows, for the planner; opaque here.
    """

    table: str
    instance: str
    rank: int
    world: int
    manifest_fp: bytes
    host: str
    endpoint: str
    process: str
    previous: Fence | None = None
    committed: VersionKey | None = None
    dirty: bool = False
    options: dict[str, str] = msgspec.field(default_factory=dict)
    rules: bytes = b""


class JoinFailed(Message, frozen=True):
    """A process that could not register says why, so that nobody waits for it (no fence: it has none)."""

    table: str
    who: str
    error: dict[str, str | None]
    instance: str | None = None
    process: str = ""


class AwaitMembers(Message, frozen=True):
    """Wait until the writers are complete and the named instances are too; answered by `Members`.

    Deferred. `DeadlineError` names the missing ranks; a `JoinFailed` of an awaited party raises its reason at
    once.

    Attributes:
        writers: whether to wait for all ranks of the newest epoch.
        instances: names of reader instances to wait for.
    """

    fence: Fence
    table: str
    deadline: float
    writers: bool = True
    instances: tuple[str, ...] = ()


class Heartbeat(Message, frozen=True):
    """Renew the lease; ``progress`` is the member's own running count of bytes moved. Answered by `Done`."""

    fence: Fence
    progress: int = 0


class Deregister(Message, frozen=True):
    """Leave in good order; the reason is told to whoever waits for this member. Answered by `Done`."""

    fence: Fence
    reason: str = ""


class PutManifest(Message, frozen=True):
    """Store an encoded manifest under its fingerprint, which the server checks. Answered by `Done`."""

    fence: Fence
    manifest_fp: bytes
    blob: bytes


class GetManifest(Message, frozen=True):
    """Fetch an encoded manifest; deferred until somebody has stored it. Answered by `ManifestBlob`."""

    fence: Fence
    manifest_fp: bytes
    deadline: float


class PutBinding(Message, frozen=True):
    """Store a writer's encoded binding under its hash, which the server checks. Answered by `Done`."""

    fence: Fence
    binding_fp: bytes
    blob: bytes


class GetBinding(Message, frozen=True):
    """Fetch a writer's binding; deferred until the writer has stored it. Answered by `BindingBlob`."""

    fence: Fence
    binding_fp: bytes
    deadline: float


# --- versions


class Put(Message, frozen=True):
    """One writer rank offers its shards of version ``number``; the first opens it, the last seals it.

    The number must exceed every number of the epoch, unless ``refill`` says that the version was put under an
    earlier boot of the server. Answered by `PutDone`.

    Attributes:
        binding_generation: generation of the binding; a program bound to another one is refused.
        binding_fp: hash of the rank's binding, as put by `PutBinding`.
        refill: put again after a restart of the server.
        closed: the rank's window on this version is closed already (refill only).
    """

    fence: Fence
    table: str
    number: int
    manifest_fp: bytes
    binding_generation: int
    source: Source
    binding_fp: bytes
    refill: bool = False
    closed: bool = False


class Digests(Message, frozen=True):
    """One writer rank's digests of a version, under one plan. Answered by `Done`."""

    fence: Fence
    table: str
    key: VersionKey
    plan_id: bytes
    blob: bytes


class FetchDigests(Message, frozen=True):
    """All writers' digests of a version under one plan; deferred, answered by `DigestBlobs`."""

    fence: Fence
    table: str
    key: VersionKey
    plan_id: bytes
    deadline: float


class AbortVersion(Message, frozen=True):
    """A writer gives a version up: OPEN becomes ABORTED, SEALED becomes BROKEN. Answered by `Done`."""

    fence: Fence
    table: str
    key: VersionKey
    reason: str


class CloseWindow(Message, frozen=True):
    """Before a writer rank changes its weights: no new pin, wait for those held; answered by `WindowClosed`.

    Deferred until the version is sealed (or cannot be any more) and every pin on live memory of this version
    and of older ones is drained or revoked. ``until="pulled"`` first leaves the window open until every live
    instance has pulled the version or failed. At the deadline an OPEN version is ABORTED, pins are revoked,
    and the reply says so: a writer that got a reply may always change its weights.

    Attributes:
        evict: give up a snapshot's image too; without it, closing leaves a snapshot version in service.
    """

    fence: Fence
    table: str
    key: VersionKey
    deadline: float
    until: Until = "drained"
    evict: bool = False


class WaitCommitted(Message, frozen=True):
    """Wait until every live instance committed ``key`` or failed; deferred, answered by `CommitSummary`."""

    fence: Fence
    table: str
    key: VersionKey
    deadline: float


# --- updates of an instance


class BeginUpdate(Message, frozen=True):
    """An instance's controller asks for a version; answered by `Begun`, or `Current` if it is there already.

    ``number`` None means the newest sealed version; deferred while there is none to take, or while a future
    number is not sealed. `StaleVersionError` at once for an older one, `UnknownVersionError` for one that no
    longer can be had. Grants a pin to every worker rank; ``in_place`` makes the instance DIRTY at once.

    Attributes:
        deadline: of the wait and of the whole update: pins left at its end are revoked.
        nonce: chosen by the controller, equal in repetitions; another nonce starts a new attempt.
        after: only versions newer than this one will do (`follow`).
        level: what must have been proved before a commit; "none" commits without the writers' digests.
    """

    fence: Fence
    table: str
    number: int | None
    mode: Mode
    deadline: float
    nonce: int
    after: VersionKey | None = None
    level: Level = "delivered"


class StartUpdate(Message, frozen=True):
    """The controller has paused its engine: worker ranks may write. Answered by `Done`."""

    fence: Fence
    table: str
    key: VersionKey
    attempt: int


class AwaitUpdate(Message, frozen=True):
    """A worker rank waits for a started attempt newer than ``after``; deferred, answered by `Begun`."""

    fence: Fence
    table: str
    after: int
    deadline: float


class AwaitBound(Message, frozen=True):
    """A worker rank found the memory of both sides, and waits until all ranks did; then it may write.

    Deferred, answered by `Done`. A rank that cannot take part so fails before any other has written.
    """

    fence: Fence
    table: str
    key: VersionKey
    attempt: int
    deadline: float


class AwaitDirty(Message, frozen=True):
    """An instance's controller waits for the instance to become DIRTY without an update of its own.

    Deferred while the instance is whole or an update runs, answered by `Done`: it must not serve.
    """

    fence: Fence
    table: str
    deadline: float


class AwaitVerified(Message, frozen=True):
    """The controller waits until every rank has verified; deferred, answered by `AllVerified`.

    Raises what the rank that failed first met; the reason if the attempt ends otherwise.
    """

    fence: Fence
    table: str
    key: VersionKey
    attempt: int
    deadline: float


class AwaitDecision(Message, frozen=True):
    """A worker rank that verified waits for the controller; deferred, answered by `Decision`."""

    fence: Fence
    table: str
    key: VersionKey
    attempt: int
    deadline: float


class AwaitPulls(Message, frozen=True):
    """A writer that must send waits for instances to pull; deferred, answered by `Pulls`.

    Attributes:
        served: the newest attempt that this writer has seen, by instance.
    """

    fence: Fence
    table: str
    served: dict[str, int]
    deadline: float


class Progress(Message, frozen=True):
    """A worker rank moved bytes: ``nbytes`` of this attempt so far. Keeps its pin. Answered by `Done`."""

    fence: Fence
    table: str
    key: VersionKey
    attempt: int
    nbytes: int


class Verified(Message, frozen=True):
    """A worker rank holds all its bytes, proved at the update's level; releases its pin. Answered by `Done`.

    Attributes:
        plan_id: the plan that it pulled by; all ranks' must agree, and the writers' digests be of it.
        nbytes: bytes received.
        planned: bytes that the plan gives to this rank; anything else than ``nbytes`` is refused.
        report: figures for display, never acted on.
    """

    fence: Fence
    table: str
    key: VersionKey
    attempt: int
    plan_id: bytes
    nbytes: int
    planned: int
    report: dict[str, int | float | str] = msgspec.field(default_factory=dict)


class Failed(Message, frozen=True):
    """A worker rank (or the controller) gives the attempt up; ``touched``: live memory was written.

    An in-place attempt of which every rank failed untouched leaves the instance as clean as it was. For a
    rank that was told to start only its own word counts: until it speaks, it may be about to write. Answered
    by `Done`; deferred while such ranks have not spoken, to a controller that gives a ``deadline``.
    """

    fence: Fence
    table: str
    key: VersionKey
    attempt: int
    error: dict[str, str | None]
    touched: bool = True
    deadline: float = 0.0


class Commit(Message, frozen=True):
    """The controller's decision: compare-and-set on (instance, epoch, from, to). Answered by `Committed`."""

    fence: Fence
    table: str
    instance: str
    from_: VersionKey | None
    to: VersionKey
    attempt: int


class Applied(Message, frozen=True):
    """A worker rank's live parameters hold the committed version. Answered by `AppliedDone`."""

    fence: Fence
    table: str
    key: VersionKey


class AwaitServing(Message, frozen=True):
    """Wait until all ranks of the instance have applied ``key``; deferred, answered by `Done`.

    Raises what a rank met that could not apply it.
    """

    fence: Fence
    table: str
    instance: str
    key: VersionKey
    deadline: float


# --- retention, status, events


class Pin(Message, frozen=True):
    """Keep a sealed version (None: newest) for ``ttl`` seconds, again to prolong; answered by `Pinned`."""

    fence: Fence
    table: str
    key: VersionKey | None
    ttl: float


class Unpin(Message, frozen=True):
    """Let a version go; `RevokedError` if the pin did not last: what was read may be torn. Else `Done`."""

    fence: Fence
    table: str
    key: VersionKey


class StatusQuery(Message, frozen=True):
    """Facts of one table, or of all; needs no fence. Answered by `Status`."""

    table: str | None = None


class Watch(Message, frozen=True):
    """Events after ``since``; deferred until there is one, empty at the deadline. Answered by `Events`."""

    since: int
    deadline: float
    limit: int = 256
