"""Grouped experts on a CPU: Megatron's own `TEGroupedMLP` over linear layers in plain PyTorch.

Of Megatron's grouped experts, megatron-core 0.19 has `TEGroupedMLP` only (the older module with ``weight1``
and ``weight2`` is gone), and its two linear layers are TransformerEngine's, which needs an accelerator. These
take their place: parameters ``weight0``, ``weight1``, ... of TransformerEngine's shapes and with Megatron's
marks, and a product of matrices an expert in place of the grouped kernel. Module, token dispatch, names and
process groups around them are the library's. Not covered is the single parameter for all experts that newer
versions of TransformerEngine offer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


class _GroupedLinear(torch.nn.Module):
    """One weight an expert, cut along one dimension."""

    cut: str
    axis: int

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, init_method: Any, bias: bool,
        is_expert: bool, pg_collection: Any, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        from megatron.core.extensions import transformer_engine as te  # noqa: PLC0415 (only where it is installed)

        assert is_expert
        assert not bias
        self.num_gemms, self._groups = num_gemms, pg_collection
        shape = [output_size, input_size]
        shape[self.axis] //= pg_collection.expt_tp.size()
        for number in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            init_method(weight)
            self.register_parameter(f"weight{number}", weight)
        apart = config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        te._set_expert_parameter_attributes(self, self.cut, config.expert_model_parallel_size > 1 or apart)

    def forward(self, tokens: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, None]:
        weights = [self.get_parameter(f"weight{number}") for number in range(self.num_gemms)]
        parts = [part @ w.t() for part, w in zip(tokens.split(counts), weights, strict=True)]
        return torch.cat(parts), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> Any:
        """Describe shards as Megatron's wrapper of TransformerEngine's layer does."""
        from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding  # noqa: PLC0415 (only where it is installed)
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # noqa: PLC0415 (only where it is installed)

        alone = (metadata or {}).get("singleton_local_shards", False)
        ep = self._groups.ep
        found: dict[str, Any] = {}
        for number in range(self.num_gemms):
            expert = ep.rank() * self.num_gemms + number
            within = (len(sharded_offsets), expert, ep.size() * self.num_gemms)
            described = make_sharded_tensors_for_checkpoint(
                {f"{number}.weight": self.get_parameter(f"weight{number}")},
                "",
                {f"{number}.weight": self.axis},
                sharded_offsets if alone else (*sharded_offsets, within),
                tp_group=self._groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(described, f"{number}.", f"{expert}.{prefix}" if alone else prefix)
            found[f"{prefix}weight{number}"] = described[f"{number}.weight"]
        return found


# Megatron-Bridge tells how a module is cut by the name of its class.
class TEColumnParallelGroupedLinear(_GroupedLinear):
    cut, axis = "column", 0


class TERowParallelGroupedLinear(_GroupedLinear):
    cut, axis = "row", 1


def install() -> None:
    """Make Megatron's local layers build grouped experts."""
    from megatron.core.models.backends import LocalSpecProvider  # noqa: PLC0415 (only where it is installed)
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP  # noqa: PLC0415 (only where it is installed)

    made = GroupedMLPSubmodules(
        linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear
    )
    provider: Any = LocalSpecProvider
    given = provider.grouped_mlp_modules
    provider.grouped_mlp_modules = lambda self, grouped: (
        partial(TEGroupedMLP, submodules=made) if grouped else given(self, grouped)
    )
