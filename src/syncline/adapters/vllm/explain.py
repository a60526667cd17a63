"""What vLLM makes of a checkpoint, tensor by tensor: an engine started here, looked at and ended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.adapters import checkpoint
from syncline.adapters.explained import Explained
from syncline.adapters.vllm.adapter import VLLMAdapter
from syncline.adapters.vllm.upstream import upstream
from syncline.errors import AdapterError, SynclineError, from_wire, to_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


class LookingRank:
    """vLLM's ``worker_extension_cls``; ``self`` is a vLLM worker. Called in all workers at once."""

    rank: int
    device: Any
    model_runner: Any
    vllm_config: Any

    def syncline_explain(self, directory: str, local: list[str]) -> dict[str, Any]:
        """Return what `Explained` holds, as plain values, or the error that forbids it."""
        return plainly(lambda: _plain(adapter_of(self, directory, local)))


def explain(
    directory: Path | str, *, ranks: int = 1, local: Collection[str] = (), **options: Any
) -> list[Explained]:
    """Start vLLM on a checkpoint directory, in this process and as many workers, and list its live tensors.

    Args:
        directory: a Hugging Face checkpoint.
        ranks: vLLM's ``tensor_parallel_size``.
        local: patterns of parameters that no checkpoint tensor fills and that stay as they are.
        options: of vLLM's ``LLM``, such as ``dtype`` and ``max_model_len``.

    Returns:
        By rank, what each live tensor is.

    Raises:
        AdapterError: a live tensor or layer that cannot be explained or updated; named. Or a directory
            without safetensors.
    """
    arguments = (str(directory), list(local))
    told = ask_ranks(directory, LookingRank, "syncline_explain", arguments, ranks=ranks, **options)
    return [Explained.from_plain(fields) for fields in told]


def ask_ranks(
    directory: Path | str,
    extension: type[LookingRank],
    method: str,
    arguments: tuple[Any, ...],
    *,
    ranks: int = 1,
    **options: Any,
) -> list[dict[str, Any]]:
    """Start vLLM on a checkpoint directory, call one method of its extended workers, and end it.

    Args:
        directory: a Hugging Face checkpoint.
        extension: importable by its name; its methods are added to vLLM's worker.
        method: of the extension; returns plain values by way of `plainly`.
        arguments: of the method.
        ranks: vLLM's ``tensor_parallel_size``.
        options: of vLLM's ``LLM``.

    Raises:
        SynclineError: what a method raised, in any worker.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the live model is looked at in this process
    llm = upstream("entrypoints.llm").LLM(
        model=str(directory),
        tensor_parallel_size=ranks,
        worker_extension_cls=f"{extension.__module__}.{extension.__qualname__}",
        **options,
    )
    try:
        told: list[dict[str, Any]] = llm.collective_rpc(method, args=arguments)
    finally:
        llm.llm_engine.engine_core.shutdown()
    for fields in told:
        if (error := fields.get("error")) is not None:
            raise from_wire(error)
    return told


def adapter_of(worker: LookingRank, directory: Path | str, local: Collection[str] = ()) -> VLLMAdapter:
    """Return an adapter of a worker's live model, which takes part in no job.

    Raises:
        AdapterError: see `explain`.
    """
    specs = checkpoint.from_directory(Path(directory))
    if not specs:
        raise AdapterError("no checkpoint to explain", expected="safetensors files", found=str(directory))
    config = worker.vllm_config
    return VLLMAdapter(
        worker.model_runner.get_model(),
        config,
        worker.device,
        specs,
        rank=worker.rank,
        world=config.parallel_config.world_size,
        local=local,
    )


def plainly(task: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a task's plain values, or ``{"error": ...}``: vLLM passes on only an exception's text."""
    try:
        return task()
    except SynclineError as error:
        return {"error": to_wire(error)}


def _plain(adapter: VLLMAdapter) -> dict[str, Any]:
    trace = adapter.layout.trace
    return Explained.of(adapter.live_status(), trace.holes, adapter.ways, trace.unused).plain()
