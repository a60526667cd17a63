"""How the processes of an update wait for each other: each step is a request, answered when it is due.

A controller begins an update, pauses its engine, and says `StartUpdate`; only then may ranks write. Workers
wait for that, bind, wait for each other, pull, verify, and wait for the decision. Writers of two-sided
transports wait to be asked.
Nobody polls, and nobody needs to reach anybody but the MetaServer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.errors import ProtocolError
from syncline.protocol.core import Core, Member, Waiting
from syncline.protocol.instance import InstanceState
from syncline.protocol.replies import AllVerified, Decision, Done, Pull, Pulls
from syncline.protocol.update import begun_of

if TYPE_CHECKING:
    from syncline.protocol import requests as req
    from syncline.protocol.core import Table
    from syncline.protocol.instance import Attempt, Instance
    from syncline.protocol.replies import Begun


def start_update(core: Core, member: Member, request: req.StartUpdate, _until: float) -> Done:
    """Let the worker ranks write: the engine is paused."""
    instance = core.instance_of(member)
    attempt = instance.alive(request.attempt, request.key, member.who)
    if not attempt.started:
        attempt.started = True
        version = core.tables[member.table].versions.get(attempt.key)
        for pin in version.pins.values() if version else ():
            if pin.attempt == attempt.number:
                pin.moved = core.now  # until now nobody could move a byte; the pause counts once
        core.tell("started", member.table, request.key, instance.name, detail=f"attempt {attempt.number}")
    return Done()


def await_update(core: Core, member: Member, request: req.AwaitUpdate, _until: float) -> Begun | Waiting:
    """Answer a worker rank once an attempt that it does not know may write."""
    table, instance = core.tables[member.table], core.instance_of(member)
    attempt = instance.active
    if attempt is None or not attempt.started or attempt.number <= request.after:
        return Waiting(f"the controller of instance {instance.name} to start an update")
    attempt.told.add(member.rank)
    return begun_of(table, instance, attempt)


def await_bound(core: Core, member: Member, request: req.AwaitBound, _until: float) -> Done | Waiting:
    """Answer a worker rank once every rank of its instance is bound: from here on live memory may change.

    Ranks that begin together also read what neighbours share together, while it is near.
    """
    instance = core.instance_of(member)
    attempt = instance.alive(request.attempt, request.key, member.who)
    attempt.bound.add(member.rank)
    absent = [rank for rank in range(instance.world) if rank not in attempt.bound]
    if absent:
        return Waiting(f"ranks {absent} of instance {instance.name} to bind to version {attempt.key}")
    return Done()


def await_dirty(core: Core, member: Member, _request: req.AwaitDirty, _until: float) -> Done | Waiting:
    """Answer the controller once its instance, with no update under way, holds a mixture."""
    instance = core.instance_of(member)
    if instance.dirty and not instance.pulling and not instance.applying:
        return Done()
    return Waiting(f"instance {instance.name} to need an update before it may serve")


def await_verified(
    core: Core, member: Member, request: req.AwaitVerified, _until: float
) -> AllVerified | Waiting:
    """Answer the controller once every rank has verified; the reason if the attempt failed."""
    instance = core.instance_of(member)
    attempt = instance.current(request.attempt, request.key, member.who)
    if attempt.failure:
        instance.tell_error(attempt)
    attempt = instance.alive(request.attempt, request.key, member.who)
    absent = [rank for rank in range(instance.world) if rank not in attempt.plans]
    if absent:
        return Waiting(f"ranks {absent} of instance {instance.name} to verify version {attempt.key}")
    return AllVerified(tuple(attempt.reports.get(rank, {}) for rank in range(instance.world)))


def await_decision(
    core: Core, member: Member, request: req.AwaitDecision, _until: float
) -> Decision | Waiting:
    """Answer a worker rank that verified: whether its bytes were committed."""
    instance = core.instance_of(member)
    attempt = instance.attempt
    if attempt is None or attempt.number != request.attempt:
        return Decision(False, f"attempt {request.attempt} was followed by another")
    if attempt.key != request.key:
        raise ProtocolError(
            "the attempt is at another version", rank=member.who, expected=attempt.key, found=request.key
        )
    if instance.state is InstanceState.COMMITTED:
        return Decision(True, "")
    if attempt.failure:
        return Decision(False, attempt.failure)
    return Waiting(f"the controller of instance {instance.name} to commit version {attempt.key}")


def await_pulls(core: Core, member: Member, request: req.AwaitPulls, _until: float) -> Pulls | Waiting:
    """Answer a writer once instances that it has not served yet pull from its newest versions."""
    table = core.tables[member.table]
    found = []
    for name, instance in sorted(table.instances.items()):
        attempt = instance.active
        if attempt and attempt.started and attempt.number > request.served.get(name, 0):
            found.append(_pull(core, table, instance, attempt))
    return Pulls(tuple(found)) if found else Waiting("an instance to pull")


def _pull(core: Core, table: Table, instance: Instance, attempt: Attempt) -> Pull:
    endpoints = tuple(core.members[instance.slots[rank]].endpoint for rank in range(instance.world))
    begun = begun_of(table, instance, attempt)
    return Pull(instance.name, begun, endpoints)
