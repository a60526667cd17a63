"""Checkpoint tensors of four public mixture-of-experts models, by their real shapes, and how each is cut.

Shapes follow the models' published configurations. Nothing under ``src`` knows any of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Tensor:
    """One checkpoint tensor.

    Attributes:
        cut: the dimension that tensor parallelism cuts, or None where every rank holds it whole.
        heads: attention heads that the cut must not divide, or 0.
        layer: number of its layer; -1 before the first, ``layers`` behind the last.
        expert: number of its expert, or -1.
        fused: tensors of one layer and one name here lie behind each other in one parameter of an engine.
        dtype: torch's name.
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    heads: int = 0
    layer: int = -1
    expert: int = -1
    fused: str = ""
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class Model:
    """A model's dimensions.

    Attributes:
        dense_layers: leading layers without experts, of width ``dense``.
        shared: width of the shared experts, 0 for none.
        lora: (rank of queries, rank of keys and values, rotary part, head's other part, head of the values)
            of latent attention, or None for grouped queries.
        trainer: (pipeline, expert, tensor) parallelism of the usual trainer.
    """

    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head: int
    experts: int
    width: int
    dense_layers: int = 0
    dense: int = 0
    shared: int = 0
    lora: tuple[int, int, int, int, int] | None = None
    trainer: tuple[int, int, int] = (4, 32, 1)

    def tensors(self) -> list[Tensor]:
        """Return all tensors, layer by layer."""
        first = [Tensor("model.embed_tokens.weight", (self.vocab, self.hidden), 0)]
        last = [
            Tensor("model.norm.weight", (self.hidden,), layer=self.layers),
            Tensor("lm_head.weight", (self.vocab, self.hidden), 0, layer=self.layers),
        ]
        return [*first, *(t for layer in range(self.layers) for t in self._layer(layer)), *last]

    def _layer(self, layer: int) -> Iterator[Tensor]:
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Tensor(f"{at}{norm}.weight", (self.hidden,), layer=layer)
        yield from self._latent(at, layer) if self.lora else self._grouped(at, layer)
        if layer < self.dense_layers:
            yield from self._mlp(f"{at}mlp.", self.dense, layer)
            return
        yield Tensor(f"{at}mlp.gate.weight", (self.experts, self.hidden), layer=layer)
        if self.shared:
            bias = f"{at}mlp.gate.e_score_correction_bias"
            yield Tensor(bias, (self.experts,), layer=layer, dtype="float32")
            yield from self._mlp(f"{at}mlp.shared_experts.", self.shared, layer)
        for expert in range(self.experts):
            yield from self._mlp(f"{at}mlp.experts.{expert}.", self.width, layer, expert)

    def _mlp(self, at: str, width: int, layer: int, expert: int = -1) -> Iterator[Tensor]:
        group = "experts." if expert >= 0 else "shared." if "shared" in at else "dense."
        for name in ("gate", "up"):
            shape = (width, self.hidden)
            yield Tensor(f"{at}{name}_proj.weight", shape, 0, 0, layer, expert, f"{group}gate_up")
        yield Tensor(f"{at}down_proj.weight", (self.hidden, width), 1, 0, layer, expert, f"{group}down")

    def _grouped(self, at: str, layer: int) -> Iterator[Tensor]:
        for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            shape = (heads * self.head, self.hidden)
            yield Tensor(f"{at}self_attn.{name}_proj.weight", shape, 0, heads, layer, fused="qkv")
            if name != "v":
                yield Tensor(f"{at}self_attn.{name}_norm.weight", (self.head,), layer=layer)
        shape = (self.hidden, self.heads * self.head)
        yield Tensor(f"{at}self_attn.o_proj.weight", shape, 1, self.heads, layer)

    def _latent(self, at: str, layer: int) -> Iterator[Tensor]:
        if self.lora is None:
            return
        q, kv, rotary, plain, value = self.lora
        at, hidden, heads = f"{at}self_attn.", self.hidden, self.heads
        yield Tensor(f"{at}q_a_proj.weight", (q, hidden), layer=layer, fused="a")
        yield Tensor(f"{at}q_a_layernorm.weight", (q,), layer=layer)
        yield Tensor(f"{at}q_b_proj.weight", (heads * (plain + rotary), q), 0, heads, layer)
        yield Tensor(f"{at}kv_a_proj_with_mqa.weight", (kv + rotary, hidden), layer=layer, fused="a")
        yield Tensor(f"{at}kv_a_layernorm.weight", (kv,), layer=layer)
        yield Tensor(f"{at}kv_b_proj.weight", (heads * (plain + value), kv), 0, heads, layer)
        yield Tensor(f"{at}o_proj.weight", (hidden, heads * value), 1, heads, layer)


_LATENT = (1536, 512, 64, 128, 128)
MODELS = {
    "qwen3-30b-a3b": Model(48, 2048, 151_936, 32, 4, 128, 128, 768, trainer=(2, 16, 2)),
    "qwen3-235b": Model(94, 4096, 151_936, 64, 4, 128, 128, 1536, trainer=(8, 16, 4)),
    "deepseek-v3": Model(
        61, 7168, 129_280, 128, 128, 128, 256, 2048, 3, 18_432, 2048, _LATENT, trainer=(8, 16, 2)
    ),
    "kimi-k2": Model(61, 7168, 163_840, 64, 64, 128, 384, 2048, 1, 18_432, 2048, _LATENT),
}
