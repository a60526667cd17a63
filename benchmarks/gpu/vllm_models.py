"""The models of the vLLM benchmark: their configurations, their trainer's form, and what is asked of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

_COMMON: dict[str, Any] = {
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
_SMALL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}

_LARGE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One model in one form of engine.

    Attributes:
        name: for files and tables.
        moe: whether its layers have experts.
        sizes: of its configuration.
        quantisation: vLLM's option; None: bfloat16 as the trainer has it.
        trains: whether its trainer runs a real forward and backward pass between versions; else gradients
            are drawn at random, and the step is real.
        fresh: whether each version is saved, and a fresh engine started on it.
    """

    name: str
    moe: bool
    sizes: dict[str, Any]
    quantisation: str | None = None
    trains: bool = True
    fresh: bool = True


_EXPERTS: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
CASES = {
    case.name: case
    for case in (
        Case("dense-tiny", False, _TINY),
        Case(
            "moe-tiny",
            True,
            _TINY | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        ),
        Case("dense-small", False, _SMALL),
        Case("moe-small", True, _SMALL | _EXPERTS),
        Case("fp8-small", False, _SMALL, quantisation="fp8"),
        Case("fp8-moe-small", True, _SMALL | _EXPERTS, quantisation="fp8"),
        Case("dense-8.8GB", False, _LARGE, trains=False, fresh=False),
        Case("fp8-8.8GB", False, _LARGE, quantisation="fp8", trains=False, fresh=False),
        Case(
            "moe-11.2GB",
            True,
            {
                "vocab_size": 151936,
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_hidden_layers": 8,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
            },
            trains=False,
            fresh=False,
        ),
    )
}
"""By name. The large ones have the layers of Qwen3-4B, and eight of Qwen3-30B-A3B's 48."""

TOKENS = 24
"""To be generated, greedily."""


def prompts(case: Case) -> list[list[int]]:
    """Return the token ids of every prompt."""
    return [[(7 * i + j) % case.sizes["vocab_size"] for j in range(5, 37)] for i in range(4)]


def configuration(case: Case) -> Any:
    """Return the case's configuration for Transformers and vLLM."""
    from transformers import Qwen3Config, Qwen3MoeConfig  # noqa: PLC0415 - heavy

    if case.moe:
        architecture: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
        return Qwen3MoeConfig(**_COMMON, **case.sizes, **architecture)
    return Qwen3Config(**_COMMON, **case.sizes, architectures=["Qwen3ForCausalLM"])


def write_configuration(case: Case, directory: Path) -> None:
    """Write what an engine needs to start without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    configuration(case).save_pretrained(directory)


def made(case: Case, device: torch.device) -> torch.nn.Module:
    """Return the model in bfloat16 with random weights, made on the device."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - heavy

    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(configuration(case), dtype=torch.bfloat16)


def save(case: Case, whole: dict[str, torch.Tensor], directory: Path) -> None:
    """Write a checkpoint by Transformers alone: nothing of ours.

    Args:
        case: whose it is.
        whole: whole tensors in host memory, by the names of the model's parameters.
        directory: where.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - heavy

    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(configuration(case), dtype=torch.bfloat16)
    shell.save_pretrained(directory, state_dict=whole)
