"""One vLLM process's layout: what its live tensors hold of the checkpoint, and how each is written.

Learned from vLLM itself: its loader is traced on a twin without memory, its post-processing is rehearsed on
the twin's layers, and the live tensors must look as both foretell. One that does not is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from syncline.adapters.vllm import twin as twins
from syncline.adapters.vllm.layers import deferred, own_tensors, with_post_processing
from syncline.adapters.vllm.rehearsal import Finding, Way, rehearse_all
from syncline.adapters.vllm.staging import Plan, make_plan
from syncline.errors import AdapterError, LayoutError
from syncline.layout.box import Box
from syncline.layout.export import dtype_name
from syncline.layout.loader_rules import trace_with_rules
from syncline.layout.manifest import Manifest
from syncline.layout.shard import Shard
from syncline.layout.view import View
from syncline.store.adapter import Status

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import nn

    from syncline.layout.loader import Spec
    from syncline.layout.written import LoaderTrace


_DEVICE_ROOM = 256 << 20
"""Bytes of a GPU that staging may take: to receive and prove so few takes less time than to begin."""


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """What was learned about one process.

    Attributes:
        trace: of vLLM's loader.
        findings: by layer with post-processing.
        plan: where bytes land.
        manifest: for the store.
        twin: without memory; its layers are untouched.
        statuses: by live name, whose business a live tensor is.
        who: the process, for errors.
    """

    trace: LoaderTrace
    findings: Mapping[str, Finding]
    plan: Plan
    manifest: Manifest
    twin: nn.Module
    statuses: Mapping[str, Status]
    who: str

    def names(self, live: str) -> tuple[str, ...]:
        """Return the checkpoint names of which a live tensor holds elements."""
        return self.trace.names.get(self.trace.ties.get(live, live), ())


def learn(
    model: nn.Module,
    vllm_config: Any,
    device: torch.device,
    checkpoint: Mapping[str, Spec],
    *,
    local: Collection[str] = (),
    who: str = "",
) -> EngineLayout:
    """Learn a live model's layout; it is only looked at.

    Args:
        model: the live model.
        vllm_config: its configuration.
        device: where it lies.
        checkpoint: the checkpoint's tensors by name.
        local: patterns of parameters that stay as the engine made them.
        who: the process, for errors.

    Raises:
        AdapterError: something that cannot be explained, or updated; the tensor or layer is named.
    """
    if callable(getattr(model, "process_weights_after_loading", None)):
        raise AdapterError(
            f"{type(model).__name__} transforms its weights as a whole after loading",
            expected="post-processing by layers, which vLLM can repeat",
            rank=who,
            hint="vLLM itself cannot reload such a model: restart the engine",
        )
    trace = _trace(vllm_config, checkpoint, who)
    meta = torch.device("meta")
    twin = twins.complete(twins.build(vllm_config, meta), vllm_config, trace, checkpoint, meta)
    layers = dict(with_post_processing(twin))
    filled = {name for name, found in trace.names.items() if found} | {
        live for replay in trace.replays for live in replay.live
    }

    def written(layer: str) -> frozenset[str]:
        return frozenset(
            n for n in own_tensors(layers[layer]) if trace.ties.get(m := f"{layer}.{n}", m) in filled
        )

    idle = frozenset(name for name in layers if not written(name))  # nothing comes in: nothing is repeated
    active = {name: layer for name, layer in layers.items() if name not in idle}
    with twins.context(vllm_config, vllm_config.model_config.dtype):
        findings = rehearse_all(active, written, device, vllm_config.model_config)
    staged: dict[str, list[str]] = {}
    for layer, finding in findings.items():
        for own in sorted(finding.taken):
            name = f"{layer}.{own}"
            staged.setdefault(trace.ties.get(name, name), []).append(layer)
    plan = make_plan(trace, staged, room=_DEVICE_ROOM if device.type == "cuda" else 0)
    statuses = _Check(model, twin, trace, findings, plan, filled, tuple(local), who, idle).run()
    return EngineLayout(trace, findings, plan, _manifest(trace, plan), twin, statuses, who)


def _trace(vllm_config: Any, checkpoint: Mapping[str, Spec], who: str) -> LoaderTrace:
    meta = torch.device("meta")
    twin = twins.build(vllm_config, meta)
    load: Any = twin.load_weights
    try:
        with twins.context(vllm_config, vllm_config.model_config.dtype), meta:
            return trace_with_rules(
                twins.tensors(twin),
                load,
                checkpoint,
                model=type(twin).__name__,
                state=lambda: twins.tensors(twin),
            )
    except LayoutError as error:
        raise AdapterError(
            f"the loader of {type(twin).__name__} cannot be followed: {error.what}",
            expected=error.expected,
            found=error.found,
            rank=who,
            tensor=error.tensor,
            hint=error.hint,
        ) from error


def _manifest(trace: LoaderTrace, plan: Plan) -> Manifest:
    slots = {name: slot for stage in plan.groups for group in stage for name, slot in group.live.items()}
    where = {name: (storage, 0) for name, storage in plan.direct.items()}
    where |= {name: (slot.storage, 0) for name, slot in slots.items()}
    shards = trace.shards(where)
    for stage in plan.groups:
        for group in stage:
            for name, slot in group.inputs.items():
                replay = next(r for r in group.replays if name in r.inputs)
                whole = replay.shapes[name]
                box = Box.whole(whole) if slot.shape == whole else replay.boxes[name]
                view = View.contiguous(slot.storage, 0, box.size)
                shards.append(Shard(name, whole, slot.dtype, box, view))
    return Manifest.from_shards(shards, plan.storage_nbytes)


def _layer_of(name: str) -> str:
    return name.rpartition(".")[0]


class _Check:
    """Compares the live tensors with what was foretold, and says whose business each is."""

    def __init__(
        self,
        model: nn.Module,
        twin: nn.Module,
        trace: LoaderTrace,
        findings: Mapping[str, Finding],
        plan: Plan,
        filled: Collection[str],
        local: Sequence[str],
        who: str,
        idle: Collection[str],
    ) -> None:
        self._idle = idle
        self._model, self._trace, self._findings, self._plan = model, trace, findings, plan
        self._filled, self._local, self._who = filled, local, who
        self._live, self._known = twins.tensors(model), twins.tensors(twin).keys()
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._derivers = {f"{name}." for name, _ in deferred(model)}
        own = [name for name in self._live if _layer_of(name) in findings or _layer_of(name) in idle]
        self._owner = {id(self._live[name]): name for name in reversed(own)}  # a layer may hang in two places

    def run(self) -> dict[str, Status]:
        for name in sorted(self._known - self._live.keys()):
            if _layer_of(name) in self._idle:
                continue  # what no checkpoint tensor fills, post-processing may use up
            self._refuse("the live engine lacks a tensor of its own model", name, "a tensor", "nothing")
        self._check_ties()
        for name, storage in self._plan.direct.items():
            self._same(name, storage)
        for layer, finding in self._findings.items():
            self._foretold(layer, finding)
        return {name: self._status(name, name in self._known) for name in self._live}

    def _check_ties(self) -> None:
        """Refuse live tensors that became one where the loader fills two."""
        owners: dict[int, str] = {}
        for name in self._trace.live:
            if name not in self._filled:
                continue
            tensor = self._live[name]
            if not tensor.numel():
                continue
            owner = owners.setdefault(tensor.data_ptr(), name)
            if owner != name:
                self._refuse(
                    "two tensors of the checkpoint are one in the live engine",
                    name,
                    "apart",
                    f"tied to {owner}",
                )

    def _same(self, name: str, storage: int) -> None:
        """Refuse a tensor that is to be written in place and is not laid out as the loader left it."""
        del storage
        spec, tensor = self._trace.live[name], self._live[name]
        expected = (spec.shape, spec.stride, spec.dtype)
        found = (tuple(tensor.shape), tensor.stride(), dtype_name(tensor.dtype))
        if expected != found:
            self._refuse(
                "a live tensor was changed after loading, by no hook that can be repeated",
                name,
                expected,
                found,
            )

    def _foretold(self, layer: str, finding: Finding) -> None:
        now = own_tensors(self._model.get_submodule(layer))
        for own, (shape, dtype) in finding.after.items():
            name = f"{layer}.{own}"
            if own not in now:
                self._refuse(
                    "the live layer lacks a tensor that post-processing leaves",
                    name,
                    (shape, dtype),
                    "nothing",
                )
            if (tuple(now[own].shape), now[own].dtype) != (shape, dtype):
                found = (tuple(now[own].shape), now[own].dtype)
                self._refuse(
                    "a live tensor is not what post-processing makes of it", name, (shape, dtype), found
                )

    def _status(self, name: str, known: bool) -> Status:
        if not known:
            name = self._owner.get(id(self._live[name]), name)
        canonical = self._trace.ties.get(name, name)
        if canonical in self._filled:
            return Status.SYNCED
        if not known and any(name.startswith(prefix) for prefix in self._derivers):
            return Status.DERIVED
        layer, _, own = name.rpartition(".")
        if not known and layer in self._findings and own in self._findings[layer].after:
            if self._findings[layer].way is Way.DIRECT:
                return Status.LOCAL
            return Status.DERIVED
        if not known and layer in self._idle:
            return Status.LOCAL
        declared = any(fnmatchcase(name, pattern) for pattern in self._local)
        if declared or (known and name not in self._parameters):
            return Status.LOCAL
        return self._refuse(
            "a live parameter that no checkpoint tensor fills and no hook derives",
            name, "a tensor of the checkpoint, or a pattern in local=", tuple(self._live[name].shape),
        )  # fmt: skip

    def _refuse(self, what: str, name: str, expected: object, found: object) -> Any:
        raise AdapterError(what, expected=expected, found=found, rank=self._who, tensor=name)
