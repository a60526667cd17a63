"""What the store asks of a trainer and of an inference engine: two protocols and their small shared types.

An adapter is the only place that knows an engine. The store sees a manifest (what this process holds, in
checkpoint names), a binding (where that lies now) and the few moments at which an engine must obey: quiesce,
mutation points, pause, post-load hook, resume. One adapter object serves one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    import torch

    from syncline.layout.manifest import Manifest
    from syncline.memory.binding import Binding
    from syncline.memory.cuda import DeviceSegments
    from syncline.protocol.ids import VersionKey

PauseMode = Literal["abort", "wait"]
"""What a pause does to a running generation: cut it at its next token, or let it end."""


class Status(StrEnum):
    """Who is responsible for the contents of a live tensor."""

    SYNCED = "synced"
    """Installed by an update, under at least one checkpoint name."""
    DERIVED = "derived"
    """Recomputed by the engine's own hook after an update."""
    LOCAL = "local"
    """Neither: made by the engine when it started (rotary tables, rows beyond the checkpoint's size)."""


@dataclass(frozen=True, slots=True)
class LiveStatus:
    """One live tensor as ``syncline verify`` lists it.

    Attributes:
        status: who is responsible for its contents.
        names: the checkpoint names whose elements it holds; empty unless synced.
        dtype: torch's name of its dtype.
        shape: its local shape in this process.
    """

    status: Status
    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]


@runtime_checkable
class Handle(Protocol):
    """What a registration returns."""

    def remove(self) -> None:
        """Undo the registration; a second call does nothing."""
        ...


@runtime_checkable
class TrainerAdapter(Protocol):
    """One trainer process."""

    @property
    def rank(self) -> int:
        """Rank of this process among the writers of its table."""
        ...

    @property
    def world(self) -> int:
        """Number of writer processes."""
        ...

    @property
    def manifest(self) -> Manifest:
        """What this process holds, in checkpoint names and the dtypes of the live parameters."""
        ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """Second names of tied tensors: alias -> the name that the checkpoint carries."""
        ...

    def binding(self) -> Binding:
        """Check where every storage of the manifest lies now and return it.

        Cheap enough for every publish. A storage that moved gets a new generation.

        Raises:
            AdapterError: a parameter changed its dtype or shape, or has no memory (offloaded to nothing).
        """
        ...

    def share(self) -> Mapping[int, int]:
        """Move every storage of the manifest, in place, into memory that other processes can map.

        Returns a read-only descriptor of each region of `binding`, by region id; the adapter owns them. A
        second call moves nothing, nor does one for memory of a GPU (`DeviceTrainer`). What leaves that memory
        afterwards (offload and reload) is brought back by `binding`, under a new generation.

        Raises:
            MemoryBudgetError: not enough memory; nothing was touched.
            AdapterError: storages that cannot be shared, such as a device's; named.
        """
        ...

    def quiesce(self) -> None:
        """Finish what would still change the live parameters without a mutation point being called."""
        ...

    def on_mutation(self, before: Callable[[str], None]) -> Handle:
        """Call ``before(reason)``, such as ``before("optimizer.step")``, ahead of every mutation.

        One mutation may be announced more than once; the later calls should cost nothing.
        """
        ...


@runtime_checkable
class DeviceTrainer(Protocol):
    """Optional part of a trainer adapter: its parameters lie on a GPU.

    `TrainerAdapter.share` moves nothing then and returns no descriptors, and `TrainerAdapter.binding` is made
    by ``segments``.
    """

    @property
    def device(self) -> torch.device:
        """Where the parameters lie: one device for all of them."""
        ...

    @property
    def segments(self) -> DeviceSegments:
        """The allocator segments of that device: what is handed out to readers."""
        ...


@runtime_checkable
class DeviceEngine(Protocol):
    """Optional part of an engine adapter: its live tensors lie on a GPU."""

    @property
    def device(self) -> torch.device:
        """Where the live tensors lie: one device for all of them."""
        ...

    def finish_forwards(self) -> None:
        """Return when the device has finished what this process's paused engine, or its hooks, began.

        A pause holds the process back; kernels of the last forward pass may still run.
        """
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """What an engine takes in one go.

    Attributes:
        name: for messages, such as the name of a layer.
        storages: of the manifest.
    """

    name: str
    storages: tuple[int, ...]


@runtime_checkable
class StagedEngine(Protocol):
    """An engine adapter that takes its weights in stages, because the engine makes something else of them.

    A stage is received, proved and handed over before the next one begins, so that one memory, as large as
    the largest stage, can serve all of them: storages of different stages may overlap.
    """

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in their order: disjoint, and together all storages of the manifest. None: one go."""
        ...

    def begin_stage(self, index: int) -> None:
        """Make the memory of a stage ready for its first byte."""
        ...

    def end_stage(self, index: int) -> None:
        """Give the engine what was received and proved: replay transforms, let it process the layer.

        Raises:
            AdapterError: the engine refused; the instance stays DIRTY.
        """
        ...


@runtime_checkable
class EngineAdapter(Protocol):
    """One process of an inference instance."""

    @property
    def rank(self) -> int:
        """Rank of this process in its instance."""
        ...

    @property
    def world(self) -> int:
        """Number of processes of the instance: those that take part in one forward pass."""
        ...

    @property
    def manifest(self) -> Manifest:
        """The live tensors of this process, as shards of checkpoint tensors."""
        ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """Second names of tied tensors that live apart here: alias -> the checkpoint's name."""
        ...

    def binding(self) -> Binding:
        """Check that no live tensor moved since start, for captured graphs, and return the binding.

        Raises:
            AdapterError: a live tensor has another address, dtype, shape or storage than at start.
        """
        ...

    def pause(self, mode: PauseMode, deadline: float) -> None:
        """Return when no forward pass runs and none will start before `resume`.

        Args:
            mode: what happens to a generation that is running.
            deadline: seconds from now.

        Raises:
            DeadlineError: a forward pass still runs; the engine is not paused.
        """
        ...

    def resume(self, key: VersionKey | None) -> None:
        """Let forward passes run again, on version ``key``; None: on what was there before the pause."""
        ...

    def after_update(self, key: VersionKey, received: Collection[str] | None = None) -> None:
        """Recompute derived state, exactly once for each version, after its last byte was installed.

        Args:
            key: the version.
            received: the checkpoint names that were installed; None means all of the manifest. A hook none
                of whose inputs was received (a frozen draft model) is not called.
        """
        ...

    def flush_caches(self) -> None:
        """Drop every cache whose contents depend on the weights."""
        ...

    def report_version(self, key: VersionKey) -> None:
        """Tell the engine which version it serves from now on, so that its outputs can carry it."""
        ...

    def live_tensors(self) -> Mapping[str, torch.Tensor]:
        """Every live tensor of this process by the engine's own name: local shards, never gathered."""
        ...

    def live_status(self) -> Mapping[str, LiveStatus]:
        """Every tensor of `live_tensors`, each listed as synced, derived or local."""
        ...

    def load_fresh(self, directory: Path) -> Mapping[str, torch.Tensor]:
        """Load a checkpoint by the engine's own loader, beside the live tensors: the oracle of `effective`.

        All processes of the instance call it together. Returns tensors by live name, sharded and typed as
        `live_tensors`; the caller drops them before anything else is loaded.
        """
        ...
