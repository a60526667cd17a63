"""Megatron-Core and Megatron-Bridge on a CPU: what has to be patched, in tests only."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import logging
import sys
import types
import typing
import warnings
from typing import Any

import torch
import typing_extensions
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_ABSENT = ("transformer_engine", "transformer_engine.pytorch")


def prepare() -> None:
    """Import both libraries in this process, ready to run without an accelerator."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    _patch_torch()
    _import_core()
    _import_bridge()


class _Nothing:
    """A stream or an event that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _patch_torch() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_, **__: None
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = lambda *_, **__: _Nothing()
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx = types.SimpleNamespace(range_push=lambda *_: None, range_pop=lambda *_: None)


class OnCPU(TorchFunctionMode):
    """Makes tensors that a schedule or an optimizer asks for on an accelerator on the CPU."""

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = "cpu"
        given.pop("pin_memory", None)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.tensor:
            args = tree_map(lambda x: x.item() if isinstance(x, torch.Tensor) and x.ndim == 0 else x, args)
        if func is torch.Tensor.type and len(args) == 1 and not given:
            return func(*args).replace("torch.", "torch.cuda.")  # what an optimizer asks parameters for
        return func(*args, **given)


def _import_core() -> None:
    typing.override = typing_extensions.override  # pyright: ignore[reportAttributeAccessIssue] (Python 3.12's)
    from megatron.core import tensor_parallel  # noqa: PLC0415 (only where it is installed)
    from megatron.core.extensions import transformer_engine  # noqa: F401, PLC0415 (before it seems to be installed)
    from megatron.core.models.gpt import GPTModel  # noqa: F401, PLC0415
    from megatron.core.models.hybrid import hybrid_layer_specs  # noqa: F401, PLC0415

    tracker: Any = tensor_parallel.random.CudaRNGStatesTracker
    tracker.fork = lambda self, *_, **__: contextlib.nullcontext()


class _AnyClass(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyClass(name, (), {})


class _Absent(types.ModuleType):
    """A package that is imported for the names of its classes only."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyClass(name, (), {})


def _import_bridge() -> None:
    for name in _ABSENT:
        module = _Absent(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    importlib.import_module("megatron.bridge")
    _patch_specs()


def _patch_specs() -> None:
    """Let latent attention and multi-token prediction be built of Megatron's own modules."""
    from megatron.core.models.gpt import gpt_layer_specs  # noqa: PLC0415 (only where it is installed)
    from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: PLC0415 (only where it is installed)

    given: Any = gpt_layer_specs.get_gpt_mtp_block_spec
    build: Any = DotProductAttention.__init__

    def spec(config: Any, layer: Any, use_transformer_engine: bool = False, **rest: Any) -> Any:
        return given(config, layer, use_transformer_engine=False, **rest)

    def init(self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **rest: Any) -> None:
        build(self, *args, **rest)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    gpt_layer_specs.get_gpt_mtp_block_spec = spec
    DotProductAttention.__init__ = init
