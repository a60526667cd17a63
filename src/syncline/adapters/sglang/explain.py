"""What SGLang makes of a checkpoint, tensor by tensor: an engine started here, looked at and ended."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from syncline.adapters.explained import Explained
from syncline.adapters.sglang import commands
from syncline.adapters.sglang.doors import EngineDoor
from syncline.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

_SECONDS = 300.0  # in which all ranks learn their layout

_ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_radix_cache": True,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
}
"""Without an accelerator SGLang would choose kernels that only accelerators have."""


def explain(
    directory: Path | str, *, ranks: int = 1, local: Collection[str] = (), **options: Any
) -> list[Explained]:
    """Start SGLang on a checkpoint directory, in this process and its schedulers, and list its live tensors.

    Args:
        directory: a Hugging Face checkpoint.
        ranks: SGLang's ``tp_size``.
        local: patterns of tensors that no checkpoint tensor fills and that stay as they are.
        options: of ``sglang.Engine``.

    Returns:
        By rank, what each live tensor is.

    Raises:
        AdapterError: a live tensor or layer that cannot be explained or updated; named. Or a directory
            without safetensors, or no SGLang here.
    """
    if not torch.cuda.is_available():
        options = _ON_CPU | options
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # read while SGLang is imported
    try:
        sglang: Any = import_module("sglang")  # takes tens of seconds
    except ImportError as error:
        raise AdapterError("SGLang cannot be imported here", found=error) from error
    engine = sglang.Engine(model_path=str(directory), tp_size=ranks, skip_server_warmup=True, **options)
    try:
        command = commands.Explain(str(directory), tuple(local))
        reply = commands.decode_reply(EngineDoor(engine).command(commands.encode(command), _SECONDS))
    finally:
        engine.shutdown()
    if (error := commands.error_of(reply)) is not None:
        raise error
    return [Explained.from_plain(fields) for fields in reply.result]
