"""Memory that an engine's code makes on the way and lets go of, though a kernel goes on reading it.

A kernel that was given a bare address (oneDNN's are, on CPUs) reads whatever lies there later. While that
memory is not used again, its answers are right by luck; nothing is left to luck here.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


class Temporaries(TorchDispatchMode):
    """Keeps alive all memory that operations make while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, and keep what it made."""
        del types
        made = func(*args, **(kwargs or {}))
        self._made |= _storages(tree_leaves(made))
        return made

    @contextmanager
    def spoiled(self, held: Iterable[torch.Tensor]) -> Iterator[None]:
        """Zero, for the time of the context, what was made and is none of ``held``'s memory."""
        mine = _storages(held)
        gone = [storage for pointer, storage in self._made.items() if pointer not in mine]
        before = [storage.clone() for storage in gone]
        try:
            for storage in gone:
                storage.copy_(torch.zeros(storage.nbytes(), dtype=torch.uint8).untyped_storage())
            yield
        finally:
            for storage, contents in zip(gone, before, strict=True):
                storage.copy_(contents)


def _storages(values: Iterable[object]) -> dict[int, torch.UntypedStorage]:
    tensors = [v for v in values if isinstance(v, torch.Tensor) and not v.is_meta]
    storages = [t.untyped_storage() for t in tensors if t.layout == torch.strided]
    return {s.data_ptr(): s for s in storages if s.nbytes()}
