"""What readers do: begin an update, move bytes, verify, commit, apply; and hold versions by plain pins.

The controller can die before its commit (the attempt fails with it) or after it (the commit stands). A worker
can die at any step; see `syncline.protocol.instance`. The deadline of an update is the end of its pins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.errors import (
    FencedError,
    ProtocolError,
    RevokedError,
    StaleVersionError,
    UnknownVersionError,
)
from syncline.protocol.core import Core, Member, Table, Waiting, check_deadline, pin_of
from syncline.protocol.ids import VersionKey
from syncline.protocol.instance import Attempt, Instance, InstanceState
from syncline.protocol.lease import Pin
from syncline.protocol.membership import layout_of
from syncline.protocol.publish import group_high, refuse_lost
from syncline.protocol.replies import AppliedDone, Begun, Committed, Current, Done, Pinned
from syncline.protocol.version import Version, VersionState

if TYPE_CHECKING:
    from syncline.protocol import requests as req
    from syncline.protocol.parts import WriterSource


# --- begin


def begin_update(
    core: Core, member: Member, request: req.BeginUpdate, until: float
) -> Begun | Current | Waiting:
    """Choose a version and pin it for every worker rank, or say whom the update waits for."""
    table, instance = core.tables[member.table], core.instance_of(member)
    if request.nonce < instance.nonce:
        raise FencedError(
            f"a newer update of instance {instance.name} was begun",
            rank=member.who,
            expected=f"nonce {instance.nonce}",
            found=f"nonce {request.nonce}",
        )
    attempt = instance.attempt
    if attempt and instance.nonce == request.nonce == attempt.nonce:
        instance.alive(attempt.number, attempt.key, member.who)
        return begun_of(table, instance, attempt)
    core.end_attempt(table, instance, "its controller began another update")
    instance.nonce = request.nonce
    if table.recovering:
        return Waiting(f"the server was restarted: {table.lacks()}")
    if instance.missing:
        return Waiting(f"ranks {instance.missing} of instance {instance.name}")
    choice = _choose(table, instance, request)
    if not isinstance(choice, Version):
        return choice
    return _grant(core, table, instance, choice, request, until)


def _choose(table: Table, instance: Instance, request: req.BeginUpdate) -> Version | Current | Waiting:
    if request.number is None:
        return _choose_newest(table, instance, request.after)
    key = VersionKey(table.epoch, request.number)
    newest, committed = table.sealed, instance.committed
    if committed == key and not instance.dirty and (request.after is None or key > request.after):
        return Current(key)
    bounds = [one for one in (newest, committed) if one is not None and key < one]
    if bounds or (request.after is not None and key <= request.after):
        raise StaleVersionError(
            f"version {key} is older than what instance {instance.name} can take",
            expected=f"at least {max(bounds, default=request.after)}",
            found=key,
        )
    version = table.versions.get(key)
    if version is None:
        if request.number <= group_high(table) or (table.group and table.group.finished):
            raise UnknownVersionError(
                f"version {key} was never published, or nobody holds it any more",
                found=key,
                expected=f"newest sealed is {newest}",
            )
        return Waiting(f"version {key} (newest sealed: {newest}){_lacking(table)}")
    refuse_lost(version, f"instance {instance.name} stays at {committed}")
    if version.state is VersionState.OPEN:
        return Waiting(f"puts of version {key} by writer ranks {version.missing}")
    if not version.pinnable:
        raise UnknownVersionError(
            f"the read window of version {key} is closed",
            found=f"closed by writer ranks {sorted(version.closed)}",
            hint="take the next version, or publish with wait='pulled'",
        )
    return version


def _choose_newest(table: Table, instance: Instance, after: VersionKey | None) -> Version | Current | Waiting:
    committed = instance.committed
    newer = [one for key, one in sorted(table.versions.items()) if _wanted(instance, key, after)]
    ready = [one for one in newer if one.pinnable]
    if ready:
        return ready[-1]
    lost = bool(table.group and table.group.gone and not table.group.finished)
    if lost and newer:
        refuse_lost(newer[-1], f"instance {instance.name} stays at {committed}")
    idle = after is None and not instance.dirty
    if idle and committed is not None and (table.sealed is None or committed >= table.sealed):
        return Current(committed)
    return Waiting(
        f"a version newer than {max(filter(None, (after, committed)), default=None)}{_lacking(table)}"
    )


def _wanted(instance: Instance, key: VersionKey, after: VersionKey | None) -> bool:
    if after is not None and key <= after:
        return False
    committed = instance.committed
    return committed is None or key > committed or (instance.dirty and key == committed)


def _lacking(table: Table) -> str:
    if table.group and not table.group.missing:
        return f" from writers 0 to {table.group.world - 1}"
    return f"; missing: {table.lacks()}"


def _grant(
    core: Core, table: Table, instance: Instance, version: Version, request: req.BeginUpdate, until: float
) -> Begun:
    if version.admit(layout_of(core, instance)):
        core.tell("plan", table.name, version.key, instance.name)
    core.last_attempt = number = core.last_attempt + 1
    membership = version.memberships[-1]
    attempt = Attempt(
        number, version.key, request.mode, request.level, request.nonce, membership, instance.dirty
    )
    instance.begin(attempt)
    for rank in range(instance.world):
        worker = core.members[instance.slots[rank]]
        version.pins[worker.number, number] = Pin(worker.who, instance.name, number, until, core.now)
    core.tell("began", table.name, version.key, instance.name, detail=f"attempt {number}, {request.mode}")
    return begun_of(table, instance, attempt)


def begun_of(table: Table, instance: Instance, attempt: Attempt) -> Begun:
    """Return what a member of the instance must know to take part in an attempt."""
    version = table.versions.get(attempt.key)
    writers = _places(version) if version else ()
    return Begun(attempt.key, attempt.number, writers, attempt.membership, instance.committed, attempt.level)


def _places(version: Version) -> tuple[WriterSource, ...]:
    return tuple(version.puts[rank] for rank in range(version.world))


# --- pull


def progress(core: Core, member: Member, request: req.Progress, _until: float) -> Done:
    """Keep a rank's pin: more bytes than at the last report have moved."""
    instance = core.instance_of(member)
    attempt = instance.alive(request.attempt, request.key, member.who)
    if request.nbytes > 0:
        attempt.moved.add(member.rank)
    version = core.tables[member.table].versions.get(request.key)
    pin = pin_of(version, member, request.attempt) if version else None
    if pin is not None:
        pin.advance(request.nbytes, core.now)
    return Done()


def verified(core: Core, member: Member, request: req.Verified, _until: float) -> Done:
    """Count a rank that holds and has proved all its bytes, and let its pin go."""
    instance = core.instance_of(member)
    attempt = instance.current(request.attempt, request.key, member.who)
    if instance.state is InstanceState.COMMITTED and attempt.plans.get(member.rank) == request.plan_id:
        return Done()
    instance.alive(request.attempt, request.key, member.who)
    if request.nbytes != request.planned:
        raise ProtocolError(
            "a rank cannot be verified that did not receive every planned byte",
            rank=member.who,
            expected=f"{request.planned} bytes",
            found=f"{request.nbytes} bytes",
        )
    attempt.moved.add(member.rank)
    attempt.reports.setdefault(member.rank, request.report)
    whole = instance.verified(member.rank, attempt, request.plan_id)
    version = core.tables[member.table].versions.get(request.key)
    if version is not None:
        version.release(member.number, request.attempt)
    if whole:
        core.tell("verified", member.table, request.key, instance.name)
    return Done()


def failed(core: Core, member: Member, request: req.Failed, until: float) -> Done | Waiting:
    """End the attempt for all ranks, and hear whether this one wrote anything."""
    instance = core.instance_of(member)
    attempt = instance.current(request.attempt, request.key, member.who)
    undecided = instance.active is attempt or instance.state is InstanceState.COMMITTED
    if member.rank >= 0 and undecided and attempt.error is None:
        attempt.error = request.error
    what = request.error.get("what") or "without a message"
    reason = f"{member.who} failed: {what}"
    core.end_attempt(core.tables[member.table], instance, reason)
    instance.give_up(member.rank, attempt, reason, request.touched)
    silent = instance.silent(attempt)
    if member.rank < 0 and silent and core.now < until:
        return Waiting(f"ranks {silent} of instance {instance.name} to say whether they wrote")
    return Done()


# --- commit


