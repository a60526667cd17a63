"""Inference with any `torch.nn.Module`: the adapter for an engine of your own.

The module's ``state_dict`` names are the checkpoint's. Sharding is read off DTensors; an engine that cuts
plain tensors itself says so with `Cut`. The engine calls `ModuleEngine.forward` around each forward pass, so
that an update never meets one.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncline.adapters.live import LiveTensors
from syncline.adapters.modules import local_part, ties, walk
from syncline.adapters.placed import Forwards, device_of
from syncline.adapters.transformers_names import learn_names
from syncline.errors import AdapterError, DeadlineError
from syncline.layout.box import Box
from syncline.layout.export import dtype_name
from syncline.layout.manifest import Manifest
from syncline.layout.shard import Shard
from syncline.layout.view import View
from syncline.memory.binding import Binding
from syncline.store.adapter import LiveStatus, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    import torch
    from torch import nn

    from syncline.protocol.ids import VersionKey
    from syncline.store.adapter import PauseMode


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a checkpoint tensor a plain live tensor holds.

    Attributes:
        global_shape: of the checkpoint tensor.
        offset: where the live tensor's first element stands in it.
        name: the checkpoint's name; the module's own if left out.
    """

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    name: str | None = None


class ModuleEngine:
    """One process of an instance of your own engine; satisfies `syncline.store.adapter.EngineAdapter`.

    Args:
        model: holds this process's part of the model.
        rank: of this process in its instance.
        world: number of processes of the instance.
        cuts: by module name of the tensor, what a plain tensor holds if it is not the whole of it.
        loader: returns a module of the same form, filled from a checkpoint directory: the oracle of
            ``effective``.
        after_update: called with the module once a version, after its last byte was installed: recomputes
            derived state in place.
        flush: drops caches that depend on the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rank: int = 0,
        world: int = 1,
        cuts: Mapping[str, Cut] | None = None,
        loader: Callable[[Path], nn.Module] | None = None,
        after_update: Callable[[nn.Module], None] | None = None,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.rank, self.world = model, rank, world
        self.version: VersionKey | None = None
        self._loader, self._hook, self._flush = loader, after_update, flush
        self._tree = walk(model)
        self._names = learn_names(model, self._tree)
        self._live = LiveTensors(self._tree, self._names, f"rank {rank}")
        self.aliases = self._names.aliases
        self.manifest = _apply_cuts(self._live.manifest, dict(cuts or {}))
        self._addresses = self._live.addresses()
        self.device = device_of(self._live.parts(), self._live.names, f"rank {rank}")
        self._forwards = Forwards(self.device)
        self._binding = Binding.private(self.manifest.fingerprint, self._addresses)
        self._turn = threading.Lock()
        self._open = threading.Event()
        self._open.set()

    @property
    def paused(self) -> bool:
        """Whether forward passes are held back."""
        return not self._open.is_set()

    @contextmanager
    def forward(self, deadline: float = 120.0) -> Iterator[None]:
        """Wrap each forward pass; waits while an update is under way.

        Raises:
            DeadlineError: still paused after ``deadline`` seconds.
        """
        if not self._open.wait(deadline):
            raise DeadlineError(
                f"the engine is paused for more than {deadline:g} s", rank=f"rank {self.rank}"
            )
        with self._turn:
            try:
                yield
            finally:
                self._forwards.ended()

    def finish_forwards(self) -> None:
        """Return when no kernel of a forward pass, or of the hook, runs any more."""
        self._forwards.finish()

    def binding(self) -> Binding:
        """Return where the live tensors lie; they must not have moved since start."""
        moved = self._live.addresses() != self._addresses
        if moved.any():
            raise AdapterError(
                "a live tensor moved",
                expected="the address it had at start",
                rank=f"rank {self.rank}",
                tensor=self._live.name_of(int(moved.argmax())),
                hint="write into parameters in place; after moving a model make a new engine",
            )
        return self._binding

    def pause(self, mode: PauseMode, deadline: float) -> None:
        """Return when no forward pass runs and none will start."""
        self._open.clear()
        if not self._turn.acquire(timeout=deadline):
            self._open.set()
            raise DeadlineError(f"a forward pass still runs after {deadline:g} s", rank=f"rank {self.rank}")
        self._turn.release()

    def resume(self, key: VersionKey | None) -> None:
        """Let forward passes run again."""
        if key is not None:
            self.version = key
        self._open.set()

    def after_update(self, key: VersionKey, received: Collection[str] | None = None) -> None:
        """Run the hook, once for each version."""
        if self._hook is not None and key != self.version:
            self._hook(self.model)

    def flush_caches(self) -> None:
        """Drop caches."""
        self._flush()

    def report_version(self, key: VersionKey) -> None:
        """Remember which version is served."""
        self.version = key

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """Return the live tensors of this process by name, a tied one once."""
        return _named(self.model)

    def live_status(self) -> dict[str, LiveStatus]:
        """List every live tensor as synced or local."""
        found = {}
        for name, part in self.live_tensors().items():
            names = (name,) if name in self._names.sources else ()
            status = Status.SYNCED if names else Status.LOCAL
            found[name] = LiveStatus(status, names, dtype_name(part.dtype), tuple(part.shape))
        return found

    def load_fresh(self, directory: Path) -> dict[str, torch.Tensor]:
        """Load a checkpoint by the loader that was given."""
        if self._loader is None:
            raise AdapterError(
                "this engine has no loader to check against", expected="ModuleEngine(..., loader=...)"
            )
        return _named(self._loader(directory))


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    tree = walk(model)
    second = {name for group in ties(tree.state) for name in group[1:]}
    cells = tree.state | tree.local
    return {name: local_part(cell.get()).detach() for name, cell in cells.items() if name not in second}


def _apply_cuts(manifest: Manifest, cuts: dict[str, Cut]) -> Manifest:
    if not cuts:
        return manifest
    shards = [_cut(shard, cuts.pop(shard.name, None)) for shard in manifest.shards()]
    if cuts:
        raise AdapterError("cuts of tensors that the module does not have", found=sorted(cuts)[:5])
    return Manifest.from_shards(shards, manifest.storage_nbytes.tolist())


def _cut(shard: Shard, cut: Cut | None) -> Shard:
    if cut is None:
        return shard
    box = Box(cut.offset, shard.box.size)
    view = View(shard.view.storage, shard.view.offset, shard.view.shape, shard.view.stride)
    return Shard(cut.name or shard.name, cut.global_shape, shard.dtype, box, view, shard.transforms)
