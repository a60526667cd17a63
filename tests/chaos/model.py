"""A tiny model whose every element says which tensor, place and version it is; and its cuts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from syncline.adapters.module import Cut

if TYPE_CHECKING:
    from collections.abc import Mapping

HIDDEN, MLP, VOCAB = 16, 24, 37
WIDE = (1536, 4096)  # 24 MiB: three kernel calls, so that a reader can die between two of them


class Tiny(nn.Module):
    """Two linear layers, an embedding, a norm; ``wide`` adds one tensor that is moved in several parts."""

    def __init__(self, *, wide: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.up = nn.Linear(HIDDEN, MLP)
        self.down = nn.Linear(MLP, HIDDEN, bias=False)
        self.norm = nn.LayerNorm(HIDDEN)
        if wide:
            self.wide = nn.Parameter(torch.zeros(WIDE))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        return self.down(torch.relu(self.up(hidden))) @ self.embed.weight.T


class Part(nn.Module):
    """One rank's share of `Tiny`: plain parameters of the cut sizes, under dotted names."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for step in path:
                if not hasattr(owner, step):
                    owner.add_module(step, nn.Module())
                owner = getattr(owner, step)
            owner.register_parameter(leaf, nn.Parameter(torch.full(shape, -1.0), requires_grad=False))


def stamped(version: float, *, wide: bool = False) -> dict[str, torch.Tensor]:
    """Return the whole checkpoint of a version: every element differs from every other, and by version."""
    found = {}
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in Tiny(wide=wide).state_dict().items()}
    for number, (name, shape) in enumerate(shapes.items()):
        count = torch.Size(shape).numel()
        place = torch.arange(count, dtype=torch.float64) + 4096.0 * number
        found[name] = (place * 64 + version).to(torch.float32).reshape(shape)
    return found


def bounds(length: int, rank: int, world: int) -> tuple[int, int]:
    """Return rows [lo, hi) of a rank: uneven where ``world`` does not divide them."""
    return length * rank // world, length * (rank + 1) // world


def cut(whole: Mapping[str, torch.Tensor], rank: int, world: int) -> dict[str, torch.Tensor]:
    """Return a rank's slices: matrices by rows, except ``down`` by columns; vectors whole."""
    found = {}
    for name, tensor in whole.items():
        dim = 1 if name.startswith("down") else 0
        if tensor.ndim < 2:
            found[name] = tensor
            continue
        lo, hi = bounds(tensor.shape[dim], rank, world)
        found[name] = tensor.narrow(dim, lo, hi - lo)
    return found


def cuts(whole: Mapping[str, torch.Tensor], rank: int, world: int) -> dict[str, Cut]:
    """Return what a `ModuleEngine` must know of `cut`."""
    found = {}
    for name, tensor in whole.items():
        if tensor.ndim < 2:
            continue
        dim = 1 if name.startswith("down") else 0
        lo, _ = bounds(tensor.shape[dim], rank, world)
        found[name] = Cut(tuple(tensor.shape), tuple(lo if d == dim else 0 for d in range(tensor.ndim)))
    return found
