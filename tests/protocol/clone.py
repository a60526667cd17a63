"""Copies of a world for the exploration, written out by class: a search makes a hundred thousand of them."""

from __future__ import annotations

from collections import deque
from enum import Enum
from operator import attrgetter
from typing import Any

import msgspec

from syncline.protocol.core import Core, Member, Resolved, Table, Timing, Wait
from syncline.protocol.instance import Attempt, Instance
from syncline.protocol.job import JobState
from syncline.protocol.lease import Leases, Pin
from syncline.protocol.version import Version
from syncline.protocol.writers import WriterGroup
from tests.protocol.procs import ControllerProc, InstanceProc, WorkerProc, WriterProc
from tests.protocol.world import World

# Mutable attributes by class: those with immutable values are copied flat, the others in depth. `mutable`
# proves the lists right.
FLAT: dict[type, tuple[str, ...]] = {
    World: ("seen", "digests", "puts", "down"),
    Core: ("members", "ended", "progress", "manifests", "bindings", "waits", "resolved"),
    Table: ("refusals",),
    Leases: ("expires",),
    WriterGroup: ("slots", "last", "gone", "orderly"),
    Version: ("puts", "closed", "memberships", "revoked", "torn"),
    Instance: ("slots", "last", "holds", "applying", "failures"),
    Attempt: ("plans", "touched", "moved", "told", "bound"),
}
DEEP: dict[type, tuple[str, ...]] = {
    World: ("state", "pinned", "writers", "instances"),
    JobState: ("core",),
    Core: ("leases", "tables", "log", "outbox"),
    Table: ("group", "versions", "instances"),
    Version: ("pins", "digests"),
    Instance: ("attempt",),
    Attempt: ("reports",),
    InstanceProc: ("controller", "workers"),
}
VALUES = {
    one: attrgetter(*one.__slots__) for one in (WriterProc, WorkerProc, ControllerProc, Pin)
}  # all immutable
SLOTS = {one: attrgetter(*one.__slots__) for one in (Table, Attempt, InstanceProc)}


def clone(value: Any) -> Any:
    """Copy everything mutable below ``value``; events are dropped."""
    kind = type(value)
    if value is None or kind is bytes:
        return value
    if kind is dict:
        return {key: clone(one) for key, one in value.items()}
    if kind is list:
        return [clone(one) for one in value]
    if kind is set:
        return value.copy()
    if kind is deque:
        return deque(maxlen=value.maxlen)
    if kind in VALUES:
        return kind(*VALUES[kind](value))
    if kind in SLOTS:
        copy = kind(*SLOTS[kind](value))
        for name in FLAT.get(kind, ()):
            setattr(copy, name, getattr(copy, name).copy())
        for name in DEEP.get(kind, ()):
            setattr(copy, name, clone(getattr(copy, name)))
        return copy
    copy = object.__new__(kind)
    fields = copy.__dict__ = value.__dict__.copy()
    for name in FLAT.get(kind, ()):
        fields[name] = fields[name].copy()
    for name in DEEP.get(kind, ()):
        fields[name] = clone(fields[name])
    return copy


def mutable(value: Any) -> set[int]:
    """Return the identities of all mutable objects below ``value``, found without knowing any class."""
    if isinstance(value, dict):
        return {id(value)}.union(*(mutable(one) for one in value.values()))
    if isinstance(value, list):
        return {id(value)}.union(*(mutable(one) for one in value))
    if isinstance(value, set | deque):
        return {id(value)}
    if isinstance(value, IMMUTABLE):
        return set()
    names = getattr(value, "__dict__", None) or type(value).__slots__
    return {id(value)}.union(*(mutable(getattr(value, name)) for name in names))


IMMUTABLE = (
    str,
    bytes,
    int,
    float,
    bool,
    type(None),
    tuple,
    Enum,
    msgspec.Struct,
    Member,
    Resolved,
    Timing,
    Wait,
)
