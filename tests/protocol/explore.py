"""Exhaustive breadth-first exploration of the world, up to symmetry.

What is explored: every interleaving of the actions of 2 writers that publish up to ``versions`` versions one
after the other (put with digests, close, change the weights), and of 2 instances of 2 ranks that update in
place or staged (begin, read one half from each writer, report, commit at any moment, apply), with at most
``faults`` faults a run: the silent death of a writer or of a worker, the replacement of a worker or of a
controller by a new process, a rank that is stuck while its heart beats, all deadlines running out, or a
restart of the server, after which readers come back at once and writers one by one.

What is bounded: versions, faults, and ``begins`` of each instance; the window of the last version stays open;
a ``coarse`` instance does all that it can in one step and meets no fault. Requests take no time; time passes
only in faults. What is merged: states that differ by a renaming of instances, of the ranks of an instance, of
processes, members, attempts and tickets, or by the clock's origin. Events and texts are no part of a state.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import msgspec

from tests.protocol.clone import clone
from tests.protocol.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncline.protocol.ids import VersionKey
    from syncline.protocol.parts import Mode
    from syncline.protocol.version import Version

Action = tuple[Any, ...]


# --- canonical form


def canonical(world: World, extra: dict[str, int], bounds: Bounds) -> tuple[Any, ...]:
    """Return what distinguishes a state from others, up to symmetry.

    Left out is what no enabled action can bring to light: what `Failed` would ask for (not explored), what a
    registration would tell once no fault is to come, and the facts of versions that are over.
    """
    core = world.state.core
    table = core.tables["weights"]
    faults = extra["faults"] < bounds.faults
    closing = {wait.ticket for wait in core.waits.values()}
    versions = [table.versions[key] for key in sorted(table.versions)]
    writers = []
    for writer in world.writers:
        here = table.group is not None and writer.rank in table.group.slots
        ghost = (writer.holds, writer.put, writer.closing in closing) if writer.alive else None
        facts = tuple(_version_of(one, writer.rank) for one in versions)
        writers.append((here, writer.rank in world.down, facts, ghost))
    instances = []
    pins = {holder: v.key for v in versions for (holder, _attempt) in v.pins}
    for name, proc in world.instances.items():
        one = table.instances.get(name)
        ranks = sorted((_rank(one, worker, pins, faults) for worker in proc.workers), key=hash)
        instances.append((_instance(one, proc, faults), tuple(ranks), extra[name]))
    if not bounds.coarse:
        instances.sort(key=hash)
    group = table.group
    shared = (
        table.epoch,
        table.sealed,
        table.recovering,
        group and (group.high, faults and group.assembling, group.refilled, len(group.orderly)),
        core.restarted,
        extra["faults"],
    )
    return (shared, tuple((v.key, v.state) for v in versions), tuple(writers), tuple(instances))


def _version_of(version: Version, rank: int) -> tuple[bool, ...]:
    digested = any(rank in known for known in version.digests.values())
    if version.state in ("RETIRED", "ABORTED"):
        return (digested,)
    return (digested, rank in version.puts, rank in version.closed)


def _instance(one: Any, proc: Any, faults: bool) -> tuple[Any, ...]:
    controller = proc.controller
    begun = controller.begun
    ghost = (
        controller.alive,
        begun and (begun[0], one is not None and begun[1] == one.attempts, *begun[2:]),
        controller.waiting is not None and controller.mode,
        faults and controller.committed,
        proc.high,
    )
    if one is None:
        return (None, *ghost)
    attempt = one.attempt
    attempted = attempt and (
        attempt.nonce == controller.nonce,
        not attempt.failure and (attempt.key, attempt.mode),
    )
    return (one.state, one.committed, one.dirty, attempted, -1 in one.slots, *ghost)


def _rank(one: Any, worker: Any, pins: dict[int, VersionKey], faults: bool) -> tuple[Any, ...]:
    rank = worker.rank
    ghost: Any = None
    if worker.alive:
        job = worker.job
        ghost = (
            worker.live,
            job and job[2] == "staged" and worker.shadow,
            faults and worker.dirty,
            worker.applied,
            job
            and (
                job[0],
                one is not None and job[1] == one.attempts,
                *job[2:],
                worker.halves,
                worker.verified,
            ),
            worker.apply,
        )
    if one is None:
        return (ghost,)
    attempt = one.active
    here = one.slots.get(rank)
    plan = attempt is not None and rank in attempt.plans
    return (here is not None, pins.get(here or 0), one.holds.get(rank), rank in one.applying, plan, ghost)


# --- actions


def enabled(world: World, extra: dict[str, int], bounds: Bounds) -> list[Action]:
    found: list[Action] = []
    for writer in world.writers:
        if not writer.alive:
            continue
        if writer.rank in world.down:
            found.append(("come_back", writer.rank))
        elif writer.closing is None and not writer.put and writer.holds <= bounds.versions:
            found.append(("put", writer.rank))
        elif writer.closing is None and writer.put and writer.holds < bounds.versions:
            found.append(("close", writer.rank))
    for name, proc in world.instances.items():
        controller = proc.controller
        if controller.alive and extra[name] < bounds.begins and controller.waiting is None:
            found += [("begin", name, mode) for mode in bounds.modes]
        steps = _coarse_steps if name in bounds.coarse else _fine_steps
        found += steps(name, proc)
    if extra["faults"] < bounds.faults:
        found += _faults(world, bounds)
    return found


def _fine_steps(name: str, proc: Any) -> list[Action]:
    found: list[Action] = []
    if proc.controller.alive and proc.controller.begun is not None:
        found.append(("commit", name))
    for worker in proc.workers:
        if worker.alive and worker.job is not None and worker.halves < 2:
            found.append(("read", name, worker.rank))
        if worker.alive and worker.apply is not None:
            found.append(("apply", name, worker.rank))
    return found


def _coarse_steps(name: str, proc: Any) -> list[Action]:
    return [("finish", name)] if proc.controller.begun is not None else []


def _faults(world: World, bounds: Bounds) -> list[Action]:
    found: list[Action] = [("writer_dies", writer.rank) for writer in world.writers if writer.alive]
    for name, proc in world.instances.items():
        if name in bounds.coarse:
            continue
        found.append(("replace_controller", name))
        for worker in proc.workers:
            if worker.alive:
                found.append(("worker_dies", name, worker.rank))
            if worker.job is not None:
                found.append(("replace_worker", name, worker.rank))
                found.append(("stuck", name, worker.rank))
    if world.state.core.waits:
        found.append(("deadlines",))
    found.append(("restart",))
    return found


class Bounds(msgspec.Struct, frozen=True):
    """How far the exploration goes; ``coarse`` instances do all that they can at once, and meet no fault."""

    versions: int = 3
    begins: int = 1
    faults: int = 1
    modes: tuple[str, ...] = ("in_place",)
    coarse: tuple[str, ...] = ()


def act(world: World, extra: dict[str, int], action: Action) -> None:
    """Do one thing, in place."""
    _ACTIONS[action[0]](world, extra, *action[1:])


def _put(world: World, _extra: dict[str, int], rank: int) -> None:
    world.put(world.writers[rank])
    if world.writers[rank].put:
        world.digest(world.writers[rank])


def _begin(world: World, extra: dict[str, int], name: str, mode: Mode) -> None:
    extra[name] += 1
    world.begin(world.instances[name], mode)


def _finish(world: World, _extra: dict[str, int], name: str) -> None:
    instance = world.instances[name]
    for worker in instance.workers:
        while worker.alive and worker.job is not None and worker.halves < 2:
            world.read(instance, worker)
    world.commit(instance)
    for worker in instance.workers:
        if worker.alive and worker.apply is not None:
            world.apply(instance, worker)
    instance.controller.begun = None


def _fault(do: Callable[..., None]) -> Callable[..., None]:
    def counted(world: World, extra: dict[str, int], *args: Any) -> None:
        extra["faults"] += 1
        do(world, *args)

    return counted


def _writer_dies(world: World, rank: int) -> None:
    world.writers[rank].alive = False
    world.pass_time(11.0, step=9.0)


def _worker_dies(world: World, name: str, rank: int) -> None:
    world.instances[name].workers[rank].alive = False
    world.pass_time(11.0, step=9.0)


def _stuck(world: World, name: str, rank: int) -> None:
    world.pass_time(10.0, stuck=(world.instances[name].workers[rank],), step=9.0)


def _replace_worker(world: World, name: str, rank: int) -> None:
    world.replace_worker(world.instances[name], world.instances[name].workers[rank])


_ACTIONS: dict[str, Callable[..., Any]] = {
    "put": _put,
    "close": lambda world, _extra, rank: world.close(world.writers[rank]),
    "come_back": lambda world, _extra, rank: world.come_back(world.writers[rank]),
    "begin": _begin,
    "read": lambda world, _extra, name, rank: world.read(
        world.instances[name], world.instances[name].workers[rank]
    ),
    "commit": lambda world, _extra, name: world.commit(world.instances[name]),
    "apply": lambda world, _extra, name, rank: world.apply(
        world.instances[name], world.instances[name].workers[rank]
    ),
    "finish": _finish,
    "writer_dies": _fault(_writer_dies),
    "worker_dies": _fault(_worker_dies),
    "replace_worker": _fault(_replace_worker),
    "replace_controller": _fault(lambda world, name: world.replace_controller(world.instances[name])),
    "stuck": _fault(_stuck),
    "deadlines": _fault(lambda world: world.pass_time(21.0, step=9.0)),
    "restart": _fault(lambda world: world.restart()),
}


class Result(msgspec.Struct):
    """What an exploration saw: distinct states, transitions, and what the instances served in some state."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    served: set[Any] = msgspec.field(default_factory=set)
    outcomes: set[str] = msgspec.field(default_factory=set)


