"""Context parallelism on a CPU: Megatron's own cut of a sequence, and an attention that gathers over it.

Megatron-Core leaves attention over cut sequences to TransformerEngine. Everything else is Megatron's: the
groups, positions of rotary embeddings, gradients that are averaged over data and context parallelism
together, and the optimizer that is distributed over both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def places(length: int, size: int, rank: int) -> torch.Tensor:
    """Return the positions of one rank's part of a sequence: of 2 * size chunks, one from each end."""
    chunks = torch.arange(length).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


class _Gather(torch.autograd.Function):
    """Joins the parts of all ranks along the first dimension; gradients of all ranks are summed."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.n = group, part.shape[0]
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.split(ctx.n)[ctx.group.rank()], None


def install() -> None:
    """Make Megatron's local layers attend over cut sequences."""
    from megatron.core import parallel_state  # noqa: PLC0415 (only where it is installed)
    from megatron.core.models.backends import LocalSpecProvider  # noqa: PLC0415 (only where it is installed)
    from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: PLC0415 (only where it is installed)

    class Attention(DotProductAttention):
        """Attends from this rank's queries to the keys and values of all ranks."""

        def __init__(self, config: Any, *args: Any, **rest: Any) -> None:
            size, config.context_parallel_size = config.context_parallel_size, 1
            try:
                super().__init__(config, *args, **rest)
            finally:
                config.context_parallel_size = size

        def forward(
            self, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **rest: Any
        ) -> Any:
            group = parallel_state.get_context_parallel_group()
            length = query.shape[0] * group.size()
            order = torch.cat([places(length, group.size(), rank) for rank in range(group.size())])
            keys, values = _Gather.apply(key, group), _Gather.apply(value, group)
            later = order[None, :] > places(length, group.size(), group.rank())[:, None]
            return super().forward(query, keys, values, later[None, None], *args, **rest)

    provider: Any = LocalSpecProvider
    provider.core_attention = lambda _self: Attention
