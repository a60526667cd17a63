"""Which of an engine's hooks read weights: the others need not run again when weights change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


class _Watch(TorchDispatchMode):
    """Notes whether an operation is given a tensor of certain storages."""

    def __init__(self, storages: Collection[int]) -> None:
        super().__init__()
        self._storages, self.seen = storages, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for held in tree_leaves((args, kwargs)):
            if isinstance(held, torch.Tensor) and storage_of(held) in self._storages:
                self.seen = True
        return func(*args, **(kwargs or {}))


def storage_of(tensor: torch.Tensor) -> int:
    """Return where a tensor's storage begins; 0 for one without memory."""
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def reads(hook: Callable[[], object], weights: Collection[torch.Tensor]) -> bool:
    """Run a hook and return whether any operation in it was given one of the weights, or a view of one.

    What goes around torch's operations, such as numpy's view of host memory, is not seen.
    """
    with _Watch({storage_of(weight) for weight in weights} - {0}) as watch:
        hook()
    return watch.seen
