"""One vLLM worker process as `syncline.store.adapter.EngineAdapter`."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from syncline import faults
from syncline.adapters.vllm import twin as twins
from syncline.adapters.vllm.layers import Reload, Untouched, as_computed, deferred
from syncline.adapters.vllm.layout import learn
from syncline.adapters.vllm.pins import Pins
from syncline.adapters.vllm.reading import reads
from syncline.adapters.vllm.rehearsal import Finding, Way
from syncline.adapters.vllm.streams import Ordered
from syncline.adapters.vllm.upstream import upstream
from syncline.errors import AdapterError
from syncline.layout.export import dtype_name
from syncline.memory.binding import Binding
from syncline.store.adapter import LiveStatus, Status
from syncline.verify.twin import twin_check

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from torch import nn

    from syncline.adapters.vllm.staging import Group
    from syncline.layout.loader import Loader, Spec
    from syncline.layout.manifest import Manifest
    from syncline.protocol.ids import VersionKey
    from syncline.store.adapter import PauseMode, Stage
    from syncline.verify.twin import TwinReport

_COMPUTED = ".(as computed)"
"""Marks, behind a layer's name, the weight that its kernel computes with, where no tensor shows it."""


def _at_once(task: Callable[[], None]) -> None:
    task()


def _numbered(device: torch.device) -> torch.device:
    """Return a device by its number, where it may have been named without one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class VLLMAdapter:
    """The live model of one vLLM worker.

    Args:
        model: the live model; only its weights are changed, from `begin_stage` to `after_update`.
        vllm_config: its configuration.
        device: where it lies.
        checkpoint: the tensors of its checkpoint by name.
        rank: of this worker in its instance.
        world: number of workers.
        local: patterns of parameters that no checkpoint fills and that stay as they are.
        run: runs a task in the thread that owns the model, and returns when it is done.
        held: whether no forward pass can start in this process.

    Raises:
        AdapterError: a live tensor that cannot be explained or updated; named.
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: Any,
        device: torch.device,
        checkpoint: Mapping[str, Spec],
        *,
        rank: int = 0,
        world: int = 1,
        local: Collection[str] = (),
        run: Callable[[Callable[[], None]], None] = _at_once,
        held: Callable[[], bool] = lambda: True,
    ) -> None:
        self.model, self.rank, self.world = model, rank, world
        self.version: VersionKey | None = None
        self.aliases: dict[str, str] = {}
        self.device = _numbered(device)
        self._config, self._held = vllm_config, held
        self._ordered = Ordered(run, self.device)
        self._run = self._ordered.run
        self._checkpoint = checkpoint
        self.layout = learn(model, vllm_config, self.device, checkpoint, local=local, who=f"rank {rank}")
        self._untouched = {
            name: Untouched(self.layout.twin.get_submodule(name))
            for name, finding in self.layout.findings.items()
            if finding.way is Way.REPEAT
        }
        self._first = 1 if self.layout.plan.direct else 0  # number of the first staged stage
        self._arena = torch.zeros(self.layout.plan.arena_nbytes, dtype=torch.uint8, device=self.device)
        self._live = twins.tensors(model)
        self._pins = Pins(model, f"rank {rank}")
        self._binding = Binding.private(self.manifest.fingerprint, self._addresses())
        self._applied: VersionKey | None = None

    @property
    def manifest(self) -> Manifest:
        """The live tensors, and the staging slots, of this process as shards of checkpoint tensors."""
        return self.layout.manifest

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What is received together: first what is written in place, then layers through staging."""
        return self.layout.plan.stages

    @property
    def ways(self) -> dict[str, int]:
        """How many layers are put in which way, for display."""
        listed = [finding.way.value for finding in self.layout.findings.values()]
        return {way.value: listed.count(way.value) for way in Way}

    # ------------------------------------------------------------------------------------ memory

    def _addresses(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        addresses = np.zeros(len(self.layout.plan.storage_nbytes), np.int64)
        for name, storage in self.layout.plan.direct.items():
            addresses[storage] = self._live[name].data_ptr()
        for storage, slot in self.layout.plan.slots().items():
            addresses[storage] = self._arena.data_ptr() + slot.offset
        return addresses

    def binding(self) -> Binding:
        """Return where storages lie: live tensors, which must not have moved since start, and the arena.

        Raises:
            AdapterError: a live tensor moved, or changed its dtype, shape or strides.
        """
        self._pins.check()
        return self._binding

    def finish_forwards(self) -> None:
        """Return when the device has finished what the model's own thread queued; no other stream waits."""
        self._ordered.finish()

    # ------------------------------------------------------------------------------------ stages

    def begin_stage(self, index: int) -> None:
        """Prepare the arena: what no checkpoint tensor fills (padding) is zero, as in a fresh model."""
        faults.point("adapters.begin_stage")
        for group in self._groups(index):
            for name, slot in group.live.items():
                if name in self.layout.trace.holes:
                    self._arena[slot.offset : slot.offset + slot.nbytes].zero_()

    def end_stage(self, index: int) -> None:
        """Run what the loader computes, and put the stage's layers in: their kernels hold the new weights."""
        faults.point("adapters.end_stage")
        groups = self._groups(index)
        if groups:
            self._run(lambda: self._put_in(groups))

    def _groups(self, index: int) -> tuple[Group, ...]:
        if not 0 <= index < len(self.stages):
            raise AdapterError(
                "no such stage",
                expected=f"below {len(self.stages)}",
                found=index,
                rank=f"rank {self.rank}",
            )
        return () if index < self._first else self.layout.plan.groups[index - self._first]

    def _put_in(self, groups: Collection[Group]) -> None:
        with twins.context(self._config, self._config.model_config.dtype):
            for group in groups:
                arena = {name: slot.tensor(self._arena) for name, slot in group.live.items()}
                inputs = {name: slot.tensor(self._arena) for name, slot in group.inputs.items()}
                for replay in group.replays:
                    replay.run(inputs, self._live | arena)
                for layer in group.layers:
                    self._put_in_layer(layer, self.layout.findings[layer], arena)

    def _put_in_layer(self, layer: str, finding: Finding, arena: Mapping[str, torch.Tensor]) -> None:
        live = self.model.get_submodule(layer)
        given: dict[str, torch.Tensor] = {}
        for own in self.layout.findings[layer].after.keys() | finding.taken:
            name = self.layout.trace.ties.get(full := f"{layer}.{own}", full)
            if own in finding.taken:
                given[own] = arena[name].clone() if finding.keeps else arena[name]
            elif finding.way is Way.REPEAT and name in self.layout.trace.live:
                given[own] = self._live[name].clone()
        if finding.way is Way.RELOAD:
            Reload(live, self._config.model_config).run(given)
            return
        untouched = self._untouched[layer]
        try:
            untouched.process(given)
            untouched.copy_into(live, finding.derived)
        finally:
            untouched.restore()

    # ------------------------------------------------------------------------------------ update protocol

    def pause(self, mode: PauseMode, deadline: float) -> None:
        """Return at once: an update runs inside vLLM's ``update_weights``, which holds every worker.

        Raises:
            AdapterError: called outside of it.
        """
        if not self._held():
            raise AdapterError(
                "vLLM's workers are not held",
                expected="an update through vLLM's update_weights",
                rank=f"rank {self.rank}",
                hint="use syncline.adapters.vllm.VLLMInstance",
            )

    def resume(self, key: VersionKey | None) -> None:
        """Note the version; forward passes go on when vLLM's scheduler resumes."""
        if key is not None:
            self.version = key

    def after_update(self, key: VersionKey, received: Collection[str] | None = None) -> None:
        """Let attention layers derive from the new weights what they derive at start; once for each version.

        Raises:
            AdapterError: a derived tensor moved.
        """
        if key == self._applied:
            return
        faults.point("adapters.after_update")
        self._run(self._derive)
        self.binding()
        self._applied = key

    def _derive(self) -> None:
        with twins.context(self._config, self._config.model_config.dtype):
            for layer in self._derivers:
                layer.process_weights_after_loading(self._config.model_config.dtype)

    @cached_property
    def _derivers(self) -> list[Any]:
        """Attention layers whose hooks read weights; all of them where that cannot be seen.

        They are looked at while they run for the first time, as they did at start.
        """
        dtype = self._config.model_config.dtype
        layers = [layer for _, layer in deferred(self.model)]
        hidden = any(finding.opaque or finding.derived for finding in self.layout.findings.values())
        if self.device.type == "cpu" or hidden:
            return layers
        statuses = self.layout.statuses
        weights = [t for name, t in self._live.items() if statuses.get(name) is not Status.LOCAL]
        return [x for x in layers if reads(partial(x.process_weights_after_loading, dtype), weights)]

    def flush_caches(self) -> None:
        """Nothing is cached here: the scheduler's caches are reset by whoever drives vLLM's update."""

    def report_version(self, key: VersionKey) -> None:
        """Remember which version is served; vLLM's own version is set by whoever drives its update."""
        self.version = key

    # ------------------------------------------------------------------------------------ verification

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """Return every parameter and buffer by name, and what kernels hold where no tensor shows it."""
        return self._tensors_of(self.model)

    def _tensors_of(self, model: nn.Module) -> dict[str, torch.Tensor]:
        found = {n: t.detach() for n, t in twins.tensors(model).items() if n not in self.layout.trace.ties}
        with twins.context(self._config, self._config.model_config.dtype):
            for layer, finding in self.layout.findings.items():
                if finding.opaque:
                    module = model.get_submodule(layer)
                    computed = as_computed(module, self._config.model_config.dtype, self.device)
                    found[layer + _COMPUTED] = computed
        return found

    def live_status(self) -> dict[str, LiveStatus]:
        """List every tensor of `live_tensors` as synced, derived or local."""
        return {name: self._status(name, tensor) for name, tensor in self.live_tensors().items()}

    def _status(self, name: str, tensor: torch.Tensor) -> LiveStatus:
        names, status = self.layout.names(name), self.layout.statuses.get(name, Status.SYNCED)
        if name.endswith(_COMPUTED):
            layer = name.removesuffix(_COMPUTED)
            owned = self.layout.findings[layer].taken
            names = tuple(dict.fromkeys(n for own in owned for n in self.layout.names(f"{layer}.{own}")))
        return LiveStatus(status, names, dtype_name(tensor.dtype), tuple(tensor.shape))

    def load_fresh(self, directory: Path) -> dict[str, torch.Tensor]:
        """Load a checkpoint by vLLM's own loader, post-processing included; by the names of `live_tensors`.

        Collective over the instance.
        """
        found: dict[str, torch.Tensor] = {}

        def task() -> None:
            found.update(self._tensors_of(twins.load(self._config, directory, self.device)))

        self._run(task)
        return found

    def check_twin(self) -> TwinReport:
        """Load random bytes by vLLM's own loader into a twin in host memory, and compare with the layout.

        Raises:
            EffectiveMismatchError: the layout puts something elsewhere than the loader does; named.
        """
        load, state = self.real_twin()
        with twins.context(self._config, self._config.model_config.dtype):
            return twin_check(self.layout.trace, state(), load, self._checkpoint, state=state)

    def real_twin(self) -> tuple[Loader, Callable[[], dict[str, torch.Tensor]]]:
        """Return the loader of a model in host memory, and what returns those tensors that the trace knows.

        Tensors that vLLM shares between models are not among them.
        """
        host = torch.device("cpu")
        twin: Any = twins.build(self._config, host)
        twins.complete(twin, self._config, self.layout.trace, self._checkpoint, host)
        known = self.layout.trace.live.keys() | self.layout.trace.ties.keys()

        def state() -> dict[str, torch.Tensor]:
            return {name: tensor for name, tensor in twins.tensors(twin).items() if name in known}

        return twin.load_weights, state

    @property
    def build(self) -> dict[str, object]:
        """What decides, beside the checkpoint's tensors, whether the layout is right: of engine and model."""
        model = self._config.model_config
        return {
            "engine": f"vllm {upstream('version').__version__}",
            "torch": torch.__version__,
            "model": type(self.model).__qualname__,
            "config": model.hf_config.to_json_string(),
            "quantisation": str(model.quantization),
            "dtype": str(model.dtype),
            "rank": (self.rank, self.world),
            "layout": self.manifest.fingerprint.hex(),
        }
