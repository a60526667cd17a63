"""The models that the benchmarks move: shapes of real ones, cut as trainers and engines cut them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from syncline.adapters.module import Cut

if TYPE_CHECKING:
    from collections.abc import Mapping

Shapes = dict[str, tuple[int, ...]]

SECOND_DIM = ("o_proj.weight", "down_proj.weight")  # tensor parallelism cuts these along their inputs


def llama(layers: int = 9, hidden: int = 2048, inner: int = 5632, vocabulary: int = 34816) -> Shapes:
    """Return checkpoint shapes of a Llama of TinyLlama's width: 1 GiB of bf16 as the defaults are."""
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "self_attn.q_proj.weight": (hidden, hidden),
            layer + "self_attn.k_proj.weight": (hidden // 8, hidden),
            layer + "self_attn.v_proj.weight": (hidden // 8, hidden),
            layer + "self_attn.o_proj.weight": (hidden, hidden),
            layer + "mlp.gate_proj.weight": (inner, hidden),
            layer + "mlp.up_proj.weight": (inner, hidden),
            layer + "mlp.down_proj.weight": (hidden, inner),
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def experts(layers: int = 48, count: int = 125, hidden: int = 32, inner: int = 768) -> Shapes:
    """Return 18,000 expert matrices of 48 KiB: Qwen3-30B-A3B's experts, less wide where it costs no rows."""
    shapes: Shapes = {}
    for i in range(layers):
        for j in range(count):
            expert = f"model.layers.{i}.mlp.experts.{j}."
            shapes[expert + "gate_proj.weight"] = (inner, hidden)
            shapes[expert + "up_proj.weight"] = (inner, hidden)
            shapes[expert + "down_proj.weight"] = (hidden, inner)
    return shapes


def module(shapes: Mapping[str, tuple[int, ...]], device: str) -> nn.Module:
    """Return a module tree with a bfloat16 parameter for each name."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, key = name.split(".")
        owner = root
        for step in path:
            if step not in owner._modules:  # noqa: SLF001 - the tree that is being built
                owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        empty = torch.empty(shape, dtype=torch.bfloat16, device=device)
        owner.register_parameter(key, nn.Parameter(empty, requires_grad=False))
    return root


def fill(tensors: list[torch.Tensor], seed: int) -> None:
    """Write random bits."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.view(torch.int16).random_(generator=generator)


def halves(shapes: Mapping[str, tuple[int, ...]], rank: int) -> tuple[Shapes, dict[str, Cut]]:
    """Return the local shapes of one of two tensor-parallel ranks, and what they are of the whole."""
    local: Shapes = {}
    cuts: dict[str, Cut] = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            local[name] = shape
            continue
        dim = 1 if name.endswith(SECOND_DIM) else 0
        size = list(shape)
        size[dim] //= 2
        offset = [0, 0]
        offset[dim] = rank * size[dim]
        local[name] = tuple(size)
        cuts[name] = Cut(shape, tuple(offset))
    return local, cuts
