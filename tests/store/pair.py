"""Writers and readers of one job in one process, and engines whose shards are given by the test."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from syncline.adapters.fsdp import FSDPTrainer
from syncline.adapters.module import ModuleEngine
from syncline.layout import Box, Manifest, Shard, View
from syncline.memory import Binding
from syncline.options import Options
from syncline.store.reader import WeightReader
from syncline.store.worker import WorkerWeightsReader
from syncline.store.writer import WeightWriter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OPTIONS = {"connect_timeout": 15.0, "update_timeout": 15.0, "heartbeat": 0.5, "lease": 8.0, "stall": 4.0}


def stamped(*shape: int, start: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor in which every element is another integer."""
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float64).to(dtype).reshape(shape)


def module(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a module with these parameters, in the memory that is given, strides included."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at._modules[part]
        at.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
    return root


def blank(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the same shapes and dtypes, filled with a value that no test sends."""
    return {name: torch.full_like(tensor, -1) for name, tensor in tensors.items()}


def shard(
    name: str,
    shape: Sequence[int],
    offset: Sequence[int],
    size: Sequence[int],
    *,
    storage: int = 0,
    at: int = 0,
    stride: Sequence[int] | None = None,
    dtype: str = "float32",
) -> Shard:
    """Return a shard; its view is row-major if no strides are given."""
    view = (
        View.contiguous(storage, at, tuple(size))
        if stride is None
        else View.simple(storage, at, tuple(size), tuple(stride))
    )
    return Shard(name, tuple(shape), dtype, Box(tuple(offset), tuple(size)), view)


class Trainer(FSDPTrainer):
    """A trainer rank of plain tensors; ``shards`` say what they are if they are not whole."""

    def __init__(
        self, model: nn.Module, optimizers: Any = (), shards: Sequence[Shard] | None = None, **rest: Any
    ) -> None:
        super().__init__(model, optimizers, **rest)
        self._shards = shards

    @property
    def manifest(self) -> Manifest:
        whole = super().manifest
        if self._shards is None:
            return whole
        return Manifest.from_shards(self._shards, whole.storage_nbytes.tolist())


class Engine(ModuleEngine):
    """An engine rank that writes down what it is told; ``shards`` as for `Trainer`."""

    def __init__(self, model: nn.Module, shards: Sequence[Shard] | None = None, **rest: Any) -> None:
        super().__init__(model, **rest)
        self.calls: list[str] = []
        self.received: Any = None
        if shards is not None:
            self.manifest = Manifest.from_shards(shards, self.manifest.storage_nbytes.tolist())
            self._binding = Binding.private(self.manifest.fingerprint, self._addresses)

    def pause(self, mode: Any, deadline: float) -> None:
        self.calls.append("pause")
        super().pause(mode, deadline)

    def resume(self, key: Any) -> None:
        self.calls.append(f"resume {key}")
        super().resume(key)

    def after_update(self, key: Any, received: Any = None) -> None:
        self.calls.append(f"after_update {key}")
        self.received = received
        super().after_update(key, received)

    def flush_caches(self) -> None:
        self.calls.append("flush")
        super().flush_caches()

    def report_version(self, key: Any) -> None:
        self.calls.append(f"report {key}")
        super().report_version(key)


class Job:
    """Faces of one job, closed in reverse at the end.

    Args:
        name: of the job.
        options: change `OPTIONS` for every face.
    """

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        self.options = Options(**{**OPTIONS, **options})
        self._stack = contextlib.ExitStack()

    def writer(self, trainer: FSDPTrainer, **rest: Any) -> WeightWriter:
        made = WeightWriter(trainer, job=self.name, **{"options": self.options, **rest})
        self._stack.callback(made.close)
        return made

    def reader(self, engine: ModuleEngine, instance: str = "a", **rest: Any) -> WeightReader:
        made = WeightReader(engine, instance=instance, job=self.name, **{"options": self.options, **rest})
        self._stack.callback(made.close)
        return made

    def worker(self, engine: ModuleEngine, instance: str = "a", **rest: Any) -> WorkerWeightsReader:
        made = WorkerWeightsReader(
            engine, instance=instance, job=self.name, **{"options": self.options, **rest}
        )
        self._stack.callback(made.close)
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
