"""A temporary job: a plain trainer, and the engine ranks that are checked, in one process."""

from __future__ import annotations

import contextlib
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

from syncline.conformance.plain import PlainTrainer, specs_of
from syncline.layout import Rules
from syncline.meta.clean import clean
from syncline.store.reader import WeightReader
from syncline.store.worker import WorkerWeightsReader
from syncline.store.writer import WeightWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    import torch

    from syncline.options import Options
    from syncline.store.adapter import EngineAdapter
    from syncline.store.report import UpdateReport


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call functions at the same time, one a rank, and return their results; the first error is raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


class Job:
    """A job of its own, gone when it is closed."""

    def __init__(self) -> None:
        self.name = f"conformance-{secrets.token_hex(6)}"
        self.stack = contextlib.ExitStack()
        self.stack.callback(clean, self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()


class Session:
    """Engine ranks that receive versions from a plain trainer.

    Args:
        job: of the run.
        adapters: the ranks of one instance, in order.
        options: deadlines.
        base: a checkpoint directory whose side files an engine's loader needs.

    Attributes:
        trainer: of everything that the engine takes.
        number: of the newest version.
    """

    def __init__(
        self, job: Job, adapters: Sequence[EngineAdapter], options: Options, base: Path | None
    ) -> None:
        self.adapters = list(adapters)
        self._job, self._options, self._base = job, options, base
        aliases: dict[str, str] = {}
        for adapter in adapters:
            aliases |= dict(adapter.aliases)
        self.trainer = PlainTrainer(specs_of([a.manifest for a in adapters], aliases))
        job.stack.callback(self.trainer.close)
        self.writer = WeightWriter(self.trainer, job=job.name, options=options)
        job.stack.callback(self.writer.close)
        self.number = 0
        self._readers: dict[str, WeightReader] = {}

    def join(self, adapters: Sequence[EngineAdapter], instance: str) -> None:
        """Let the ranks of an instance join, rank 0 last, since it waits for the others."""
        rest = {"job": self._job.name, "options": self._options, "rules": Rules(casts="reader")}
        for adapter in adapters[1:]:
            worker = WorkerWeightsReader(adapter, instance=instance, **rest)
            self._job.stack.callback(worker.close)
        reader = WeightReader(adapters[0], instance=instance, **rest)
        self._job.stack.callback(reader.close)
        self._readers[instance] = reader

    def publish(self, names: Collection[str] | None = None) -> None:
        """Give tensors, all or some, new contents and publish the next version."""
        self.number += 1
        self.trainer.fill(self.number, names)
        self.writer.publish(self.number)

    def update(self, instance: str) -> UpdateReport:
        """Bring an instance to the newest version, proved by what stands in its memory."""
        return self._readers[instance].update(self.number, verify="installed")

    def fresh(self, directory: Path) -> list[dict[str, torch.Tensor]]:
        """Save the newest version, and let every rank load it afresh by its engine's loader."""
        self.writer.save(directory, base=self._base)
        return together([lambda a=adapter: dict(a.load_fresh(directory)) for adapter in self.adapters])
