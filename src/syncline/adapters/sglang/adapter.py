"""The adapter of one SGLang scheduler process: one rank of an instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from syncline import faults
from syncline.adapters.explained import Explained
from syncline.adapters.sglang import staging, twin
from syncline.adapters.sglang.layout import Plot, survey
from syncline.adapters.sglang.srt import srt, srt_version
from syncline.adapters.sglang.tensors import slots, values
from syncline.errors import AdapterError
from syncline.layout.export import dtype_name
from syncline.memory.binding import Binding
from syncline.store.adapter import LiveStatus, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from syncline.adapters.sglang.errands import Errands
    from syncline.layout.loader import Spec
    from syncline.layout.manifest import Manifest
    from syncline.protocol.ids import VersionKey
    from syncline.store.adapter import PauseMode, Stage
    from syncline.verify.twin import TwinReport


class SGLangAdapter:
    """One scheduler process; satisfies `syncline.store.adapter.EngineAdapter`, stages included.

    It is made in the scheduler's thread, while that stands still. What SGLang computes from weights is
    recomputed in that thread too, whichever thread asks for it.

    Args:
        runner: SGLang's ``ModelRunner`` of the model.
        rank: of this process among those of one forward pass.
        world: their number.
        checkpoint: what the checkpoint holds, by name.
        errands: runs things in the scheduler's thread.
        flush: SGLang's own flush of its caches; False if it was refused.
        local: fnmatch patterns of live names that the engine keeps for itself.

    Attributes:
        held: whether the instance's controller wants no forward pass now.
        learned: from a weightless twin of the model.
        unused: checkpoint names that SGLang's loader ignored.
        version: that is served.

    Raises:
        AdapterError: a live tensor that nothing explains, or a module that cannot be updated; named.
        LayoutError: SGLang's loader computes something that cannot be followed; named.
    """

    def __init__(
        self,
        runner: Any,
        *,
        rank: int,
        world: int,
        checkpoint: Mapping[str, Spec],
        errands: Errands,
        flush: Callable[[], bool],
        local: Sequence[str] = (),
    ) -> None:
        self.rank, self.world = rank, world
        self._runner, self._errands, self._flush = runner, errands, flush
        self._checkpoint = checkpoint
        self.learned = twin.learn(runner, checkpoint)
        self._plot: Plot = survey(runner.model, self.learned, str(runner.device), local, f"rank {rank}")
        self.unused = tuple(self.learned.trace.unused)
        self.aliases: dict[str, str] = {}
        self._arena = staging.Arena(self._plot.groups, runner.device)
        self._binding = Binding.private(self.manifest.fingerprint, self._plot.addresses(self._arena.address))
        self.version: VersionKey | None = None
        self.held = False
        self._derived_for: VersionKey | None = None

    @property
    def manifest(self) -> Manifest:
        """Views of checkpoint tensors into the live tensors, or into the staging arena."""
        return self._plot.manifest

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What is written directly, first; then what goes through SGLang's post-processing, by layer."""
        return self._plot.stages

    def counts(self) -> dict[str, int]:
        """Return how many live tensors are copied into, computed, derived, local, and staged."""
        return self._plot.counts()

    def binding(self) -> Binding:
        """Return where everything lies; live tensors must not have moved since start.

        Raises:
            AdapterError: a synced or derived tensor moved or changed its form; named.
        """
        self._plot.check_pins()
        return self._binding

    # ------------------------------------------------------------------------------------ update protocol

    def pause(self, mode: PauseMode, deadline: float) -> None:
        """Check that the scheduler's thread stands still: whoever asked for the update has stopped it.

        Raises:
            AdapterError: it runs.
        """
        del mode, deadline
        if not self._errands.serving:
            raise AdapterError(
                "the scheduler runs while an update begins",
                rank=f"rank {self.rank}",
                hint="updates are asked for by SGLangInstance.update",
            )
        self.held = True

    def resume(self, key: VersionKey | None) -> None:
        """Note the version; the scheduler goes on when its command is answered and generation continues."""
        if key is not None:
            self.version = key
        self.held = False

    def begin_stage(self, index: int) -> None:
        """Prepare for a stage's first byte: the arena is there already."""
        faults.point("sglang.before_stage")
        if not 0 <= index < len(self.stages):
            raise AdapterError("no such stage", expected=f"below {len(self.stages)}", found=index)

    def end_stage(self, index: int) -> None:
        """Put what was received through SGLang's own loading and post-processing."""
        group = self._plot.group_of(index)
        if group is not None:
            self._errands.run(lambda: self._put_through(group))

    def after_update(self, key: VersionKey, received: Collection[str] | None = None) -> None:
        """Let SGLang recompute what it derives from weights, once for each version."""
        if key == self._derived_for or (received is not None and not received):
            return
        faults.point("adapters.after_update")
        self._errands.run(self._recompute)
        self._derived_for = key

    def flush_caches(self) -> None:
        """Drop every cache whose contents depend on the weights.

        Raises:
            AdapterError: SGLang refused, since requests still hold such a cache.
        """
        if not self._errands.run(self._flush):
            raise AdapterError(
                "the engine refused to flush its caches: requests still hold what old weights computed",
                rank=f"rank {self.rank}",
                hint='pause with "retract" or "abort"; "in_place" keeps running requests and their caches',
            )

    def report_version(self, key: VersionKey) -> None:
        """Note which version is served; requests hear of it from the instance's user."""
        self.version = key

    # ------------------------------------------------------------------------------------ live tensors

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """Return every live tensor of this process by SGLang's name, plain attributes included."""
        return values(slots(self._runner.model))

    def live_status(self) -> dict[str, LiveStatus]:
        """List every live tensor as synced, derived or local.

        Raises:
            AdapterError: one that nothing explains (it came into being after the start); named.
        """
        return {
            name: LiveStatus(*self._explained(name), dtype_name(part.dtype), tuple(part.shape))
            for name, part in self.live_tensors().items()
        }

    def explained(self) -> Explained:
        """Return what each live tensor is, and how many tensors are put in which way."""
        staged = self.counts()["staged"]
        counted = {"direct": len(self._plot.names) - staged, "staged": staged}
        ways = {way: count for way, count in counted.items() if count}
        return Explained.of(self.live_status(), self.learned.trace.holes, ways, self.unused)

    def load_fresh(self, directory: Path) -> dict[str, torch.Tensor]:
        """Load a checkpoint by SGLang's own loader, beside the live model: its size in memory again."""
        return self._errands.run(lambda: values(slots(twin.load_real(self._runner, directory))))

    def check_twin(self) -> TwinReport:
        """Load random bytes by SGLang's own loader into a twin in host memory, and compare with the layout.

        Raises:
            EffectiveMismatchError: the layout puts something elsewhere than the loader does; named.
        """
        return self._errands.run(lambda: twin.check(self._runner, self.learned, self._checkpoint))

    @property
    def build(self) -> dict[str, object]:
        """What decides, beside the checkpoint's tensors, whether the layout is right: of engine and model."""
        config = self._runner.model_config
        return {
            "engine": f"sglang {srt_version()}",
            "torch": torch.__version__,
            "model": type(self._runner.model).__qualname__,
            "config": config.hf_config.to_json_string(),
            "quantisation": str(config.quantization),
            "dtype": str(config.dtype),
            "rank": (self.rank, self.world),
            "layout": self.manifest.fingerprint.hex(),
        }

    def _explained(self, name: str) -> tuple[Status, tuple[str, ...]]:
        names = self._plot.names.get(name, ())
        if names:
            return Status.SYNCED, names
        if name in self._plot.derived:
            return Status.DERIVED, ()
        if name in self._plot.local:
            return Status.LOCAL, ()
        raise AdapterError(
            "a live tensor that nothing explains",
            expected="synced by a checkpoint name, derived by the engine's hook, or local",
            found="it came into being after the adapter was made",
            rank=f"rank {self.rank}",
            tensor=name,
            hint="declare it in Rules(frozen=...) if it does not depend on the weights",
        )

    # ------------------------------------------------------------------------------------ in SGLang's thread

    def _put_through(self, group: staging.Group) -> None:
        with torch.inference_mode():
            self._plot.put_through(self._runner.model, group, self._arena)

    def _recompute(self) -> None:
        with torch.inference_mode():
            self._plot.put_constants()
            srt("model_loader.loader").post_load_weights(self._runner.model)
