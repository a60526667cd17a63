"""Loading a checkpoint directory with Transformers, whole or sharded over the processes of an instance."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

from syncline.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch

    TensorParallel = Literal["auto"] | Callable[[Any], Any] | None


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a checkpoint directory, never from a hub."""
    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


def load_model(directory: Path, dtype: torch.dtype, tensor_parallel: TensorParallel) -> Any:
    """Load a causal language model, never from a hub; see `HuggingFaceEngine.load` for the arguments.

    Raises:
        AdapterError: the model has no plan for tensor parallelism of its own.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True}
    if tensor_parallel == "auto" and world > 1:
        options["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=world)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(str(directory), **options)
    if "distributed_config" in options and not getattr(model, "_tp_plan", None):
        raise AdapterError(
            f"{type(model).__name__} has no tensor-parallel plan of its own",
            expected='a model that supports tp_plan="auto"',
            hint="give tensor_parallel= a callable that shards the model",
        )
    if callable(tensor_parallel):
        model = tensor_parallel(model) or model
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Hide Transformers' progress bars and warnings: they would draw over the display of whoever loads."""
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
