"""Twins of a live model: one without memory to learn from, one freshly loaded to compare with.

Both are built by vLLM's own constructor under the live configuration. What that constructor registers
(attention layers, expert layers) goes into copies, so that the live engine never hears of a twin.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from syncline.adapters.vllm.upstream import upstream
from syncline.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

_CONTAINERS = (dict, list, set)


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
        with context(config, config.model_config.dtype), device:
            return initialize_model(vllm_config=config).eval()
    except Exception as error:
        raise AdapterError(
            "no twin of the live model can be built",
            expected=f"a model that vLLM can construct on {device}",
            found=f"{type(error).__name__}: {error}",
            hint="the constructor must not look at the values of its tensors",
        ) from error


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
