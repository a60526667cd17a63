"""What hangs in Megatron model chunks, and what must be refused before anything is learned."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from syncline.adapters.modules import Tree, walk
from syncline.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def walk_chunks(chunks: Sequence[nn.Module]) -> Tree:
    """Walk a rank's model chunks; names begin with the number of the chunk."""
    return walk(torch.nn.ModuleList(chunks))


def live_tensors(tree: Tree, rank: object) -> dict[str, torch.Tensor]:
    """Return every parameter and persistent buffer by name, a tied one once.

    Raises:
        AdapterError: a parameter whose memory is not its payload (quantised by TransformerEngine, sharded by
            FSDP), or that is offloaded; named.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, cell in tree.state.items():
        tensor = cell.get()
        if not isinstance(tensor, torch.Tensor) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        _check(name, tensor, rank)
        found[name] = tensor
    return found


def _check(name: str, tensor: torch.Tensor, rank: object) -> None:
    if hasattr(tensor, "device_mesh"):
        raise AdapterError(
            "a parameter is sharded as a DTensor",
            expected="Megatron's own sharding",
            found=type(tensor).__name__,
            rank=rank,
            tensor=name,
            hint="use syncline.adapters.fsdp.FSDPTrainer for models sharded by FSDP",
        )
    if type(tensor) not in _PLAIN or type(tensor.data) is not torch.Tensor:
        raise AdapterError(
            "a parameter is quantised: its memory is not its payload",
            expected="a plain tensor",
            found=f"{type(tensor.data).__module__}.{type(tensor.data).__qualname__}",
            rank=rank,
            tensor=name,
            hint="keep model weights in bfloat16 on the trainer, and quantise on the reader",
        )
    if tensor.numel() == 0 or not tensor.untyped_storage().nbytes():
        raise AdapterError(
            "a parameter has no elements here: its weights are offloaded",
            expected="resident weights of its own shape",
            found=tuple(tensor.shape),
            rank=rank,
            tensor=name,
            hint="load the weights back before the adapter is made",
        )


def bare(module: nn.Module) -> nn.Module:
    """Return the model inside Megatron's wrappers (data parallelism, mixed precision)."""
    while "module" in module._modules and isinstance(module._modules["module"], torch.nn.Module):  # noqa: SLF001 (where submodules hang)
        module = module._modules["module"]  # noqa: SLF001
    return module


def wrappers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a chunk and the modules that it wraps, outermost first."""
    yield module
    while "module" in module._modules and isinstance(module._modules["module"], torch.nn.Module):  # noqa: SLF001
        module = module._modules["module"]  # noqa: SLF001
        yield module


def restore_buffers(chunks: Sequence[nn.Module]) -> None:
    """Undo what mixed precision does to a router's buffer, as Megatron itself does before it next uses it.

    The buffer is registered in float32, and cast with its module; a version must hold it in its own dtype.
    """
    for chunk in chunks:
        for module in chunk.modules():
            restore = getattr(module, "_maintain_float32_expert_bias", None)
            if restore is not None:
                restore()


def torch_optimizers(optimizers: Sequence[Any]) -> list[Any]:
    """Return the torch optimizers behind Megatron's, chained ones one by one."""
    found: list[Any] = []
    for optimizer in optimizers:
        chained = getattr(optimizer, "chained_optimizers", None)
        if chained is not None:
            found += torch_optimizers(list(chained))
        elif getattr(optimizer, "optimizer", optimizer) is not None:
            found.append(optimizer)  # none: a stub of a rank without parameters of this kind
    return found


def coordinates() -> tuple[int, int]:
    """Return this process's pipeline stage and expert-parallel rank; zeros without Megatron's groups."""
    parallel_state: Any = sys.modules.get("megatron.core.parallel_state")  # imported by whoever made a model
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return 0, 0
    return (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
