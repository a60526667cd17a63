"""Constructing a model without memory for its weights, where the constructor computes with other tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_WEIGHTS = frozenset(
    {torch.empty, torch.empty_strided, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}
)
"""What constructors make weights with: tensors without contents of their own."""


class Weightless(TorchFunctionMode):
    """Puts new tensors without contents on the meta device, and leaves those with contents where they are.

    The meta device as the default takes both kinds; then a constructor that computes a table, and looks at
    its values (the slopes of attention biases, for one), cannot run.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        del types
        given = kwargs or {}
        if func in _WEIGHTS and "out" not in given:
            given = given | {"device": "meta"}
        return func(*args, **given)
