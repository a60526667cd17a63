"""Checks of a trainer adapter: what it publishes is what stands in its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncline.conformance import memory
from syncline.conformance.plain import PlainEngine, specs_of
from syncline.conformance.report import NonconformityError
from syncline.layout.dtype import itemsize
from syncline.store.reader import WeightReader
from syncline.store.writer import WeightWriter
from syncline.verify.twin import random_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from syncline.conformance.session import Job
    from syncline.layout.written import Spec
    from syncline.options import Options


def share(adapter: Any) -> None:
    """Check that all storages lie in regions that can be handed out, and that a second call moves nothing."""
    given = adapter.share()
    before = adapter.binding()
    used = set(before.region[adapter.manifest.storage_nbytes > 0].tolist())
    if not used <= set(given):
        raise NonconformityError(
            "storages in regions without a descriptor", expected=sorted(used), found=sorted(given)
        )
    before.to_wire()
    adapter.share()
    if not before.same_places(adapter.binding()):
        raise NonconformityError("a second share() moved storages", expected="nothing moves")


def mutation(adapter: Any) -> None:
    """Check that a registration can be taken back, twice."""
    handle = adapter.on_mutation(lambda _reason: None)
    handle.remove()
    handle.remove()
    adapter.quiesce()


class Publishing:
    """The checks that need a job.

    Args:
        job: of the run.
        adapters: the trainer's ranks, in order.
        options: deadlines.
    """

    def __init__(self, job: Job, adapters: list[Any], options: Options) -> None:
        self._job, self._adapters, self._options = job, adapters, options
        self._specs: dict[str, Spec] = {}
        self._writers: list[WeightWriter] = []
        self._number = 0

    def join(self) -> None:
        """Check that a reader that wants every tensor whole can be fed."""
        for adapter in self._adapters:
            writer = WeightWriter(adapter, job=self._job.name, options=self._options)
            self._job.stack.callback(writer.close)
            self._writers.append(writer)
        self._specs = specs_of([adapter.manifest for adapter in self._adapters], {})
        self._engine = PlainEngine(self._specs)
        reader = WeightReader(self._engine, instance="plain", job=self._job.name, options=self._options)
        self._job.stack.callback(reader.close)
        self._reader = reader

    def update(self) -> None:
        """Check that a version with new contents arrives as it stands in the trainer's memory."""
        self._number += 1
        wanted = {name: random_tensor(spec, self._number, name) for name, spec in self._specs.items()}
        for writer, adapter in zip(self._writers, self._adapters, strict=True):
            writer.close_window("conformance: other weights")
            self._write(adapter, wanted)
        for writer in self._writers:
            writer.publish(self._number)
        self._reader.update(self._number, verify="installed")
        for name, tensor in self._engine.tensors.items():
            if memory.digest(tensor) != memory.digest(wanted[name]):
                raise NonconformityError(
                    "a reader did not receive what the trainer's memory holds",
                    expected="the tensor that was written at the manifest's places",
                    tensor=name,
                )

    def _write(self, adapter: Any, wanted: Mapping[str, torch.Tensor]) -> None:
        for shard, live in memory.shards_in(adapter.manifest, adapter.binding()):
            if itemsize(shard.dtype) and not shard.transforms:
                np.copyto(live, memory.part_of(shard, wanted[shard.name]))
