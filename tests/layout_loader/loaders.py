"""Toy models and their loaders, written as engines write theirs; they run with and without weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from syncline.layout.loader import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


@dataclass
class Case:
    """A toy engine: its live tensors, its checkpoint and its loader.

    Attributes:
        checkpoint: shapes and dtypes by name.
        make: device -> live tensors by name.
        load: (live, weights) -> None.
        replays: checkpoint names that must be replayed, not copied.
        unused: checkpoint names that must be reported.
        holes: elements of live tensors that must be reported as holes, together.
        writes: how many boxes the copies must compress to; None where it does not matter.
    """

    checkpoint: dict[str, Spec]
    make: Callable[[str], dict[str, torch.Tensor]]
    load: Callable[[dict[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]], Any]
    replays: set[str] = field(default_factory=set)
    unused: set[str] = field(default_factory=set)
    holes: int = 0
    writes: int | None = None


def spec(*shape: int, dtype: torch.dtype = BF16) -> Spec:
    return Spec(shape, str(dtype).removeprefix("torch."))


def live(**tensors: tuple[Any, ...]) -> Callable[[str], dict[str, torch.Tensor]]:
    """Parameters by name, given as (*shape, dtype)."""

    def make(device: str) -> dict[str, torch.Tensor]:
        return {
            name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)
            for name, (*shape, dtype) in tensors.items()
        }

    return make


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


@case
def qkv_gqa_replicated_tp2_of_4() -> Case:
    """8 query heads, 2 KV heads, 4 ranks: rank 3 holds two query heads, and a KV head as rank 2 does."""
    d, rank, hidden = 4, 3, 16

    def load(p, weights):
        for name, w in weights:
            shard, heads = (rank, 2) if name == "q" else (rank // 2, 1)
            start = {"q": 0, "k": 2 * d, "v": 3 * d}[name]
            for suffix, at in (("weight", w), ("bias", w)):
                if (suffix == "bias") == (w.ndim == 1):
                    p[suffix].data.narrow(0, start, heads * d).copy_(
                        at.narrow(0, shard * heads * d, heads * d)
                    )

    ck = {"q": spec(8 * d, hidden), "k": spec(2 * d, hidden), "v": spec(2 * d, hidden)}
    return Case(ck, live(weight=(4 * d, hidden, BF16), bias=(4 * d, BF16)), load, holes=4 * d, writes=3)


@case
def biases_and_gate_up() -> Case:
    def load(p, weights):
        for name, w in weights:
            half, kind = name.split(".")
            n = w.shape[0]
            p[kind].data[(half == "up") * n :][:n] = w

    ck = {
        f"{h}.{k}": spec(6, 4) if k == "weight" else spec(6)
        for h in ("gate", "up")
        for k in ("weight", "bias")
    }
    return Case(ck, live(weight=(12, 4, BF16), bias=(12, BF16)), load, writes=4)


def _experts(transposed: bool) -> Case:
    experts, hidden, inner, rank = 4, 8, 12, 1

    def load(p, weights):
        half = inner // 2
        for name, stored in weights:
            e, kind = int(name.split(".")[0]), name.split(".")[1]
            w = stored.t() if transposed else stored
            if kind == "down":
                p["w2"].data[e].copy_(w.narrow(1, rank * half, half))
            else:
                w13 = p["w13"].data[e]
                w13.narrow(0, half * (kind == "up"), half).copy_(w.narrow(0, rank * half, half))

    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    ck = {
        f"{e}.{k}": spec(*(reversed(s) if transposed else s))
        for e in range(experts)
        for k, s in shapes.items()
    }
    return Case(
        ck, live(w13=(experts, inner, hidden, BF16), w2=(experts, hidden, inner // 2, BF16)), load, writes=12
    )


@case
def collected_first_and_copied_last() -> Case:
    """A loader that keeps what it is given, and views of it, until it has seen everything (B61)."""

    def load(p, weights):
        kept = {name: (w, w.view(-1)) for name, w in weights}
        for e in range(3):
            p["w13"].data[e].copy_(torch.stack([kept[f"{e}.gate"][0], kept[f"{e}.up"][0]]))
            p["flat"].data[8 * e : 8 * (e + 1)].copy_(kept[f"{e}.down"][1])

    parts = {"gate": spec(4, 6), "up": spec(4, 6), "down": spec(2, 4)}
    ck = {f"{e}.{part}": one for part, one in parts.items() for e in range(3)}
    return Case(ck, live(w13=(3, 2, 4, 6, BF16), flat=(24, BF16)), load)


@case
def stacked_experts_tp2() -> Case:
    return _experts(transposed=False)


@case
def stacked_experts_from_transposed() -> Case:
    return _experts(transposed=True)


@case
def fused_transposed_experts_with_bias() -> Case:
    """GPT-OSS: (E, H, 2I) interleaved on disk; gate rows first in memory, expert by expert."""

    def load(p, weights):
        for name, w in weights:
            if name == "bias":
                p["w13_bias"].data.copy_(w)
                continue
            for e in range(w.shape[0]):
                inner = w.shape[2] // 2
                t = w[e].t()
                p["w13"].data[e, :inner].copy_(t[0::2].contiguous())
                p["w13"].data[e, inner:].copy_(t[1::2])

    ck = {"gate_up": spec(3, 8, 10), "bias": spec(3, 10)}
    return Case(ck, live(w13=(3, 10, 8, BF16), w13_bias=(3, 10, BF16)), load, writes=2)


@case
def fused_experts_by_chunk_and_unbind() -> Case:
    def load(p, weights):
        for _, w in weights:
            gate, up = w.transpose(1, 2).chunk(2, dim=1)
            for e, (g, u) in enumerate(zip(gate.unbind(0), up.unbind(0), strict=True)):
                p["w13"][e].copy_(torch.stack([g, u]).reshape(-1, g.shape[1]))

    return Case({"gate_up": spec(3, 8, 10)}, live(w13=(3, 10, 8, BF16)), load, writes=1)


@case
def mla_fused_by_cat() -> Case:
    def load(p, weights):
        cached = {}
        for name, w in weights:
            cached[name] = w
            if len(cached) == 2:
                p["fused"].data.copy_(torch.cat([cached["q_a"], cached["kv_a"]], dim=0))

    return Case({"q_a": spec(6, 8), "kv_a": spec(5, 8)}, live(fused=(11, 8, BF16)), load, writes=2)


@case
def vocabulary_padding_tp2() -> Case:
    """Rows 8..15 of 11: five padded, filled with zero by the loader; the untied head leaves them alone."""

    def load(p, weights):
        for name, w in weights:
            rows = w.narrow(0, 8, w.shape[0] - 8)
            p[name].data[: rows.shape[0]].copy_(rows)
            if name == "embed":
                p[name].data[rows.shape[0] :].fill_(0)

    ck = {"embed": spec(11, 4), "head": spec(11, 4)}
    return Case(ck, live(embed=(8, 4, BF16), head=(8, 4, BF16)), load, holes=20, writes=2)


@case
def padding_by_pad() -> Case:
    def load(p, weights):
        for _, w in weights:
            p["w"].data.copy_(torch.nn.functional.pad(w, (0, 2, 1, 3), value=2.0))

    return Case({"w": spec(4, 4)}, live(w=(8, 6, BF16)), load, writes=1)


@case
def interleaved_qkv() -> Case:
    """Per KV group [q, q, k, v] in memory, plain q, k and v on disk."""
    groups, d, hidden = 3, 2, 4

    def load(p, weights):
        for name, w in weights:
            heads = p["qkv"].data.view(groups, 4, d, hidden)
            part = {"q": heads[:, :2], "k": heads[:, 2:3], "v": heads[:, 3:]}[name]
            part.copy_(w.view(groups, -1, d, hidden))

    ck = {"q": spec(groups * 2 * d, hidden), "k": spec(groups * d, hidden), "v": spec(groups * d, hidden)}
    return Case(ck, live(qkv=(groups * 4 * d, hidden, BF16)), load, writes=3)


@case
def interleaved_on_disk() -> Case:
    """Bloom: (heads, 3, d) on disk, q then k then v in memory."""
    heads, d, hidden = 3, 2, 4

    def load(p, weights):
        for _, w in weights:
            p["qkv"].data.copy_(w.view(heads, 3, d, -1).transpose(0, 1).reshape(3 * heads * d, -1))

    return Case({"qkv": spec(heads * 3 * d, hidden)}, live(qkv=(heads * 3 * d, hidden, BF16)), load, writes=1)


@case
def rotary_permutation() -> Case:
    """Llama's original rotary order: rows of each head reordered by view, transpose, reshape."""

    def load(p, weights):
        for _, w in weights:
            p["q"].data.copy_(w.view(2, 2, 4, 8).transpose(1, 2).reshape(16, 8))

    return Case({"q": spec(16, 8)}, live(q=(16, 8, BF16)), load, writes=1)


