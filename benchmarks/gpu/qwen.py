"""Qwen3-30B-A3B's checkpoint, as two expert-parallel trainer ranks and as a tensor-parallel engine hold it.

Trainer: every expert's matrices are tensors of their own; rank r holds half of the experts, whole, and half
of the rows of everything else (FSDP). Engine: one rank of ``tp``; gate and up projections of all experts of
a layer in one tensor, down projections in another (rows of 768 * 2 / tp bytes), q, k and v in one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from syncline.layout import Box, Layout, Manifest, Rules, Shard, View
from syncline.plan import plan

if TYPE_CHECKING:
    from syncline.plan import Plan

HIDDEN, INNER, EXPERTS, HEADS, GROUPS, HEAD, VOCABULARY = 2048, 768, 128, 32, 4, 128, 151936


@dataclass
class Tensors:
    """Storages and the shards that lie in them, of one rank."""

    dtype: str
    shards: list[Shard]
    sizes: list[int]

    @classmethod
    def empty(cls, dtype: str) -> Tensors:
        """Return a rank that holds nothing yet."""
        return cls(dtype, [], [])

    def storage(self, elements: int) -> int:
        """Add a storage; return its number."""
        self.sizes.append(elements * getattr(torch, self.dtype).itemsize)
        return len(self.sizes) - 1

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        box: Box,
        storage: int,
        offset: int = 0,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        """Add a box of a checkpoint tensor, contiguous unless strides say otherwise."""
        if strides is None:
            strides = (box.size[1], 1) if len(shape) == 2 else (1,)
        view = View.simple(storage, offset, box.size, strides)
        self.shards.append(Shard(name, shape, self.dtype, box, view))

    def manifest(self) -> Manifest:
        """Return the manifest."""
        return Manifest.from_shards(self.shards, self.sizes)


def dense(layers: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of everything but the experts."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(layers):
        layer = f"model.layers.{i}."
        for key, shape in (
            ("self_attn.q_proj", (HEADS * HEAD, HIDDEN)),
            ("self_attn.k_proj", (GROUPS * HEAD, HIDDEN)),
            ("self_attn.v_proj", (GROUPS * HEAD, HIDDEN)),
            ("self_attn.o_proj", (HIDDEN, HEADS * HEAD)),
            ("mlp.gate", (EXPERTS, HIDDEN)),
            ("input_layernorm", (HIDDEN,)),
            ("post_attention_layernorm", (HIDDEN,)),
            ("self_attn.q_norm", (HEAD,)),
            ("self_attn.k_norm", (HEAD,)),
        ):
            shapes[f"{layer}{key}.weight"] = shape
    return shapes


def expert_name(layer: int, expert: int, key: str) -> str:
    """Return the checkpoint name of an expert's matrix."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{key}_proj.weight"


def trainer(rank: int, layers: int, dtype: str) -> Tensors:
    """Return what one of two trainer ranks holds."""
    out = Tensors.empty(dtype)
    for name, shape in dense(layers).items():
        rows = shape[0] // 2
        box = Box((rank * rows, *[0] * (len(shape) - 1)), (rows, *shape[1:]))
        out.add(name, shape, box, out.storage(box.numel))
    for i in range(layers):
        for j in range(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2):
            for key in ("gate", "up", "down"):
                shape = (HIDDEN, INNER) if key == "down" else (INNER, HIDDEN)
                out.add(expert_name(i, j, key), shape, Box.whole(shape), out.storage(HIDDEN * INNER))
    return out


def engine(rank: int, tp: int, layers: int, dtype: str) -> Tensors:
    """Return what one tensor-parallel rank holds."""
    out = Tensors.empty(dtype)
    inner = INNER // tp
    shapes = dense(layers)
    for name, shape in shapes.items():
        if any(key in name for key in ("q_proj", "k_proj", "v_proj")):
            continue
        cut = 1 if "o_proj" in name else 0 if "embed" in name or "lm_head" in name else None
        box = Box.whole(shape) if cut is None else _part(shape, cut, rank, tp)
        out.add(name, shape, box, out.storage(box.numel))
    for i in range(layers):
        fused = [f"model.layers.{i}.self_attn.{key}_proj.weight" for key in "qkv"]
        boxes = [_part(shapes[name], 0, rank, tp) for name in fused]
        storage, at = out.storage(sum(b.numel for b in boxes)), 0
        for name, box in zip(fused, boxes, strict=True):
            out.add(name, shapes[name], box, storage, at)
            at += box.numel
        both, down = (out.storage(EXPERTS * n * inner * HIDDEN) for n in (2, 1))
        for j in range(EXPERTS):
            for k, key in enumerate(("gate", "up")):
                box = _part((INNER, HIDDEN), 0, rank, tp)
                out.add(expert_name(i, j, key), (INNER, HIDDEN), box, both, (2 * j + k) * inner * HIDDEN)
            box = _part((HIDDEN, INNER), 1, rank, tp)
            out.add(expert_name(i, j, "down"), (HIDDEN, INNER), box, down, j * inner * HIDDEN)
    return out


def _part(shape: tuple[int, ...], dim: int, rank: int, ranks: int) -> Box:
    size, offset = list(shape), [0] * len(shape)
    size[dim] //= ranks
    offset[dim] = rank * size[dim]
    return Box(tuple(offset), tuple(size))


def planned(layers: int, tp: int, dtype: str, wire: str) -> tuple[list[Tensors], Tensors, Plan]:
    """Return the trainer's ranks, the engine's rank 0 and the plan of all ranks."""
    writers = [trainer(r, layers, dtype) for r in range(2)]
    readers = [engine(r, tp, layers, wire) for r in range(tp)]
    rules = Rules(casts="reader") if dtype != wire else Rules()
    made = plan(
        Layout(tuple(w.manifest() for w in writers), ("host",) * 2),
        {"serve": Layout(tuple(r.manifest() for r in readers), ("host",) * tp)},
        rules,
    )
    return writers, readers[0], made


def allocate(tensors: Tensors, device: int, *, fill: bool) -> list[torch.Tensor]:
    """Return the storages as flat tensors, of random values if ``fill``, else of NaN bytes."""
    dtype = getattr(torch, tensors.dtype)
    out = [torch.empty(n // dtype.itemsize, dtype=dtype, device=f"cuda:{device}") for n in tensors.sizes]
    for one in out:
        if fill:
            one.normal_()
        else:
            one.view(torch.uint8).fill_(255)
    return out
