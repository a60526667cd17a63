"""Joining and leaving: registrations, claims of those who come back, ends of members.

A process can die between any two requests; its lease then ends it as `end` does. A registration whose answer
was lost is recognised by its ``process`` and answered alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.errors import FencedError, ProtocolError, from_wire
from syncline.protocol.core import MAX_ENDED, Core, Member, Table, Waiting
from syncline.protocol.ids import Fence
from syncline.protocol.instance import Instance
from syncline.protocol.parts import InstanceLayout, RankLayout
from syncline.protocol.replies import Done, Members, Registered
from syncline.protocol.version import VersionState
from syncline.protocol.writers import WriterGroup

if TYPE_CHECKING:
    from syncline.protocol import requests as req

MAX_REFUSALS = 16
MAX_WORLD = 1 << 16


# --- writers


def register_writer(core: Core, request: req.RegisterWriter) -> Registered:
    """Give a writer its rank in the newest epoch, or open a new epoch for it."""
    if not 0 <= request.rank < request.world <= MAX_WORLD:
        raise ProtocolError("no such writer rank", expected=f"0 to {request.world - 1}", found=request.rank)
    table = core.table(request.table)
    group = table.group
    holder = _holder(core, group.slots.get(request.rank)) if group else None
    if holder and holder.process == request.process:
        return _welcome(core, table, holder)
    former = set(group.slots.values()) if group and not _joins(group, request) else set()
    _agree(core, request, former | ({holder.number} if holder else set()))
    if request.previous is None:
        group = _fresh_group(core, table, request)
    else:
        group = _former_group(core, table, request, request.previous)
    member = _admit(core, request, group.epoch, None)
    group.join(request.rank, member.number)
    _claim_writer(group, request)
    if not group.missing:
        table.recovering = False
    table.refusals = {who: one for who, one in table.refusals.items() if one[0] is not None}
    core.tell("joined", table.name, rank=member.rank, detail=member.who)
    return _welcome(core, table, member)


def _fresh_group(core: Core, table: Table, request: req.RegisterWriter) -> WriterGroup:
    if table.group and _joins(table.group, request):
        return table.group
    return open_epoch(core, table, table.epoch + 1, request.world)


def _joins(group: WriterGroup, request: req.RegisterWriter) -> bool:
    """Whether the process belongs to this incarnation, as far as it says."""
    if request.previous is not None:
        return group.epoch == request.previous.epoch
    return group.assembling and group.world == request.world and request.rank not in group.slots


def _former_group(core: Core, table: Table, request: req.RegisterWriter, previous: Fence) -> WriterGroup:
    if previous.job != core.job or previous.boot > core.boot or previous.epoch < 1:
        raise FencedError("not a writer's fence of this job", expected=f"job {core.job}", found=previous)
    if previous.epoch < table.epoch:
        raise FencedError(
            f"a newer incarnation of the trainer writes table {table.name}",
            rank=f"writer {request.rank}",
            expected=f"epoch {table.epoch}",
            found=f"epoch {previous.epoch}",
            hint="this process was superseded: end it",
        )
    group = table.group
    if group is None or group.epoch < previous.epoch:
        return open_epoch(core, table, previous.epoch, request.world, refilled=True)
    if group.world != request.world:
        raise ProtocolError("writers of one epoch differ in world", expected=group.world, found=request.world)
    _check_successor(core, previous, group.slots.get(request.rank), group.last.get(request.rank))
    if request.rank in group.slots:
        end(core, group.slots[request.rank], "its process came back under another connection")
    return group


def open_epoch(core: Core, table: Table, epoch: int, world: int, *, refilled: bool = False) -> WriterGroup:
    """Make a new incarnation of the table's writers the only one: the older one's fences are void."""
    raise_epoch(core, table, epoch)
    table.group = WriterGroup(epoch, world, refilled=refilled)
    if table.sealed and table.sealed.epoch == epoch:
        table.group.high = table.sealed.number
    core.tell("epoch", table.name, detail=f"epoch {epoch} of {world} writers")
    return table.group


def raise_epoch(core: Core, table: Table, epoch: int) -> None:
    """Learn of an epoch; whatever belongs to an older one ends: its writers, its versions."""
    table.epoch = max(table.epoch, epoch)
    group = table.group
    if group is None or group.epoch >= epoch:
        return
    reason = f"epoch {epoch} superseded epoch {group.epoch}"
    table.group = None
    for member in list(group.slots.values()):
        end(core, member, reason)
    for version in table.versions.values():
        if version.key.epoch < epoch and version.fail(reason):
            core.tell(version.state.lower(), table.name, version.key, detail=reason)


def _claim_writer(group: WriterGroup, request: req.RegisterWriter) -> None:
    """Believe a writer that comes back how far its epoch was."""
    if request.last is None or request.last.epoch != group.epoch:
        return
    group.high = max(group.high, request.last.number)
    if group.refilled:
        group.assembling = False  # it had published: who comes without a past is a new incarnation


# --- readers


def register_reader(core: Core, request: req.RegisterReader) -> Registered:
    """Give a reader its rank in an instance; a new process in an occupied rank fences the old one."""
    if not 1 <= request.world <= MAX_WORLD or not -1 <= request.rank < request.world:
        raise ProtocolError("no such rank", expected=f"-1 to {request.world - 1}", found=request.rank)
    table = core.table(request.table)
    instance = table.instances.get(request.instance)
    holder = _holder(core, instance.slots.get(request.rank)) if instance else None
    if holder and holder.process == request.process:
        return _welcome(core, table, holder)
    _agree(core, request, {holder.number} if holder else set())
    if instance and request.previous:
        _check_successor(
            core, request.previous, instance.slots.get(request.rank), instance.last.get(request.rank)
        )
    if instance and instance.world != request.world and set(instance.slots) - {request.rank}:
        raise ProtocolError(
            f"ranks of instance {instance.name} differ in world", expected=instance.world, found=request.world
        )
    if holder:
        end(core, holder.number, "a new process took its rank")
    instance = table.instances.setdefault(request.instance, Instance(request.instance, request.world))
    member = _admit(core, request, 0, request.instance)
    if request.committed is not None:
        _claim_reader(core, table, request)
    instance.claim(request.rank, request.committed, request.dirty)
    instance.slots[request.rank] = instance.last[request.rank] = member.number
    table.refusals = {who: one for who, one in table.refusals.items() if one[0] != request.instance}
    core.tell("joined", table.name, instance=instance.name, rank=member.rank, detail=member.who)
    return _welcome(core, table, member)


def _claim_reader(core: Core, table: Table, request: req.RegisterReader) -> None:
    """Believe a reader: what it committed had been sealed, which bounds epoch and number from below."""
    key = request.committed
    if key is None:
        return
    raise_epoch(core, table, key.epoch)
    if table.sealed is None or key > table.sealed:
        table.sealed = key
    if table.group and table.group.epoch == key.epoch:
        table.group.high = max(table.group.high, key.number)


def layout_of(core: Core, instance: Instance) -> InstanceLayout:
    """Return the layout of a complete instance."""
    members = [core.members[instance.slots[rank]] for rank in range(instance.world)]
    return InstanceLayout(
        instance.name, tuple(RankLayout(one.manifest_fp, one.host, one.rules) for one in members)
    )


def complete_instances(core: Core, table: Table) -> tuple[InstanceLayout, ...]:
    """Return the layouts of all instances whose worker ranks are there, by name."""
    whole = [table.instances[name] for name in sorted(table.instances)]
    return tuple(layout_of(core, one) for one in whole if not set(one.missing) - {-1})


# --- both


def _holder(core: Core, number: int | None) -> Member | None:
    return None if number is None else core.members[number]


def _check_successor(core: Core, previous: Fence, slot: int | None, last: int | None) -> None:
    """Refuse a process whose rank was given to a newer one meanwhile."""
    newer: object = None
    if previous.job != core.job or previous.boot > core.boot:
        newer = f"job {core.job}, boot {core.boot}"
    elif previous.boot == core.boot:
        newer = f"member {last}" if last is not None and last != previous.member else None
    elif slot is not None:
        origin = core.members[slot].previous
        if origin is None or (origin.boot, origin.member) > (previous.boot, previous.member):
            newer = f"member {slot}"
    if newer is not None:
        raise FencedError(
            "the rank was given to a newer process", expected=newer, found=f"member {previous.member}"
        )


def _agree(core: Core, request: req.RegisterWriter | req.RegisterReader, replaced: set[int]) -> None:
    """Refuse options that differ from those of the table's other members, by name."""
    for member in core.members.values():
        if member.table != request.table or member.number in replaced:
            continue
        for name, value in member.options:
            if request.options.get(name, value) != value:
                raise ProtocolError(
                    f"option {name} differs between members of table {request.table}",
                    expected=f"{value} as {member.who} has it",
                    found=request.options[name],
                    hint="set it alike for trainers and engine workers; these may not inherit variables",
                )


