"""What writers do: put versions, deliver digests, give versions up, close their windows.

A writer can die before its put (the version is ABORTED), between put and seal (ABORTED), after the seal
(BROKEN by name; those who hold a pin may finish if its digests are there), or while it waits to close its
window (the wait is dropped with it). It may change its weights only after `close_window` answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.errors import (
    FencedError,
    ProtocolError,
    StaleVersionError,
    UnknownVersionError,
    VersionAbortedError,
    VersionBrokenError,
)
from syncline.protocol.core import Core, Member, Table, Waiting
from syncline.protocol.ids import VersionKey
from syncline.protocol.membership import complete_instances
from syncline.protocol.parts import WriterSource
from syncline.protocol.replies import CommitSummary, DigestBlobs, Done, PutDone, WindowClosed
from syncline.protocol.version import Version, VersionState

if TYPE_CHECKING:
    from syncline.protocol import requests as req
    from syncline.protocol.lease import Pin


def group_high(table: Table) -> int:
    """Return the highest number seen in the newest epoch, -1 before the first."""
    return table.group.high if table.group else -1


def put(core: Core, member: Member, request: req.Put, _until: float) -> PutDone:
    """Record one rank's shards of a version; open it if it is the first."""
    table = core.tables[member.table]
    key = VersionKey(member.epoch, request.number)
    refill = request.refill and core.restarted
    version = table.versions.get(key)
    if version is None:
        if refill and _too_old(core, table, key):
            return PutDone(key, VersionState.RETIRED, ())
        version = _open(core, table, member, request, key)
    place = WriterSource(
        member.rank,
        member.number,
        request.manifest_fp,
        member.host,
        member.endpoint,
        request.binding_generation,
        request.binding_fp,
        request.source,
        member.rules,
    )
    version.put(place)
    table.versions[key] = version
    if table.group:
        table.group.high = max(table.group.high, request.number)
    if refill and request.closed:
        version.closed.add(member.rank)
    if not refill:
        _abort_skipped(core, table, member, key)
    _close_older(table, member)
    _forget(core, table)
    return PutDone(key, version.state, version.memberships[-1])


def _open(core: Core, table: Table, member: Member, request: req.Put, key: VersionKey) -> Version:
    high = group_high(table)
    if request.number < 0 or (request.number <= high and not (request.refill and core.restarted)):
        raise StaleVersionError(
            "version numbers must grow within an epoch",
            rank=member.who,
            expected=f"more than {high}",
            found=request.number,
            hint="a trainer that goes back to an older checkpoint registers anew and gets a newer epoch",
        )
    world = table.group.world if table.group else 1
    core.tell("opened", table.name, key, rank=member.rank)
    return Version(key, world, request.source, complete_instances(core, table))


def _too_old(core: Core, table: Table, key: VersionKey) -> bool:
    return len(table.versions) >= core.timing.history and key < min(table.versions)


def _abort_skipped(core: Core, table: Table, member: Member, key: VersionKey) -> None:
    """Abort what this rank left out: it put a newer version and will not come back to older ones."""
    for version in table.versions.values():
        same = version.key.epoch == key.epoch and version.key < key
        if same and version.state is VersionState.OPEN and member.rank not in version.puts:
            version.fail(f"{member.who} went on to version {key} without it")
            core.tell("aborted", table.name, version.key, rank=member.rank, detail=version.reason)


def _close_older(table: Table, member: Member) -> None:
    """Live memory is one: only the newest live version of a rank can take new pins."""
    mine = [
        one for one in table.versions.values() if one.key.epoch == member.epoch and member.rank in one.puts
    ]
    live = sorted((one for one in mine if one.source == "live"), key=lambda one: one.key)
    for version in live[:-1]:
        version.closed.add(member.rank)


def _forget(core: Core, table: Table) -> None:
    """Keep the newest versions only; one that is still offered is retired first, one in use stays."""
    for key in sorted(table.versions)[: -core.timing.history]:
        version = table.versions[key]
        busy = any(one.active and one.active.key == key for one in table.instances.values())
        if version.pins or busy:
            continue
        if version.state is VersionState.OPEN:
            version.fail(f"{core.timing.history} newer versions were opened")
        core.tell("retired", table.name, key, detail="forgotten")
        del table.versions[key]


