"""What the MetaServer answers, and the events that it tells."""

from __future__ import annotations

import msgspec

from syncline.protocol.ids import Fence, VersionKey  # noqa: TC001 - msgspec reads the annotations at run time
from syncline.protocol.parts import InstanceLayout, Level, Message, RankLayout, Source, WriterSource


class Done(Message, frozen=True):
    """The request took effect; nothing more to say."""


class Registered(Message, frozen=True):
    """Membership granted.

    Attributes:
        boot: the server's boot number.
        epoch: the table's newest epoch.
        missing: fingerprints that the server lacks: send them by `PutManifest`.
        lease: seconds without a request after which the member is dead.
        committed: reader: what the instance committed.
        dirty: reader: whether the instance needs a full update before it may serve.
        applying: reader: a commit stands whose acknowledgements are missing; apply it and go on.
    """

    fence: Fence
    boot: int
    epoch: int
    missing: tuple[bytes, ...]
    lease: float
    committed: VersionKey | None = None
    dirty: bool = False
    applying: VersionKey | None = None


class Members(Message, frozen=True):
    """Who is complete now: the newest epoch's writers, rank 0 first, and every complete instance by name."""

    epoch: int
    writers: tuple[RankLayout, ...]
    instances: tuple[InstanceLayout, ...]


class ManifestBlob(Message, frozen=True):
    """An encoded manifest."""

    manifest_fp: bytes
    blob: bytes


class BindingBlob(Message, frozen=True):
    """A writer's encoded binding."""

    binding_fp: bytes
    blob: bytes


class PutDone(Message, frozen=True):
    """The put was recorded.

    Attributes:
        membership: instances of the version's plan, by name; every rank of the version is told the same.
    """

    key: VersionKey
    state: str
    membership: tuple[InstanceLayout, ...]


class DigestBlobs(Message, frozen=True):
    """Digests by writer rank, rank 0 first."""

    blobs: tuple[bytes, ...]


class WindowClosed(Message, frozen=True):
    """No reader reads this rank's live memory any more in a way that could be committed.

    Attributes:
        state: the version's state now.
        reason: why it is ABORTED or BROKEN, naming ranks; empty otherwise.
        revoked: whose pins were revoked while closing, for example ``"instance b, rank 1"``.
        missed: live instances that neither pulled the version nor failed.
        failed: instance -> why it failed.
        owed: memberships whose digests this rank has not delivered and a reader may still ask for.
    """

    key: VersionKey
    state: str
    reason: str
    revoked: tuple[str, ...]
    missed: tuple[str, ...]
    failed: dict[str, str]
    owed: tuple[tuple[InstanceLayout, ...], ...]


class CommitSummary(Message, frozen=True):
    """Which instances committed a version, and why others failed (instance -> reason)."""

    key: VersionKey
    committed: tuple[str, ...]
    failed: dict[str, str]


class Begun(Message, frozen=True):
    """An update attempt: pins are granted to all worker ranks of the instance.

    Attributes:
        writers: where the version lies, rank 0 first.
        membership: instances of the version's plan, by name: with the writers, the plan's input.
        committed: what the instance committed before: the ``from_`` of the commit.
        level: what must be proved before a rank reports `Verified`.
    """

    key: VersionKey
    attempt: int
    writers: tuple[WriterSource, ...]
    membership: tuple[InstanceLayout, ...]
    committed: VersionKey | None
    level: Level = "delivered"


class AllVerified(Message, frozen=True):
    """Every rank of the instance has verified; ``reports`` are their figures, rank 0 first."""

    reports: tuple[dict[str, int | float | str], ...]


class Decision(Message, frozen=True):
    """What became of an attempt: committed, or why not."""

    committed: bool
    reason: str


class Pull(msgspec.Struct, frozen=True):
    """An instance that pulls: the attempt as its workers know it, and their endpoints by rank."""

    instance: str
    begun: Begun
    endpoints: tuple[str, ...]


class Pulls(Message, frozen=True):
    """Instances whose pull a writer has not seen yet."""

    pulls: tuple[Pull, ...]


class Current(Message, frozen=True):
    """The instance serves this version already; nothing to do."""

    key: VersionKey


class Committed(Message, frozen=True):
    """The decision stands, whatever happens to the controller; ``applying``: ranks yet to acknowledge."""

    key: VersionKey
    applying: tuple[int, ...]


class AppliedDone(Message, frozen=True):
    """Acknowledged; ``serving`` once every rank has."""

    serving: bool


class Pinned(Message, frozen=True):
    """A retention pin on a version, with its places."""

    key: VersionKey
    writers: tuple[WriterSource, ...]


class VersionStatus(msgspec.Struct, frozen=True):
    """One version; ``put`` and ``closed`` are writer ranks, ``pins`` their holders by name."""

    key: VersionKey
    state: str
    source: Source
    reason: str
    put: tuple[int, ...]
    closed: tuple[int, ...]
    pins: tuple[str, ...]


class InstanceStatus(msgspec.Struct, frozen=True):
    """One instance; ``missing`` are worker ranks without a live process (-1: the controller)."""

    name: str
    world: int
    state: str
    committed: VersionKey | None
    target: VersionKey | None
    attempt: int
    dirty: bool
    serving: bool
    applying: tuple[int, ...]
    missing: tuple[int, ...]
    failure: str
    nbytes: dict[int, int]


class TableStatus(msgspec.Struct, frozen=True):
    """One table; ``missing`` are writer ranks of the newest epoch without a live process."""

    name: str
    epoch: int
    world: int
    missing: tuple[int, ...]
    recovering: bool
    versions: tuple[VersionStatus, ...]
    instances: tuple[InstanceStatus, ...]


class Status(Message, frozen=True):
    """The job as the server sees it."""

    job: str
    boot: int
    seq: int
    tables: tuple[TableStatus, ...]


class Event(msgspec.Struct, frozen=True):
    """Something that happened.

    Attributes:
        seq: grows by one; a watcher asks for what follows the last one it saw.
        kind: joined, left, lost, refused, epoch, opened, sealed, retired, aborted, broken, digested, plan,
            began, verified, failed, revoked, committed, serving.
    """

    seq: int
    kind: str
    table: str
    key: VersionKey | None = None
    instance: str = ""
    rank: int = -2
    detail: str = ""


class Events(Message, frozen=True):
    """Events in order; ``lost`` if older ones were dropped before they were asked for."""

    events: tuple[Event, ...]
    lost: bool
