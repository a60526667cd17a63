"""The suite as a whole: from a factory to a report."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline import extensions
from syncline.conformance import pausing, static, trainer
from syncline.conformance.report import Report
from syncline.conformance.session import Job, Session
from syncline.conformance.updates import Updates
from syncline.errors import SynclineError
from syncline.options import Options
from syncline.store.adapter import EngineAdapter, TrainerAdapter

if TYPE_CHECKING:
    from collections.abc import Callable

    Factory = Callable[[int, int], Any]


def factory_of(target: str) -> Factory:
    """Return the factory that a text names.

    Args:
        target: ``"package.module:attribute"``, or the name of an entry point of ``syncline.adapters``.

    Raises:
        SynclineError: there is none; says why.
    """
    module, colon, path = target.partition(":")
    if not colon:
        return _callable(target, extensions.adapter(target))
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:  # somebody's module may raise anything
        raise SynclineError(
            f"cannot import {target}",
            expected="package.module:factory",
            found=f"{type(error).__name__}: {error}",
        ) from error
    return _callable(target, found)


def _callable(target: str, found: Any) -> Factory:
    if not callable(found):
        raise SynclineError(
            f"{target} cannot be called",
            expected="factory(rank, world) -> adapter",
            found=type(found).__name__,
        )
    return found


def check(
    factory: Factory,
    *,
    world: int = 1,
    base: Path | None = None,
    options: Options | None = None,
    subject: str = "",
) -> Report:
    """Run all checks that apply to what a factory makes, and return what they found.

    The adapters' contents are overwritten. All ranks live in this process.

    Args:
        factory: called as ``factory(rank, world)``; returns the adapter of that rank, of a new engine or
            trainer each time. What needs a process of its own for each rank is checked with ``world=1``.
        world: number of ranks.
        base: a checkpoint directory whose configuration files the engine's loader needs beside the weights.
        options: deadlines; from the environment if left out.
        subject: what the report is about.
    """
    options = options or Options.from_environment()
    adapters: list[Any] = []
    report = Report(subject or getattr(factory, "__qualname__", repr(factory)), "engine")

    def make() -> list[Any]:
        return [factory(rank, world) for rank in range(world)]

    if not report.run("factory", lambda: adapters.extend(make())):
        return report
    if all(hasattr(adapter, "on_mutation") for adapter in adapters):
        report.kind = "trainer"
    with tempfile.TemporaryDirectory(prefix="syncline-conformance-") as scratch, Job() as job:
        if report.kind == "trainer":
            _check_trainer(report, adapters, job, options)
        else:
            _check_engine(
                report, adapters, make, lambda: Session(job, adapters, options, base), Path(scratch)
            )
    return report


def _check_engine(
    report: Report,
    adapters: list[Any],
    make: Callable[[], list[Any]],
    begin: Callable[[], Session],
    scratch: Path,
) -> None:
    world = len(adapters)

    def each(run: Callable[[Any], None]) -> Callable[[], object]:
        return lambda: [run(adapter) for adapter in adapters]

    report.run(
        "contract",
        lambda: [static.contract(a, EngineAdapter, rank, world) for rank, a in enumerate(adapters)],
    )
    for name, run, needs in (
        ("manifest", static.manifest, ["contract"]),
        ("stages", static.stages, ["contract", "manifest"]),
        ("binding", static.binding, ["contract", "manifest"]),
        ("live_status", static.live_status, ["contract", "manifest"]),
    ):
        report.run(name, each(run), needs)
    for name, run in (
        ("pause", pausing.plain),
        ("pause.holds", pausing.holds),
        ("pause.deadline", pausing.deadline),
    ):
        report.run(name, lambda run=run: run(adapters[0]), ["contract"])
    made: list[Updates] = []

    def join() -> None:
        made.append(Updates(begin(), scratch, make))
        made[0].join()

    broken = [name for name in ("stages",) if name in report.failed]
    report.run("join", join, ["contract", "manifest", "binding", *broken])
    for name, call, needs in _UPDATES:
        report.run(name, lambda call=call: getattr(made[0], call)(), needs)


_UPDATES = (
    ("update.first", "update", ["join"]),
    ("effective.first", "effective", ["update.first"]),
    ("update.second", "update", ["update.first"]),
    ("effective.second", "effective", ["update.second"]),
    ("addresses", "addresses", ["update.second"]),
    ("version", "version", ["update.second"]),
    ("live_status.names", "names", ["live_status", "update.second"]),
    ("after_update.once", "once", ["update.second"]),
    ("caches", "caches", ["update.second"]),
    ("misuse.checkpoint", "checkpoint", ["join"]),
    ("misuse.stage", "stage", ["join"]),
)


def _check_trainer(report: Report, adapters: list[Any], job: Job, options: Options) -> None:
    world = len(adapters)

    def each(run: Callable[[Any], None]) -> Callable[[], object]:
        return lambda: [run(adapter) for adapter in adapters]

    report.run(
        "contract",
        lambda: [static.contract(a, TrainerAdapter, rank, world) for rank, a in enumerate(adapters)],
    )
    for name, run, needs in (
        ("manifest", static.manifest, ["contract"]),
        ("share", trainer.share, ["contract", "manifest"]),
        ("binding", static.binding, ["share"]),
        ("mutation", trainer.mutation, ["contract"]),
    ):
        report.run(name, each(run), needs)
    publishing = trainer.Publishing(job, adapters, options)
    for name, call, needs in (
        ("join", publishing.join, ["binding"]),
        ("update.first", publishing.update, ["join"]),
        ("update.second", publishing.update, ["update.first"]),
        ("addresses", each(static.binding), ["update.second"]),
    ):
        report.run(name, call, needs)