def settle(core: Core, table: Table) -> None:
    """Seal and retire what is due; after every change of the table.

    Sealing needs every rank's put in this boot, so after a restart nothing is sealed, committed or retired
    before all writers of the epoch are back.
    """
    for version in table.versions.values():
        if version.seal():
            if table.sealed is None or version.key > table.sealed:
                table.sealed = version.key
            core.tell("sealed", table.name, version.key)
        if version.retire():
            core.tell("retired", table.name, version.key)


def digests(core: Core, member: Member, request: req.Digests, _until: float) -> Done:
    """Record one rank's digests under one plan."""
    version = _own(core, member, request.key)
    if version.state is VersionState.ABORTED:
        raise VersionAbortedError(f"version {version.key} is aborted: {version.reason}", rank=member.who)
    if member.rank not in version.puts:
        raise ProtocolError(f"digests of version {version.key} before its put", rank=member.who)
    known = member.rank in version.digests.get(request.plan_id, {})
    if version.digest(member.rank, request.plan_id, request.blob) and not known:
        core.tell("digested", member.table, version.key, detail=request.plan_id.hex())
    return Done()


def _own(core: Core, member: Member, key: VersionKey) -> Version:
    if key.epoch != member.epoch:
        raise FencedError(
            "the version is of another epoch", rank=member.who, expected=member.epoch, found=key
        )
    return core.version(member, key)


def fetch_digests(
    core: Core, member: Member, request: req.FetchDigests, until: float
) -> DigestBlobs | Waiting:
    """Answer once every writer's digests under this plan are there."""
    version = core.version(member, request.key)
    missing = version.undigested(request.plan_id)
    if missing:
        refuse_lost(version, f"digests of writer ranks {missing} are missing")
        for pin in _unanswered(version, member):
            pin.awaiting = core.now < until  # the writers are the slow ones, while this wait lasts
            pin.answered, pin.moved = not pin.awaiting, core.now
        return Waiting(f"digests of version {request.key} from writer ranks {missing}")
    for pin in _unanswered(version, member):
        pin.answered, pin.awaiting, pin.moved = True, False, core.now
    blobs = version.digests[request.plan_id]
    return DigestBlobs(tuple(blobs[rank] for rank in range(version.world)))


def _unanswered(version: Version, member: Member) -> list[Pin]:
    return [pin for (holder, _), pin in version.pins.items() if holder == member.number and not pin.answered]


def refuse_lost(version: Version, found: str) -> None:
    """Raise if the version has lost a source.

    Raises:
        VersionAbortedError, VersionBrokenError: naming whom it lost.
    """
    kinds = {VersionState.ABORTED: VersionAbortedError, VersionState.BROKEN: VersionBrokenError}
    kind = kinds.get(version.state)
    if kind is not None:
        what = f"version {version.key} is {version.state.lower()}: {version.reason}"
        raise kind(what, found=found, hint="readers keep the version that they serve; take the next one")


def abort_version(core: Core, member: Member, request: req.AbortVersion, _until: float) -> Done:
    """Give a version up: nobody can commit it from here on."""
    version = _own(core, member, request.key)
    reason = f"{member.who} gave it up: {request.reason}"
    if version.fail(reason):
        core.tell(version.state.lower(), member.table, version.key, rank=member.rank, detail=reason)
        table = core.tables[member.table]
        for instance in table.instances.values():
            if instance.active and instance.active.key == version.key:
                core.end_attempt(table, instance, reason, revoked=True)
        for holder in list(version.pins):
            core.revoke(table, version, holder, reason)
    return Done()


# --- the read window


def close_window(
    core: Core, member: Member, request: req.CloseWindow, until: float
) -> WindowClosed | Waiting:
    """Answer once this rank may change its weights.

    Steps: wait until the instances have pulled (if asked), take no new pin, wait for the seal, wait for the
    pins. At the deadline an unsealed version is aborted and pins are revoked: there is always an answer.
    """
    table = core.tables[member.table]
    version = _window(core, table, member, request)
    expired = core.now >= until
    missed = _missed(table, version) if version and request.until == "pulled" else []
    if missed and not expired:
        return Waiting(", ".join(f"instance {name}" for name in missed))
    affected = _closing(table, member, request, version)
    for one in affected:
        one.closed.add(member.rank)
    waiting = _await_seal(core, table, version, expired) if version in affected else None
    waiting = waiting or _await_pins(core, table, member, affected, expired)
    if waiting:
        return waiting
    if version is None:
        return WindowClosed(request.key, VersionState.RETIRED, "", (), tuple(missed), {}, ())
    failures = _failures(table, version.key)
    lost = (tuple(version.revoked), tuple(missed), failures)
    return WindowClosed(version.key, version.state, version.reason, *lost, version.owed(member.rank))


