"""A custom weight loader of SGLang's own kind that spoils live tensors: what an update forgets then shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn


def fill(model: nn.Module, named: list[tuple[str, Any]]) -> None:
    """Fill the named live tensors of this rank, parameters, buffers and plain attributes alike, with NaN."""
    with torch.inference_mode():
        for name, _ in named:
            owner, _, key = name.rpartition(".")
            tensor = getattr(model.get_submodule(owner), key)
            tensor.data.fill_(float("nan") if tensor.is_floating_point() else 113)
