"""What anybody may ask: facts and events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.protocol.core import Core, Table, Waiting
from syncline.protocol.replies import Events, InstanceStatus, Status, TableStatus, VersionStatus

if TYPE_CHECKING:
    from syncline.protocol import requests as req
    from syncline.protocol.instance import Instance
    from syncline.protocol.version import Version


def status(core: Core, request: req.StatusQuery) -> Status:
    """Return the job as the server sees it."""
    tables = [one for name, one in sorted(core.tables.items()) if request.table in (None, name)]
    return Status(core.job, core.boot, core.seq, tuple(_table(one) for one in tables))


def _table(table: Table) -> TableStatus:
    group = table.group
    return TableStatus(
        table.name,
        table.epoch,
        group.world if group else 0,
        tuple(group.missing) if group else (),
        table.recovering,
        tuple(_version(table.versions[key]) for key in sorted(table.versions)),
        tuple(_instance(table, table.instances[name]) for name in sorted(table.instances)),
    )


def _version(version: Version) -> VersionStatus:
    pins = tuple(sorted({pin.who for pin in version.pins.values()}))
    put, closed = tuple(sorted(version.puts)), tuple(sorted(version.closed))
    return VersionStatus(version.key, version.state, version.source, version.reason, put, closed, pins)


def _instance(table: Table, instance: Instance) -> InstanceStatus:
    attempt = instance.attempt
    version = table.versions.get(attempt.key) if attempt else None
    ranks = {member: rank for rank, member in instance.slots.items()}
    pins = version.pins.items() if version else ()
    nbytes = {ranks[holder]: pin.nbytes for (holder, number), pin in pins if number and holder in ranks}
    return InstanceStatus(
        instance.name,
        instance.world,
        instance.state,
        instance.committed,
        attempt.key if attempt and instance.pulling else None,
        instance.attempts,
        instance.dirty,
        instance.serving,
        tuple(sorted(instance.applying)),
        tuple(instance.missing),
        attempt.failure if attempt else "",
        nbytes,
    )


def watch(core: Core, request: req.Watch, until: float) -> Events | Waiting:
    """Return the events after ``since``; none at the deadline."""
    found = [event for event in core.log if event.seq > request.since][: max(1, request.limit)]
    if not found and core.now < until:
        return Waiting("events")
    oldest = core.log[0].seq if core.log else core.seq + 1
    return Events(tuple(found), request.since + 1 < oldest)
