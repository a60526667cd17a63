"""Twins of a live model: one without memory to learn from, one freshly loaded to compare with.

Both are built by vLLM's own constructor under the live configuration. What that constructor registers
(attention layers, expert layers) goes into copies, so that the live engine never hears of a twin.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from syncline.adapters.vllm.layers import own_tensors, place
from syncline.adapters.vllm.upstream import upstream
from syncline.adapters.vllm.weightless import Weightless
from syncline.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from torch import nn

    from syncline.layout.written import LoaderTrace, Spec

_CONTAINERS = (dict, list, set)
_GATHERING = "online_process_loader"  # name of vLLM's wrapper around a loader, by which it knows it itself


def private_config(vllm_config: Any, **changes: Any) -> Any:
    """Return a configuration equal to the live one whose registries are its own and empty of layers."""
    config = copy.copy(vllm_config)
    compilation = copy.copy(vllm_config.compilation_config)
    for name, value in vars(compilation).items():
        if isinstance(value, _CONTAINERS):
            setattr(compilation, name, copy.copy(value))
    compilation.static_forward_context = {}
    config.compilation_config = compilation
    for name, value in changes.items():
        setattr(config, name, value)
    return config


@contextmanager
def context(vllm_config: Any, dtype: torch.dtype) -> Iterator[None]:
    """Run vLLM's own code as it runs while a model is loaded: its configuration and its default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with upstream("config").set_current_vllm_config(vllm_config), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(before)


def build(vllm_config: Any, device: torch.device) -> nn.Module:
    """Build a model by vLLM's constructor on a device; its contents are whatever the constructor leaves.

    Each call builds another one. Modules that vLLM itself shares between models (rotary tables) are shared.

    Raises:
        AdapterError: the constructor cannot run there.
    """
    initialize_model = upstream("model_executor.model_loader.utils").initialize_model
    config = private_config(vllm_config)
    config.device_config = copy.copy(config.device_config)
    config.device_config.device = device  # some constructors ask it instead of the default device
    try:
        return _write_at_once(_constructed(initialize_model, config, device), device)
    except Exception as error:
        raise AdapterError(
            "no twin of the live model can be built",
            expected=f"a model that vLLM can construct on {device}",
            found=f"{type(error).__name__}: {error}",
            hint="the constructor must not look at the values of its tensors",
        ) from error


def _constructed(initialize_model: Any, config: Any, device: torch.device) -> nn.Module:
    """Run the constructor; without memory, let it compute with tensors that are no weights, if it has to."""
    try:
        with context(config, config.model_config.dtype), device:
            return initialize_model(vllm_config=config).eval()
    except Exception:
        if device.type != "meta":
            raise
    config = private_config(config)  # the first attempt has registered layers
    with context(config, config.model_config.dtype), Weightless(), _constructing() as new:
        return without_memory(initialize_model(vllm_config=config).eval(), new)


@contextmanager
def _constructing() -> Iterator[set[nn.Module]]:
    """Collect the modules that register a tensor meanwhile: those that are made, and none that is shared."""
    made: set[nn.Module] = set()

    def registered(module: nn.Module, _name: str, _tensor: object) -> None:
        made.add(module)

    hooks = [register_module_parameter_registration_hook, register_module_buffer_registration_hook]
    handles = [hook(registered) for hook in hooks]
    try:
        yield made
    finally:
        for handle in handles:
            handle.remove()


def without_memory(twin: nn.Module, new: Collection[nn.Module]) -> nn.Module:
    """Return the twin, weightless even where its constructor computed the first values of a tensor.

    Args:
        twin: the module.
        new: its modules that are its own; others (rotary tables) the live model has, too, and they stay.
    """
    made: dict[int, Any] = {}
    for module in twin.modules():
        if module not in new:
            continue
        for name, tensor in own_tensors(module).items():
            if id(tensor) not in made:
                like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                place(module, name, tensor, like)
                made[id(tensor)] = tensor, own_tensors(module)[name]
            both: Any = vars(module)
            both["_parameters" if name in both["_parameters"] else "_buffers"][name] = made[id(tensor)][1]
    return twin


def _write_at_once(twin: nn.Module, device: torch.device) -> nn.Module:
    """Return the twin, whose loaders write into it at once where vLLM has them gather a whole layer first.

    Quantisation while loading makes a layer's parameters when they are complete, and transforms them: that is
    the layer's post-processing, and no business of the loader's.
    """
    reload = upstream("model_executor.model_loader.reload.layerwise")
    for module in twin.modules():
        info = reload.get_layerwise_info(module)
        if not info.can_load():
            continue
        for name, tensor in own_tensors(module).items():
            held: Any = tensor
            if tensor.is_meta and device.type != "meta":
                memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                place(module, name, tensor, memory)
                held = own_tensors(module)[name]
            loader: Any = getattr(held, "weight_loader", None)
            while getattr(loader, "__name__", "") == _GATHERING and hasattr(loader, "__wrapped__"):
                loader = loader.__wrapped__
            if loader is not None:
                held.weight_loader = loader
        info.reset()
    return twin


def complete(
    twin: nn.Module,
    vllm_config: Any,
    trace: LoaderTrace,
    checkpoint: Mapping[str, Spec],
    device: torch.device,
) -> nn.Module:
    """Return the twin with the parameters that its loader makes only when their checkpoint tensor comes."""
    there = tensors(twin).keys()
    names = {name for live, found in trace.names.items() if live not in there for name in found}
    if names:
        specs = {name: checkpoint[name] for name in sorted(names)}
        weights = [(n, torch.zeros(s.shape, dtype=getattr(torch, s.dtype))) for n, s in specs.items()]
        load_weights: Any = twin.load_weights
        with context(vllm_config, vllm_config.model_config.dtype), device:
            load_weights((name, weight.to(device)) for name, weight in weights)
    return twin


def load(vllm_config: Any, directory: Path, device: torch.device) -> nn.Module:
    """Load a checkpoint directory by vLLM's own loader into a model of its own, post-processing included.

    All ranks of an instance call it together.
    """
    model_config = copy.copy(vllm_config.model_config)
    model_config.model, model_config.model_weights, model_config.revision = str(directory), "", None
    load_config = copy.copy(vllm_config.load_config)
    if load_config.load_format == "dummy":
        load_config.load_format = "auto"
    config = private_config(vllm_config, model_config=model_config, load_config=load_config)
    with context(config, model_config.dtype):
        loader = upstream("model_executor.model_loader").get_model_loader(load_config)
        return loader.load_model(vllm_config=config, model_config=model_config)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer by name, a tied one under each of its names."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))
