"""Tiny random checkpoints of many model families, with a tokenizer, made on the spot and never downloaded.

Every tensor of a checkpoint is random, norms and biases included: a tensor that an update forgot, or put in
the place of its neighbour, cannot look right by accident.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

VOCABULARY = 512
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_HEAD = {"head_dim": 32}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
_DEEPSEEK = {
    **{key: value for key, value in BASE.items() if key != "tie_word_embeddings"},
    **_EXPERTS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
_STATES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "state_size": 16,
    "num_hidden_layers": 2,
    "expand": 2,
    "num_heads": 8,
    "head_dim": 32,
    "n_groups": 2,
    "chunk_size": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", BASE),
    "qwen3": ("Qwen3Config", BASE | _HEAD),
    "qwen3_tied": ("Qwen3Config", BASE | _HEAD | {"tie_word_embeddings": True}),
    "llama": ("LlamaConfig", BASE),
    "mistral": ("MistralConfig", BASE | _HEAD | {"sliding_window": None}),
    "gemma2": ("Gemma2Config", BASE | _HEAD | {"query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3TextConfig",
        BASE | _HEAD | {"query_pre_attn_scalar": 32, "tie_word_embeddings": True, "sliding_window": 64},
    ),
    "phi3": ("Phi3Config", BASE),
    "olmo2": ("Olmo2Config", BASE),
    "granite": (
        "GraniteConfig",
        BASE | {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 0.5},
    ),
    "glm4": ("Glm4Config", BASE | _HEAD),
    "stablelm": ("StableLmConfig", BASE),
    "starcoder2": ("Starcoder2Config", BASE),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        BASE | _HEAD | _EXPERTS | {"num_experts": 4, "decoder_sparse_step": 1},
    ),
    "gpt_oss": (
        "GptOssConfig",
        BASE | _HEAD | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
    ),
    "deepseek_v3": ("DeepseekV3Config", _DEEPSEEK),
    "mamba2": ("Mamba2Config", _STATES),
    "llama_mqa": ("LlamaConfig", BASE | {"num_key_value_heads": 1}),
    "phi": ("PhiConfig", BASE),
    "apertus": ("ApertusConfig", BASE | _HEAD),
}
"""Name -> Transformers' configuration class and its arguments."""

EXPERTS: Mapping[str, int] = {"qwen3_moe": 4, "gpt_oss": 4, "deepseek_v3": 4}
"""Families whose tokens choose among experts -> experts in a layer."""

PROMPTS = (
    "the quick brown fox",
    "weights move fast",
    "0123456789 9876543210",
    "A line of UPPER CASE, and some (punctuation)!",
    "zzzz yyyy xxxx wwww",
    "hello world",
)
"""Different enough that their tokens meet every expert of the mixtures; `tests.engines.experts` counts."""


def make(family: str, directory: Path | str, seed: int = 0, *, dtype: str = "bfloat16") -> Path:
    """Write a checkpoint directory (safetensors, configuration, tokenizer) and return it.

    The same arguments give the same bytes; another seed changes every tensor.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 (heavy)

    directory = Path(directory)
    kind = getattr(torch, dtype)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_config(family), dtype=kind)
    with torch.no_grad():
        _randomise(model, seed)
    model.save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    return directory


def tensors(directory: Path | str) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint directory by name, as a trainer would hold it."""
    from safetensors.torch import load_file  # noqa: PLC0415 (only here)

    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        found |= load_file(file)
    return found


def _config(family: str) -> Any:
    import transformers  # noqa: PLC0415 (heavy)

    name, arguments = FAMILIES[family]
    return getattr(transformers, name)(**arguments)


def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill every tensor by its name and the seed: vectors around their start, matrices by fan-in."""
    done: set[int] = set()
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.data_ptr() in done or not tensor.is_floating_point():
            continue
        done.add(tensor.data_ptr())
        generator = torch.Generator().manual_seed(crc32(name.encode()) + 1_000_003 * seed)
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim < 2:
            tensor.copy_(tensor.float() + 0.25 * noise)
        else:
            quiet = (
                0.25 if tensor.shape[0] == VOCABULARY else 1.0
            )  # else tied embeddings only echo the last token
            tensor.copy_(noise * (1.5 * quiet / tensor.shape[-1] ** 0.5))


def _tokenizer() -> Any:
    """Return a byte tokenizer: one token for each byte, and three special ones before them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 (only here)
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 (heavy)

    special = ["<|pad|>", "<|bos|>", "<|eos|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate(special + alphabet)}
    words |= {f"<|{number}|>": number for number in range(len(words), VOCABULARY)}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=special[0], bos_token=special[1], eos_token=special[2]
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    return fast


def main(arguments: list[str] | None = None) -> None:
    """``python -m tests.engines.checkpoints FAMILY DIRECTORY [--seed N]``."""
    parser = argparse.ArgumentParser(description="write a tiny random checkpoint")
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    chosen = parser.parse_args(arguments)
    print(make(chosen.family, chosen.directory, chosen.seed, dtype=chosen.dtype))


if __name__ == "__main__":
    main()