def _admit(
    core: Core, request: req.RegisterWriter | req.RegisterReader, epoch: int, instance: str | None
) -> Member:
    core.last_member += 1
    member = Member(
        core.last_member,
        request.table,
        epoch,
        instance,
        request.rank,
        request.process,
        request.previous,
        request.host,
        request.endpoint,
        request.manifest_fp,
        tuple(sorted(request.options.items())),
        request.rules,
    )
    core.members[member.number] = member
    core.leases.renew(member.number, core.now)
    return member


def _welcome(core: Core, table: Table, member: Member) -> Registered:
    fp = member.manifest_fp
    fence = Fence(core.job, core.boot, member.epoch, member.number)
    missing = (fp,) if fp and fp not in core.manifests else ()
    core.leases.renew(member.number, core.now)
    if member.instance is None:
        return Registered(fence, core.boot, table.epoch, missing, core.timing.lease)
    instance = core.instance_of(member)
    applying = instance.committed if instance.applying else None
    known = (instance.committed, instance.dirty, applying)
    return Registered(fence, core.boot, table.epoch, missing, core.timing.lease, *known)


def end(core: Core, number: int, reason: str, *, orderly: bool = False) -> None:
    """End a member: its fence is void, its pins drop, and what depended on it is told."""
    member = core.members.pop(number)
    core.leases.drop(number)
    core.progress.pop(number, None)
    core.ended[number] = reason
    while len(core.ended) > MAX_ENDED:
        del core.ended[next(iter(core.ended))]
    table = core.tables[member.table]
    kind = "left" if orderly else "lost"
    core.tell(kind, table.name, None, member.instance or "", member.rank, f"{member.who}: {reason}")
    for version in table.versions.values():
        for holder in [one for one in version.pins if one[0] == number]:
            version.release(*holder)
    if member.instance is None:
        _end_writer(core, table, member, reason, orderly=orderly)
    else:
        _end_reader(core, table, member, reason)


