"""Other mappings of Megatron-Bridge's own in a family's place: grouped experts, norms with an offset."""

from __future__ import annotations

from typing import Any


def _replace(bridge: type[Any], change: Any) -> None:
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry  # noqa: PLC0415 (only where it is installed)

    given = bridge.mapping_registry

    def registry(self: Any) -> Any:
        return MegatronMappingRegistry(*change(given(self).get_all_mappings()))

    bridge.mapping_registry = registry


def grouped() -> None:
    """Experts of a layer are one checkpoint tensor: [experts, 2 * intermediate, hidden] and its transpose."""
    from megatron.bridge.models.conversion.param_mapping import FusedExpertMapping, FusedGatedExpertMapping  # noqa: PLC0415 (only where it is installed)
    from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge  # noqa: PLC0415 (only where it is installed)

    prefix, fused = "decoder.layers.*.mlp.experts.local_experts.*.", "model.layers.*.mlp.experts."

    def change(mappings: list[Any]) -> list[Any]:
        kept = [one for one in mappings if ".experts." not in one.megatron_param]
        return [
            *kept,
            FusedGatedExpertMapping(f"{prefix}linear_fc1.weight", f"{fused}gate_up_proj"),
            FusedExpertMapping(f"{prefix}linear_fc2.weight", f"{fused}down_proj", transpose_on_export=True),
        ]

    _replace(Qwen3MoEBridge, change)


def offset() -> None:
    """The last norm's weight is one more in the checkpoint than in Megatron."""
    from megatron.bridge.models.conversion.param_mapping import RMSNorm2ZeroCenteredRMSNormMapping  # noqa: PLC0415 (only where it is installed)
    from megatron.bridge.models.qwen.qwen3_bridge import Qwen3Bridge  # noqa: PLC0415 (only where it is installed)

    def change(mappings: list[Any]) -> list[Any]:
        return [
            RMSNorm2ZeroCenteredRMSNormMapping(one.megatron_param, one.hf_param)
            if one.megatron_param == "decoder.final_layernorm.weight"
            else one
            for one in mappings
        ]

    _replace(Qwen3Bridge, change)