def commit(core: Core, member: Member, request: req.Commit, _until: float) -> Committed:
    """Record the decision, if every condition holds at this moment: a compare-and-set."""
    instance = core.instance_of(member)
    if request.instance != instance.name:
        raise ProtocolError(
            "a controller commits its own instance", expected=instance.name, found=request.instance
        )
    attempt = instance.current(request.attempt, request.to, member.who)
    if instance.state is InstanceState.COMMITTED and instance.committed == request.to:
        return Committed(request.to, tuple(sorted(instance.applying)))
    instance.alive(request.attempt, request.to, member.who)
    instance.check_from(request.from_, request.to)
    plan_id = instance.plan_of(attempt)
    _check_proof(core.tables[member.table], attempt, plan_id)
    instance.commit(attempt)
    core.tell("committed", member.table, attempt.key, instance.name, detail=f"level {attempt.level}")
    return Committed(attempt.key, tuple(sorted(instance.applying)))


def _check_proof(table: Table, attempt: Attempt, plan_id: bytes) -> None:
    """Refuse a version whose contents nobody vouches for.

    Raises:
        ProtocolError: digests of the plan are missing, by writer rank.
        VersionBrokenError: and will never come, since a source was lost.
    """
    version = table.versions[attempt.key]
    if attempt.level == "none":
        if version.state is VersionState.BROKEN:
            refuse_lost(version, "an update without proof cannot outlive its source")
        return
    missing = version.undigested(plan_id)
    if not missing:
        return
    if version.state is VersionState.BROKEN:
        refuse_lost(version, f"digests of writer ranks {missing} are missing")
    raise ProtocolError(
        f"version {attempt.key} cannot be committed without the writers' digests",
        expected=f"digests under plan {plan_id.hex()}",
        found=f"none of writer ranks {missing}",
        hint="fetch and compare the digests before reporting verified",
    )


def applied(core: Core, member: Member, request: req.Applied, _until: float) -> AppliedDone:
    """Count one rank's acknowledgement; the last one lets the instance serve."""
    instance = core.instance_of(member)
    if instance.applied(member.rank, request.key):
        core.tell("serving", member.table, request.key, instance.name)
    return AppliedDone(instance.serving)


def await_serving(core: Core, member: Member, request: req.AwaitServing, _until: float) -> Done | Waiting:
    """Answer once every rank holds the committed version."""
    table = core.tables[member.table]
    instance = table.instances.get(request.instance)
    if instance is None:
        return Waiting(f"instance {request.instance}, ranks all")
    if instance.serving and instance.committed is not None and instance.committed >= request.key:
        return Done()
    if instance.committed == request.key and not instance.applying and not instance.pulling:
        if instance.attempt is not None and instance.attempt.key == request.key:
            instance.tell_error(instance.attempt)
        raise ProtocolError(
            f"instance {instance.name} lost a rank while applying version {request.key}: it is DIRTY",
            found=instance.failures.get(request.key, f"missing ranks {instance.missing}"),
            hint="a full update makes it whole",
        )
    ranks = sorted(instance.applying) or instance.missing or list(range(instance.world))
    return Waiting(f"ranks {ranks} of instance {instance.name}")


# --- retention


def pin(core: Core, member: Member, request: req.Pin, _until: float) -> Pinned:
    """Hold a version without updating anything."""
    table = core.tables[member.table]
    ttl = check_deadline(request.ttl)
    ready = [one for _, one in sorted(table.versions.items()) if one.pinnable]
    version = core.version(member, request.key) if request.key else (ready[-1] if ready else None)
    if version is None:
        raise UnknownVersionError("no version is sealed", rank=member.who)
    held = pin_of(version, member, 0)
    if held is not None:
        held.until = core.now + ttl
        return Pinned(version.key, _places(version))
    refuse_lost(version, "it can take no new pin")
    if not version.pinnable:
        raise UnknownVersionError(
            f"version {version.key} is {version.state}, or its window closed", rank=member.who
        )
    version.torn.discard(member.number)
    version.pins[member.number, 0] = Pin(member.who, member.instance or "", 0, core.now + ttl, core.now)
    return Pinned(version.key, _places(version))


def unpin(core: Core, member: Member, request: req.Unpin, _until: float) -> Done:
    """Let a version go, unless the pin was taken before: then what was read may be torn."""
    version = core.tables[member.table].versions.get(request.key)
    if version is None or member.number in version.torn:
        raise RevokedError(
            f"the pin on version {request.key} did not last", rank=member.who, hint="read again"
        )
    version.release(member.number, 0)
    return Done()
