"""What vLLM makes of a checkpoint, tensor by tensor: an engine in this process, looked at and dropped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.adapters import checkpoint
from syncline.adapters.vllm.adapter import VLLMAdapter
from syncline.adapters.vllm.upstream import upstream
from syncline.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from syncline.store.adapter import LiveStatus


def explain(
    directory: Path | str, *, local: Collection[str] = (), **options: Any
) -> tuple[Mapping[str, LiveStatus], Mapping[str, int]]:
    """Start vLLM on a checkpoint directory, in this process and on one worker, and list its live tensors.

    Args:
        directory: a Hugging Face checkpoint.
        local: patterns of parameters that no checkpoint tensor fills and that stay as they are.
        options: of vLLM's ``LLM``, such as ``dtype`` and ``max_model_len``.

    Returns:
        Every live tensor as synced, derived or local; and how many layers are put in which way.

    Raises:
        AdapterError: a live tensor or layer that cannot be explained or updated; named. Or a directory
            without safetensors.
    """
    specs = checkpoint.from_directory(Path(directory))
    if not specs:
        raise AdapterError("no checkpoint to explain", expected="safetensors files", found=str(directory))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the live model is looked at in this process
    llm = upstream("entrypoints.llm").LLM(model=str(directory), **options)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    adapter = VLLMAdapter(
        worker.model_runner.get_model(), worker.vllm_config, worker.device, specs, local=local
    )
    return adapter.live_status(), adapter.ways
