"""Tiny models, and plain reading and writing of live memory through a manifest."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    logging,
)

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads(1)

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS = {
    "qwen3": Qwen3Config(**BASE, head_dim=8, tie_word_embeddings=False),
    "qwen3_tied": Qwen3Config(**BASE, head_dim=8, tie_word_embeddings=True),
    "llama": LlamaConfig(**BASE, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **BASE, **MOE, head_dim=8, num_experts=4, decoder_sparse_step=1, tie_word_embeddings=False
    ),
    "deepseek_v3": DeepseekV3Config(
        **{**BASE, "num_key_value_heads": 4},
        **MOE,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        rope_interleave=True,
        rope_scaling=None,
    ),
    "gpt_oss": GptOssConfig(
        **BASE,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
        tie_word_embeddings=False,
    ),
}


def tiny(family, dtype=torch.float32, seed=0):
    """A random tiny model."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[family], dtype=dtype)


NUMPY = {
    "float32": np.float32,
    "float64": np.float64,
    "int64": np.int64,
    "bfloat16": np.uint16,
    "float16": np.float16,
}


def _view(shard, address, nbytes):
    kind = np.dtype(NUMPY[shard.dtype])
    raw = (ctypes.c_uint8 * nbytes).from_address(address) if nbytes else bytearray()
    flat = np.frombuffer(raw, kind, nbytes // kind.itemsize)
    extents = [n for nest in shard.view.shape for n in nest]
    strides = [s * kind.itemsize for nest in shard.view.stride for s in nest]
    return np.lib.stride_tricks.as_strided(flat[shard.view.offset :], extents, strides)


def _box(shard):
    return tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.size, strict=True))


def read(manifest, addresses, into=None):
    """Copy what a process holds into full checkpoint tensors (elements nobody wrote stay zero)."""
    full = {} if into is None else into
    for shard in manifest.shards():
        whole = full.setdefault(shard.name, np.zeros(shard.global_shape, NUMPY[shard.dtype]))
        if shard.box.numel:
            live = _view(
                shard, int(addresses[shard.view.storage]), int(manifest.storage_nbytes[shard.view.storage])
            )
            whole[_box(shard)] = live.reshape(shard.box.size)
    return full


def write(manifest, addresses, full):
    """Copy full checkpoint tensors into what a process holds."""
    for shard in manifest.shards():
        if shard.box.numel:
            live = _view(
                shard, int(addresses[shard.view.storage]), int(manifest.storage_nbytes[shard.view.storage])
            )
            live[...] = full[shard.name][_box(shard)].reshape(live.shape)


def tokenizer():
    """A local word tokenizer: one token a word, w3 ... w95, and three special ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, BASE["vocab_size"])}
    made = Tokenizer(models.WordLevel(words, unk_token="w3"))  # noqa: S106 (a token of text)
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos")}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return fast


def save_tiny(family, directory, seed=0):
    """A checkpoint directory with tokenizer; weights large enough that texts differ between seeds."""
    model = tiny(family, seed=seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" not in name:
                p.mul_(8.0)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory
