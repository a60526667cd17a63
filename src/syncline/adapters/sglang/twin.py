"""The meta twin: the model as SGLang's own constructor builds it, without a byte of weights.

Everything that is learned about a live model is learned on its twin, by running SGLang's own loader there:
live memory is never touched. The twin shares with the live model only what SGLang itself keeps once a process
(such as rotary tables).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from syncline.adapters.sglang.srt import srt
from syncline.adapters.sglang.tensors import Geometry, Slot, registered_slots, slots
from syncline.layout.loader_rules import trace_with_rules
from syncline.verify.twin import twin_check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from torch import nn

    from syncline.layout.loader import Loader, LoaderTrace, Spec
    from syncline.verify.twin import TwinReport


@dataclass(frozen=True, slots=True)
class Learned:
    """What a twin taught.

    Attributes:
        twin: the module, after its loader has run; weightless.
        trace: where the loader puts every checkpoint tensor.
        forms: of every live tensor by name, as a load leaves it (before post-processing).
        derived: names of tensors that the load computed from weights and hung at modules itself.
    """

    twin: nn.Module
    trace: LoaderTrace
    forms: Mapping[str, Geometry]
    derived: frozenset[str]


def learn(runner: Any, checkpoint: Mapping[str, Spec]) -> Learned:
    """Build the twin of a model runner's model and trace its loader.

    Args:
        runner: SGLang's ``ModelRunner``.
        checkpoint: what the checkpoint holds, by name.

    Raises:
        LayoutError: the loader computes something that cannot be followed; the tensor is named.
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        twin = build(runner)
        found = slots(twin)
        before = {name: _mark(slot) for name, slot in found.items()}
        kept = [slot.get() for slot in found.values()]  # their identities stay their own
        trace = trace_with_rules(
            _registered(twin),
            lambda weights: _load(runner, twin, weights),
            checkpoint,
            model=type(twin).__name__,
            state=lambda: _registered(twin),
        )
        after = slots(twin)
        derived = {
            name for name, slot in after.items() if not slot.registered and before.get(name) != _mark(slot)
        }
        forms = {name: Geometry.of(slot.get()) for name, slot in after.items()}
        kept.clear()
    return Learned(twin, trace, forms, frozenset(derived))


def check(runner: Any, learned: Learned, checkpoint: Mapping[str, Spec]) -> TwinReport:
    """Load random bytes by SGLang's own loader into a twin in host memory, and compare with what was learned.

    Raises:
        EffectiveMismatchError: the layout puts something elsewhere than the loader does; named.
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        load, state = real(runner, learned)
        return twin_check(learned.trace, state(), load, checkpoint, state=state)


def real(runner: Any, learned: Learned) -> tuple[Loader, Callable[[], dict[str, torch.Tensor]]]:
    """Return the loader of a twin in host memory, and what returns its tensors of which the trace speaks.

    Tensors that SGLang shares between models are not among them.
    """
    twin = build(runner, "cpu")
    known = learned.trace.live.keys() | learned.trace.ties.keys()

    def state() -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in _registered(twin).items() if name in known}

    return lambda weights: _load(runner, twin, weights), state


def build(runner: Any, device: str = "meta") -> nn.Module:
    """Return a new model of the runner's configuration on a device, by SGLang's own constructor."""
    config = copy.deepcopy(runner.model_config)  # constructors write into configurations
    loader = _loader(runner)
    return loader.initialize_model_for_startup(
        model_config=config, device_config=SimpleNamespace(device=device)
    ).eval()


def load_real(runner: Any, directory: Path) -> nn.Module:
    """Load a checkpoint directory into a new model on the runner's device, post-processing included."""
    config = copy.deepcopy(runner.model_config)
    config.model_path = str(directory)
    return _loader(runner).load_model(
        model_config=config, device_config=SimpleNamespace(device=runner.device)
    )


def _loader(runner: Any) -> Any:
    # however the live model came by its weights (from memory, at random): its names are the checkpoint's
    any_format = srt("configs.load_config").LoadFormat.AUTO
    return srt("model_loader.loader").DefaultModelLoader(replace(runner.load_config, load_format=any_format))


def _load(runner: Any, twin: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    _loader(runner).load_weights_only(twin, weights, torch.device(runner.device))


def _registered(twin: nn.Module) -> dict[str, torch.Tensor]:
    """Return the twin's registered tensors, those included that SGLang shares between models."""
    return {name: slot.get() for name, slot in registered_slots(twin).items()}


def _mark(slot: Slot) -> tuple[int, Geometry, int]:
    """Return what changes if a tensor is written or replaced."""
    tensor = slot.get()
    version = -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 (torch has no public counter)
    return id(tensor), Geometry.of(tensor), version
