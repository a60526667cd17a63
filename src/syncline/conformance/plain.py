"""The other side of a run: a trainer, or an engine, of whole checkpoint tensors in plain memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from syncline.errors import ShapeMismatchError
from syncline.layout import Box, Manifest, Shard, View
from syncline.layout.export import dtype_name
from syncline.layout.written import Spec
from syncline.memory.arena import Arena, aligned
from syncline.memory.binding import Binding
from syncline.store.adapter import LiveStatus, Status
from syncline.verify.twin import random_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path

    from syncline.protocol.ids import VersionKey
    from syncline.store.adapter import PauseMode


def specs_of(manifests: Iterable[Manifest], aliases: Mapping[str, str]) -> dict[str, Spec]:
    """Return the checkpoint tensors that manifests are parts of; of several dtypes the first.

    Raises:
        ShapeMismatchError: two manifests give one tensor two shapes.
    """
    found: dict[str, Spec] = {}
    for manifest in manifests:
        for shard in manifest.shards():
            name = aliases.get(shard.name, shard.name)
            spec = found.setdefault(name, Spec(shard.global_shape, shard.dtype))
            if spec.shape != shard.global_shape:
                raise ShapeMismatchError(
                    "two ranks give one tensor two shapes",
                    expected=spec.shape,
                    found=shard.global_shape,
                    tensor=name,
                )
    return found


def _whole(specs: Mapping[str, Spec], sizes: list[int]) -> Manifest:
    shards = (
        Shard(name, spec.shape, spec.dtype, Box.whole(spec.shape), View.contiguous(number, 0, spec.shape))
        for number, (name, spec) in enumerate(specs.items())
    )
    return Manifest.from_shards(shards, sizes)


class _Listening:
    def __init__(self, hooks: list[Callable[[str], None]], hook: Callable[[str], None]) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        """Stop listening."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


class PlainTrainer:
    """A trainer of one rank that holds every tensor whole; satisfies `TrainerAdapter`.

    Args:
        specs: the tensors.

    Attributes:
        tensors: by name; change them by `fill`.
    """

    rank, world = 0, 1

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        self.specs = dict(specs)
        self.aliases: dict[str, str] = {}
        kinds = {name: getattr(torch, spec.dtype) for name, spec in specs.items()}
        sizes = [torch.Size(s.shape).numel() * kinds[name].itemsize for name, s in specs.items()]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + aligned(size))
        self._arena = Arena(starts[-1], "syncline-conformance")
        self._arena.reserve(0, starts[-1])
        self.tensors = {
            name: self._arena.storage(start, size).view(kinds[name]).view(spec.shape)
            for (name, spec), start, size in zip(specs.items(), starts, sizes, strict=False)
        }
        self.manifest = _whole(specs, sizes)
        region = self._arena.region
        owner = np.full(len(sizes), region.id, np.int32)
        places = np.array(starts[:-1], np.int64)
        self._binding = Binding(self.manifest.fingerprint, 1, owner, places, {region.id: region})
        self._hooks: list[Callable[[str], None]] = []

    def binding(self) -> Binding:
        """Return where the tensors lie; they never move."""
        return self._binding

    def share(self) -> dict[int, int]:
        """Return the arena's descriptor."""
        return {self._arena.region.id: self._arena.fd}

    def quiesce(self) -> None:
        """Nothing changes the tensors but `fill`."""

    def on_mutation(self, before: Callable[[str], None]) -> _Listening:
        """Call ``before`` ahead of every `fill`."""
        self._hooks.append(before)
        return _Listening(self._hooks, before)

    def fill(self, seed: int, names: Collection[str] | None = None) -> None:
        """Give tensors, all or those of ``names``, random finite contents."""
        for hook in list(self._hooks):
            hook("conformance: other weights")
        for name in self.tensors if names is None else names:
            self.tensors[name].copy_(random_tensor(self.specs[name], seed, name))

    def close(self) -> None:
        """Give the arena back."""
        self._arena.close()


class PlainEngine:
    """An engine of one rank that holds every tensor whole; satisfies `EngineAdapter`."""

    rank, world = 0, 1

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        self.aliases: dict[str, str] = {}
        self.version: VersionKey | None = None
        self.tensors = {
            name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()
        }
        sizes = [tensor.numel() * tensor.element_size() for tensor in self.tensors.values()]
        self.manifest = _whole(specs, sizes)
        places = [tensor.data_ptr() for tensor in self.tensors.values()]
        self._binding = Binding.private(self.manifest.fingerprint, places)

    def binding(self) -> Binding:
        """Return where the tensors lie; they never move."""
        return self._binding

    def pause(self, mode: PauseMode, deadline: float) -> None:
        """No forward pass ever runs."""

    def resume(self, key: VersionKey | None) -> None:
        """No forward pass ever runs."""

    def after_update(self, key: VersionKey, received: Collection[str] | None = None) -> None:
        """Nothing is derived."""

    def flush_caches(self) -> None:
        """Nothing is cached."""

    def report_version(self, key: VersionKey) -> None:
        """Remember it."""
        self.version = key

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors."""
        return dict(self.tensors)

    def live_status(self) -> dict[str, LiveStatus]:
        """All are synced."""
        return {
            name: LiveStatus(Status.SYNCED, (name,), dtype_name(t.dtype), tuple(t.shape))
            for name, t in self.tensors.items()
        }

    def load_fresh(self, directory: Path) -> dict[str, torch.Tensor]:
        """Read the checkpoint's files."""
        from safetensors.torch import load_file  # noqa: PLC0415 (only for this)

        found: dict[str, torch.Tensor] = {}
        for file in sorted(directory.glob("*.safetensors")):
            found |= load_file(file)
        return found