def explore(bounds: Bounds) -> Result:
    """Visit every reachable state once and check it; a violation names the way that led there."""
    gc.disable()  # worlds hold no cycles, and there are many of them
    try:
        return _explore(bounds)
    finally:
        gc.enable()


def _explore(bounds: Bounds) -> Result:
    world = World()
    world.deadline = 20.0  # longer than the time that any other fault takes
    extra = {"faults": 0, **dict.fromkeys(world.instances, 0)}
    result = Result()
    seen = {hash(canonical(world, extra, bounds))}
    frontier: list[tuple[World, dict[str, int], tuple[Any, ...] | None]] = [(world, extra, None)]
    while frontier:
        following = []
        for here, counts, way in frontier:
            for action in enabled(here, counts, bounds):
                world, extra = clone(here), dict(counts)
                result.transitions += 1
                path = (action, way)
                try:
                    act(world, extra, action)
                    mark = hash(canonical(world, extra, bounds))
                    if mark in seen:
                        continue
                    world.check()
                except AssertionError as error:
                    raise AssertionError(f"{error}\n  after {_unroll(path)}") from error
                seen.add(mark)
                following.append((world, extra, path))
                _note(world, result)
        frontier = following
        result.depth += 1
    result.states = len(seen)
    return result


def _unroll(path: tuple[Any, ...] | None) -> list[Action]:
    steps = []
    while path is not None:
        steps.append(path[0])
        path = path[1]
    return steps[::-1]


def _note(world: World, result: Result) -> None:
    table = world.state.core.tables["weights"]
    result.outcomes |= {str(version.state) for version in table.versions.values()}
    for instance in table.instances.values():
        result.outcomes.add("DIRTY" if instance.dirty else str(instance.state))
        if instance.serving:
            result.served.add(instance.committed)
