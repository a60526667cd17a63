"""What real Megatron ranks are made to do: to learn, to publish, to refuse."""

from __future__ import annotations

from typing import Any

LATENT = {"qk_nope_head_dim": 64}
GROUPED = {"moe_grouped_gemm": True}
LEARN: dict[str, dict[str, Any]] = {
    "whole": {"family": "qwen3", "cut": {}},
    "tensor": {"family": "qwen3", "cut": {"tp": 2}},
    "tensor-pipeline": {"family": "qwen3", "cut": {"tp": 2, "pp": 2}},
    "more-ranks-than-groups": {"family": "qwen3", "cut": {"tp": 4}, "changes": {"num_key_value_heads": 2}},
    "virtual-stages": {
        "family": "qwen3",
        "cut": {"pp": 2, "vpp": 2},
        "changes": {"num_hidden_layers": 4},
    },
    "tied": {"family": "qwen3_tied", "cut": {"pp": 2, "tp": 2}},
    "tied-virtual": {
        "family": "qwen3_tied",
        "cut": {"pp": 3, "vpp": 2},
        "changes": {"num_hidden_layers": 6},
    },
    "padded": {
        "family": "qwen3",
        "cut": {"tp": 2},
        "changes": {"vocab_size": 509},
        "megatron": {"should_pad_vocab": True, "make_vocab_size_divisible_by": 128},
    },
    "biased": {"family": "qwen2", "cut": {"tp": 2}},
    "experts": {"family": "qwen3_moe", "cut": {"ep": 2, "dp": 2}},
    "experts-tensor": {"family": "qwen3_moe", "cut": {"tp": 2, "etp": 2}},
    "experts-instead-of-tensor": {"family": "qwen3_moe", "cut": {"tp": 2, "ep": 2, "etp": 1}},
    "experts-and-tensor": {"family": "qwen3_moe", "cut": {"tp": 2, "ep": 2, "etp": 2, "dp": 2}},
    "context": {"family": "qwen3", "cut": {"cp": 2}},
    "context-tensor": {"family": "qwen3", "cut": {"cp": 2, "tp": 2}},
    "context-experts": {"family": "qwen3_moe", "cut": {"cp": 2, "ep": 2}},
    "grouped-gemm": {"family": "qwen3_moe", "cut": {"ep": 2, "dp": 2}, "megatron": GROUPED},
    "grouped-gemm-tensor": {"family": "qwen3_moe", "cut": {"tp": 2, "etp": 2}, "megatron": GROUPED},
    "grouped-gemm-and-tensor": {
        "family": "qwen3_moe",
        "cut": {"tp": 2, "ep": 2, "etp": 2, "dp": 2},
        "megatron": GROUPED,
    },
    "latent": {"family": "deepseek_v3", "cut": {"ep": 2, "dp": 2}, "changes": LATENT},
    "predicting": {
        "family": "deepseek_v3",
        "cut": {"pp": 2, "ep": 2, "dp": 2},
        "changes": {**LATENT, "num_nextn_predict_layers": 1},
    },
    "grouped": {"family": "qwen3_moe", "cut": {"ep": 2, "dp": 2}, "mappings": "grouped"},
    "offset": {"family": "qwen3", "cut": {"tp": 2}, "mappings": "offset"},
    "exporter": {"family": "qwen3", "cut": {"tp": 2, "pp": 2}, "whole": True},
    "exporter-experts": {"family": "qwen3_moe", "cut": {"ep": 2, "dp": 2}, "whole": True},
    "exporter-grouped-gemm": {
        "family": "qwen3_moe",
        "cut": {"tp": 2, "ep": 2, "etp": 2, "dp": 2},
        "megatron": GROUPED,
        "whole": True,
    },
}
PUBLISH: dict[str, dict[str, Any]] = {
    "published": {"family": "qwen3", "cut": {"tp": 2, "pp": 2}},
    "published-experts": {"family": "qwen3_moe", "cut": {"ep": 2, "dp": 2}},
    "published-grouped-gemm": {"family": "qwen3_moe", "cut": {"ep": 2, "dp": 2}, "megatron": GROUPED},
    "published-tied": {"family": "qwen3_tied", "cut": {"pp": 2}},
    "published-tied-virtual": {
        "family": "qwen3_tied",
        "cut": {"pp": 3, "vpp": 2},
        "changes": {"num_hidden_layers": 6},
    },
    "published-bias": {"family": "deepseek_v3", "cut": {"ep": 2, "dp": 2}, "changes": LATENT},
    "published-predicting": {
        "family": "deepseek_v3",
        "cut": {"pp": 2, "ep": 2, "dp": 2},
        "changes": {**LATENT, "num_nextn_predict_layers": 1},
    },
    "published-to-a-slow-reader": {"family": "qwen3", "cut": {"tp": 2}, "slow": 1.5},
    "published-fp8": {
        "family": "qwen3",
        "cut": {"tp": 2, "dp": 2},
        "dtype": "bfloat16",
        "fp8": ["model.layers.*_proj.weight"],
        "changes": {"intermediate_size": 352},
    },
    "published-fp8-experts": {
        "family": "qwen3_moe",
        "cut": {"tp": 2, "ep": 2, "etp": 2, "dp": 2},
        "dtype": "bfloat16",
        "megatron": GROUPED,
        "fp8": ["*.experts.*_proj.weight"],
    },
    "published-offset": {"family": "qwen3", "cut": {"tp": 2}, "mappings": "offset"},
    "overlapped": {"family": "qwen3", "cut": {"dp": 2}, "overlap": True, "dtype": "bfloat16"},
    "context": {"family": "qwen3", "cut": {"cp": 2}, "overlap": True, "dtype": "bfloat16"},
    "context-tensor": {"family": "qwen3", "cut": {"cp": 2, "tp": 2}, "overlap": True, "dtype": "bfloat16"},
    "context-experts": {"family": "qwen3_moe", "cut": {"cp": 2, "ep": 2}},
}
REFUSE: dict[str, dict[str, Any]] = {
    "stages": {"family": "qwen3", "cut": {"pp": 2}},
    "experts": {"family": "qwen3_moe", "cut": {"ep": 2, "dp": 2}},
    "nobody": {"family": "qwen3_moe", "cut": {"ep": 2, "dp": 2}},
    "sizes": {"family": "qwen3", "cut": {"tp": 2}},
    "talks": {"family": "qwen3", "cut": {"tp": 2}},
    "swapped": {"family": "qwen3", "cut": {"tp": 2}},
    "offloaded": {"family": "qwen3", "cut": {"tp": 2}},
    "offloaded_once": {"family": "qwen3", "cut": {"tp": 2}},
    "offloaded_later": {"family": "qwen3", "cut": {}},
    "unmapped": {"family": "qwen3", "cut": {"tp": 2}},
}


def every() -> list[dict[str, Any]]:
    """Return all cases as `tests.megatron.scene` plays them."""
    learn = [{"name": f"learn-{name}", "play": "learn", **case} for name, case in LEARN.items()]
    publish = [{"name": name, "play": "publish", **case} for name, case in PUBLISH.items()]
    refuse = [{"name": f"refuse-{how}", "play": "refuse", "how": how, **case} for how, case in REFUSE.items()]
    trillion = {"name": "trillion", "play": "trillion", "family": "qwen3", "cut": {}}
    return [*learn, *publish, *refuse, trillion]
