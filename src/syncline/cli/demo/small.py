"""The model of ``syncline demo --device cuda``: a small transformer over bytes, and what it learns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Mapping

PROMPT = "Who keeps the engines in sync? "
ANSWER = "Syncline does: every engine holds exactly the trainer's weights."
BYTES = 256
SIZES = {"cuda": (1024, 12), "cpu": (64, 2)}
"""Width and blocks by kind of device: enough to see a GPU work; quick on a CPU."""
HEAD = 32


class Block(nn.Module):
    """One layer; float[batch, length, width] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.after = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then mix."""
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.heads, HEAD).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.after(x))))


class SmallModel(nn.Module):
    """Bytes int64[batch, length] to logits float[batch, length, 256]."""

    def __init__(self, width: int, blocks: int, longest: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.place = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def made(device: torch.device, dtype: torch.dtype) -> SmallModel:
    """Return a new model with random weights, the same for every process."""
    torch.manual_seed(0)
    return SmallModel(*SIZES[device.type]).to(device, dtype)


def lesson(device: torch.device) -> torch.Tensor:
    """Return the sentence as int64[1, length]."""
    return torch.tensor([list((PROMPT + ANSWER).encode())], device=device)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of predicting every next byte."""
    return functional.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def answer(model: nn.Module, device: torch.device) -> str:
    """Return what the model says after the prompt, greedily."""
    ids = torch.tensor([list(PROMPT.encode())], device=device)
    for _ in range(len(ANSWER)):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    return bytes(ids[0, len(PROMPT) :].tolist()).decode(errors="replace")


def half(
    whole: Mapping[str, torch.Tensor], rank: int
) -> tuple[nn.Module, dict[str, tuple[tuple[int, ...], int]]]:
    """Return a module with half of every tensor's rows, and by name the whole's shape and the first row."""
    root = nn.Module()
    cuts = {}
    for name, tensor in whole.items():
        rows = tensor.shape[0] // 2
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:  # noqa: SLF001 - a tree is built by its names
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        blank = torch.full_like(tensor[:rows], -1)
        at.register_parameter(last, nn.Parameter(blank, requires_grad=False))
        cuts[name] = tuple(tensor.shape), rank * rows
    return root, cuts
