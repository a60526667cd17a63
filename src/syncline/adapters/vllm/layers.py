"""Layers with post-processing: how their weights are put in, and how their kernels are asked what they hold.

vLLM transforms weights after loading through the ``quant_method`` of a layer. Two ways put new weights into
such a layer: vLLM's own layerwise reload, and post-processing of an untouched twin layer, whose results are
copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from syncline.adapters.vllm.leaves import leaves
from syncline.adapters.vllm.upstream import upstream
from syncline.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from syncline.adapters.vllm.leaves import Leaf

_CHUNK = 256  # rows of the identity that one question to a kernel has


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that hang at a module itself."""
    both = module._parameters | module._buffers  # noqa: SLF001 (where they hang)
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def with_post_processing(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers, by name, whose weights vLLM may transform after loading."""
    base = upstream("model_executor.layers.quantization.base_config").QuantizeMethodBase
    for name, module in model.named_modules():
        if isinstance(getattr(module, "quant_method", None), base) and own_tensors(module):
            yield name, module


def deferred(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attention layers, by name, that derive tensors from other layers' weights after loading."""
    layers = upstream("model_executor.layers.attention")
    asked = getattr(layers, "is_deferred_attention_layer", None)
    kinds = (layers.Attention, layers.MLAAttention, layers.MMEncoderAttention)
    for name, module in model.named_modules():
        if asked is not None:
            found = asked(module)
        else:  # vLLM did not always have a name for them
            found = isinstance(module, kinds) and hasattr(module, "process_weights_after_loading")
        if found:
            yield name, module


def place(module: nn.Module, name: str, like: torch.Tensor, memory: torch.Tensor) -> None:
    """Hang ``memory`` at a module in the place, and with the class and attributes, of ``like``."""
    made: Any = memory.detach()
    made.__class__ = like.__class__
    made.__dict__ = like.__dict__.copy()
    registry: dict[str, Any] = module._parameters if name in module._parameters else module._buffers  # noqa: SLF001
    registry[name] = made


def process(module: Any) -> None:
    """Run a layer's post-processing on what hangs at it."""
    vars(module).pop("_already_called_process_weights_after_loading", None)
    module.quant_method.process_weights_after_loading(module)
    if hasattr(module, "update_param_tp_status"):
        module.update_param_tp_status()


class Reload:
    """vLLM's own layerwise reload of one layer: kernel tensors keep their addresses."""

    def __init__(self, module: nn.Module, model_config: Any) -> None:
        self._module, self._model_config = module, model_config

    def run(self, given: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Reload the layer from ``given``, by own name, in the checkpoint's form; return what it took.

        Raises:
            AdapterError: the layer wants a tensor that is not given.
        """
        reload = upstream("model_executor.model_loader.reload.layerwise")
        reload.initialize_layerwise_reload(self._module)
        info = reload.get_layerwise_info(self._module)
        try:
            wanted = {name: t for name, t in own_tensors(self._module).items() if t.is_meta}
            for name, meta in wanted.items():
                place(self._module, name, meta, self._given(given, name))
            # vLLM transforms a layer at the end of a reload if a part of its elements was counted as loaded
            info.load_numel = info.load_numel_total / 2 if info.load_numel_total else 0
        except BaseException:
            info.load_numel = 0  # nothing loaded: the kernel's tensors are hung back
            raise
        finally:
            reload.finalize_layerwise_reload(self._module, self._model_config)
        return frozenset(wanted)

    def _given(self, given: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        if name not in given:
            raise AdapterError(
                "a layer is transformed from a tensor that no checkpoint tensor fills",
                expected="every tensor of the layer in the checkpoint",
                found=f"{type(self._module).__name__}.{name}",
                tensor=name,
                hint="such a layer cannot be updated in place: restart the engine",
            )
        return given[name]


class Untouched:
    """A twin layer as its constructor left it, post-processed again and again as if for the first time."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._method = module.quant_method
        self._attributes = dict(vars(module))
        self._state = dict(vars(self._method))
        self._registries = {
            key: dict(value)
            for key, value in vars(module).items()
            if key in ("_parameters", "_buffers", "_modules")
        }
        self._local = set(module._non_persistent_buffers_set)  # noqa: SLF001 (what a buffer's registration says)

    def restore(self) -> None:
        """Undo every change since construction."""
        vars(self.module).clear()
        vars(self.module).update(self._attributes)
        for key, value in self._registries.items():
            vars(self.module)[key] = dict(value)
        self.module._non_persistent_buffers_set = set(self._local)  # noqa: SLF001 (as above)
        vars(self._method).clear()
        vars(self._method).update(self._state)

    def fill(self, given: Mapping[str, torch.Tensor]) -> None:
        """Hang real tensors at the untouched layer."""
        self.restore()
        for name, tensor in own_tensors(self.module).items():
            if name in given:
                place(self.module, name, tensor, given[name])

    def process(self, given: Mapping[str, torch.Tensor]) -> None:
        """Load ``given`` and post-process it, as at the engine's start."""
        self.fill(given)
        process(self.module)

    def copy_into(self, live: Any, derived: frozenset[str]) -> None:
        """Copy what post-processing made into the same places of a live layer, in place.

        Args:
            live: the layer.
            derived: paths of hidden tensors that depend on the weights; others stay as they are.

        Raises:
            AdapterError: the live layer has no such place.
        """
        places = own_tensors(live)
        made = own_tensors(self.module)
        hidden, found = leaves(live), leaves(self.module)
        for path in derived:
            made[path], places[path] = _tensor(found, path), _tensor(hidden, path)
        for name, tensor in made.items():
            if tensor.is_meta:
                continue  # not filled by the checkpoint
            place_now = places.get(name)
            if place_now is None or place_now.shape != tensor.shape or place_now.dtype != tensor.dtype:
                raise AdapterError(
                    "post-processing makes another tensor than the live layer has",
                    expected="no such tensor"
                    if place_now is None
                    else (tuple(place_now.shape), place_now.dtype),
                    found=(tuple(tensor.shape), tensor.dtype),
                    tensor=name,
                )
            place_now.detach().copy_(tensor)


def _tensor(found: Mapping[str, Leaf], path: str) -> torch.Tensor:
    tensor = found[path].tensor if path in found else None
    if tensor is None:
        raise AdapterError("post-processing makes a value that cannot be copied", tensor=path)
    return tensor


def width(module: Any) -> int | None:
    """Return how many inputs a layer that multiplies by a weight has; None for any other layer."""
    embeddings = upstream("model_executor.layers.vocab_parallel_embedding")
    linears = upstream("model_executor.layers.linear")
    if any(tensor.ndim > 2 for tensor in own_tensors(module).values()):
        return None  # a convolution that a linear layer only holds: its kernel is called by somebody else
    if isinstance(module.quant_method, embeddings.UnquantizedEmbeddingMethod):
        return getattr(module, "embedding_dim", None)
    if isinstance(module.quant_method, linears.LinearMethodBase):
        return getattr(module, "input_size_per_partition", None) or getattr(module, "input_size", None)
    return None


def ask(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Return what a layer's kernel answers, without bias.

    The inputs are converted to the dtype that the layer was made for (a router in float32 within a model in
    bfloat16): some kernels take them for that dtype without looking, and read and write past their ends.
    """
    kind = getattr(module, "params_dtype", None)
    made_for = kind if isinstance(kind, torch.dtype) and kind.is_floating_point else inputs.dtype
    return module.quant_method.apply(module, inputs.to(made_for), None)


def as_computed(module: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the weight that a layer's kernel computes with, [inputs, outputs]: it is given the identity."""
    count = width(module) or 0
    rows = []
    for start in range(0, count, _CHUNK):
        part = torch.zeros(min(_CHUNK, count - start), count, dtype=dtype, device=device)
        part[torch.arange(len(part)), start + torch.arange(len(part))] = 1
        rows.append(ask(module, part))
    return torch.cat(rows) if rows else torch.zeros(0, dtype=dtype, device=device)
