"""The tensors of a live model: registered ones, and those that hang at modules as plain attributes.

An engine keeps state derived from weights where no ``named_parameters`` finds it: in attributes, lists and
dictionaries of modules. `slots` finds those too. A tensor is found by where it hangs, never remembered as an
object, so that one that was replaced is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor hangs: ``owner[key]``.

    Attributes:
        owner: a module's dictionary, or a container in it.
        key: of the tensor in it.
        registered: whether it is a parameter or a buffer.
    """

    owner: Any
    key: Any
    registered: bool

    def get(self) -> torch.Tensor:
        """Return what hangs there now."""
        return self.owner[self.key]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Which elements of which storage a tensor is."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """Return that of a strided tensor, on any device."""
        return cls(
            storage_key(tensor),
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
        )

    @property
    def form(self) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """What two tensors in different storages can have in common: shape, strides in elements, dtype."""
        return self.shape, self.stride, self.dtype


def storage_key(tensor: torch.Tensor) -> int:
    """Return what two tensors have in common exactly if they share a storage."""
    return tensor.untyped_storage()._cdata  # noqa: SLF001 (identity of the storage behind views)


def registered_slots(model: nn.Module) -> dict[str, Slot]:
    """Return parameters and buffers by name, each tensor under each of its names."""
    found: dict[str, Slot] = {}
    for prefix, module in model.named_modules():
        for registry in (module._parameters, module._buffers):  # noqa: SLF001 (where they hang)
            for key, tensor in registry.items():
                if tensor is not None:
                    found[_join(prefix, key)] = Slot(registry, key, registered=True)
    return found


def slots(model: nn.Module) -> dict[str, Slot]:
    """Return every live tensor once, by its first name: registered ones first, then plain attributes.

    An attribute that shares the storage of a registered tensor is that tensor.
    """
    found: dict[str, Slot] = {}
    seen: set[Geometry] = set()
    storages: set[int] = set()
    for name, slot in registered_slots(model).items():
        geometry = Geometry.of(slot.get())
        storages.add(geometry.storage)
        if geometry not in seen:
            seen.add(geometry)
            found[name] = slot
    for name, slot in _plain(model):
        geometry = Geometry.of(slot.get())
        if geometry.storage not in storages and geometry not in seen:
            seen.add(geometry)
            found[name] = slot
    return found


def values(found: Mapping[str, Slot]) -> dict[str, torch.Tensor]:
    """Return what hangs in the slots now, detached."""
    return {name: slot.get().detach() for name, slot in found.items()}


def _plain(model: nn.Module) -> Iterator[tuple[str, Slot]]:
    for prefix, module in model.named_modules():
        own = vars(module)
        for key, value in own.items():
            if key not in _REGISTRIES:
                yield from _inside(own, key, value, _join(prefix, key))


def _inside(owner: Any, key: Any, value: object, name: str) -> Iterator[tuple[str, Slot]]:
    """Yield a tensor, or those in a container; modules are walked by their own names."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            yield name, Slot(owner, key, registered=False)
    elif isinstance(value, dict):
        for inner, held in value.items():
            yield from _inside(value, inner, held, f"{name}.{inner}")
    elif isinstance(value, list | tuple):
        for index, held in enumerate(value):
            yield from _inside(value, index, held, f"{name}.{index}")


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