def _window(core: Core, table: Table, member: Member, request: req.CloseWindow) -> Version | None:
    """Return the version whose window is meant; None if it is forgotten, or of an earlier boot.

    Attempts of an earlier boot are fenced, so there is nothing to wait for.
    """
    if request.key.epoch != member.epoch:
        raise FencedError(
            "the window is of another epoch", rank=member.who, expected=member.epoch, found=request.key
        )
    version = table.versions.get(request.key)
    if version is None and request.key.number > group_high(table) and not core.restarted:
        raise UnknownVersionError(f"version {request.key} was never put", rank=member.who)
    if (
        version
        and member.rank not in version.puts
        and version.fail(f"{member.who} closed its window before its put")
    ):
        core.tell("aborted", table.name, version.key, rank=member.rank, detail=version.reason)
    return version


def _closing(
    table: Table, member: Member, request: req.CloseWindow, version: Version | None
) -> list[Version]:
    """Return the versions whose readers read the memory that is about to change."""
    if version and version.source == "snapshot":
        return [version] if request.evict else []
    mine = [
        one for one in table.versions.values() if one.key.epoch == member.epoch and member.rank in one.puts
    ]
    return [one for one in mine if one.source == "live" and one.key <= request.key]


def _await_seal(core: Core, table: Table, version: Version | None, expired: bool) -> Waiting | None:
    if version is None or version.state is not VersionState.OPEN:
        return None
    if not expired:
        return Waiting(f"puts of version {version.key} by writer ranks {version.missing}")
    version.fail(f"writer ranks {version.missing} did not put it in time")
    core.tell("aborted", table.name, version.key, detail=version.reason)
    return None


def _await_pins(
    core: Core, table: Table, member: Member, affected: list[Version], expired: bool
) -> Waiting | None:
    pins = [(one, holder) for one in affected for holder in one.pins]
    if pins and not expired:
        return Waiting("readers: " + "; ".join(sorted({one.pins[holder].who for one, holder in pins})))
    for one, holder in pins:
        if holder in one.pins:
            core.revoke(table, one, holder, f"{member.who} closed its window at the deadline")
    return None


def _live(table: Table) -> list[str]:
    return sorted(name for name, one in table.instances.items() if not one.missing)


def _has(table: Table, name: str, key: VersionKey) -> bool:
    committed = table.instances[name].committed
    return committed is not None and committed >= key


def _missed(table: Table, version: Version) -> list[str]:
    """Return the live instances that have neither pulled the version nor failed at it."""
    if version.state in (VersionState.ABORTED, VersionState.BROKEN):
        return []
    missed = []
    for name in _live(table):
        instance = table.instances[name]
        attempt = instance.active
        pulled = attempt is not None and attempt.key == version.key and len(attempt.plans) == instance.world
        if not pulled and not _has(table, name, version.key) and version.key not in instance.failures:
            missed.append(name)
    return missed


def _failures(table: Table, key: VersionKey) -> dict[str, str]:
    return {name: one.failures[key] for name, one in sorted(table.instances.items()) if key in one.failures}


def wait_committed(
    core: Core, member: Member, request: req.WaitCommitted, _until: float
) -> CommitSummary | Waiting:
    """Answer once every live instance has committed the version, or failed at it."""
    table = core.tables[member.table]
    version = table.versions.get(request.key)
    failed = _failures(table, request.key)
    waiting = [name for name in _live(table) if name not in failed and not _has(table, name, request.key)]
    if waiting:
        if version is None:
            raise UnknownVersionError(
                f"version {request.key} is not known", rank=member.who, found=request.key
            )
        refuse_lost(version, f"instances {waiting} have not committed it")
        return Waiting(", ".join(f"instance {name}" for name in waiting))
    done = [name for name in _live(table) if _has(table, name, request.key)]
    return CommitSummary(request.key, tuple(done), failed)