def _end_writer(core: Core, table: Table, member: Member, reason: str, *, orderly: bool) -> None:
    if table.group and table.group.epoch == member.epoch:
        table.group.lose(member.rank, reason, orderly=orderly)
    for version in table.versions.values():
        if version.key.epoch != member.epoch:
            continue
        if orderly and version.state is VersionState.SEALED:
            version.closed.add(member.rank)  # it takes its memory with it, in peace
        elif version.fail(f"{member.who} was lost: {reason}"):
            core.tell(version.state.lower(), table.name, version.key, rank=member.rank, detail=version.reason)


def _end_reader(core: Core, table: Table, member: Member, reason: str) -> None:
    instance = core.instance_of(member)
    why = f"{member.who} was lost: {reason}"
    core.end_attempt(table, instance, why)
    instance.lose(member.rank, why)
    if not instance.slots:
        # With its last process went its weights; who comes back says what it holds.
        del table.instances[instance.name]


def deregister(core: Core, member: Member, request: req.Deregister, _until: float) -> Done:
    """End a member that says goodbye."""
    end(core, member.number, request.reason or "it left", orderly=True)
    return Done()


def heartbeat(core: Core, member: Member, request: req.Heartbeat, _until: float) -> Done:
    """Renew the lease; only a grown count of bytes keeps pins."""
    if request.progress > core.progress.get(member.number, 0):
        core.progress[member.number] = request.progress
        for version in core.tables[member.table].versions.values():
            for (holder, _attempt), pin in version.pins.items():
                if holder == member.number:
                    pin.moved = core.now
    return Done()


def join_failed(core: Core, request: req.JoinFailed) -> Done:
    """Remember for a while why somebody cannot come, and tell who waits for it."""
    table = core.table(request.table)
    table.refusals.pop(request.who, None)
    table.refusals[request.who] = (request.instance, request.error, core.now + core.timing.recovery)
    while len(table.refusals) > MAX_REFUSALS:
        del table.refusals[next(iter(table.refusals))]
    detail = f"{request.who}: {request.error.get('what')}"
    core.tell("refused", table.name, None, request.instance or "", detail=detail)
    return Done()


def await_members(core: Core, member: Member, request: req.AwaitMembers, _until: float) -> Members | Waiting:
    """Answer once the writers and the named instances are complete."""
    table = core.tables[member.table]
    for who, (instance, error, counts) in table.refusals.items():
        awaited = request.writers if instance is None else instance in request.instances
        if awaited and core.now < counts:
            cause = from_wire(error)
            cause.add_note(f"reported by {who}, for whom this process waited")
            raise cause
    lacking = []
    if request.writers and (table.group is None or table.group.missing):
        lacking.append(table.lacks())
    for name in request.instances:
        instance = table.instances.get(name)
        if instance is None or instance.missing:
            lacking.append(f"instance {name}, ranks {'all' if instance is None else instance.missing}")
    if lacking:
        return Waiting("; ".join(lacking))
    group = table.group
    slots = (
        [core.members[group.slots[rank]] for rank in range(group.world)]
        if group and not group.missing
        else []
    )
    writers = tuple(RankLayout(one.manifest_fp, one.host, one.rules) for one in slots)
    return Members(table.epoch, writers, complete_instances(core, table))