@case
def tied_embeddings() -> Case:
    """One storage, two names, both on disk: the head is loaded last."""

    def make(device):
        embed = torch.nn.Parameter(torch.zeros(6, 4, dtype=BF16, device=device), requires_grad=False)
        return {"embed": embed, "head": embed}

    def load(p, weights):
        for name, w in weights:
            p[name].data.copy_(w)

    return Case({"embed": spec(6, 4), "head": spec(6, 4)}, make, load, unused={"embed"}, writes=1)


@case
def fp8_with_block_scales() -> Case:
    def load(p, weights):
        for name, w in weights:
            half, kind = name.split(".")
            n = w.shape[0]
            p[kind].data.narrow(0, n * (half == "up"), n).copy_(w)

    ck = {}
    for half in ("gate", "up"):
        ck[f"{half}.weight"] = spec(8, 16, dtype=FP8)
        ck[f"{half}.scale"] = spec(2, 4, dtype=F32)
    return Case(ck, live(weight=(16, 16, FP8), scale=(4, 4, F32)), load, writes=4)


@case
def fp8_bits_in_bytes() -> Case:
    """Bytes on disk that the engine calls fp8, and fp8 that it calls bytes."""

    def load(p, weights):
        for name, w in weights:
            if name == "bytes":
                p["fp8"].data.copy_(w.view(FP8))
            else:
                p["bytes"].data.view(FP8)[2:].copy_(w)

    ck = {"bytes": spec(4, 6, dtype=torch.uint8), "fp8": spec(4, 6, dtype=FP8)}
    return Case(ck, live(fp8=(4, 6, FP8), bytes=(6, 6, torch.uint8)), load, holes=12, writes=2)


@case
def casts() -> Case:
    def load(p, weights):
        for name, w in weights:
            p[name].data.copy_(w.to(F32).contiguous() if name == "back" else w)

    ck = {"wide": spec(3, 4, dtype=F32), "narrow": spec(3, 4), "back": spec(3, 4)}
    return Case(ck, live(wide=(3, 4, BF16), narrow=(3, 4, F32), back=(3, 4, BF16)), load, writes=3)
