"""Who uses a storage: counting the references of torch's storage objects.

A storage object is shared by all tensors on it, and counts its references: one for each tensor object, and
one for the Python wrapper that `untyped_storage` returns (one wrapper a storage, however often it is asked
for). Not counted one by one, and therefore looked at here:

- several Python names of one tensor object are one reference, and re-pointing that object serves them all;
- a view keeps its base (``_base``) alive, an alias that no Python name may lead to: they join the aliases;
- a Python wrapper that someone keeps would part from the tensors silently: it counts as an unknown user;
- a numpy array of a tensor: a reference in some versions of torch, nothing but a flag (the storage is no
  longer resizable) in others. `_numpy_is_counted` finds out which.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def aliases_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the distinct tensor objects of a group, with the bases of those that are views, in order."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        found.setdefault(id(tensor), tensor)
        base = tensor._base  # noqa: SLF001 -- public in all but its name, and documented
        if base is not None:
            found.setdefault(id(base), base)
    return list(found.values())


def storage_id(tensor: Tensor) -> int:
    """Return what two tensors have in common exactly if they share a storage object."""
    return tensor.untyped_storage()._cdata  # noqa: SLF001 -- what torch's own serialisation tells storages apart by


def whole(tensor: Tensor) -> Tensor:
    """Return uint8 over all bytes of the tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def has_unknown_users(aliases: Sequence[Tensor]) -> bool:
    """Whether something besides these tensors (all objects on one storage, see `aliases_of`) uses it.

    Where torch cannot tell, the answer is True: sharing a storage in place is right for any number of users.
    """
    count = _use_count()
    if count is None:
        return True
    users, names = _users(aliases[0], count)
    extra_users, extra_names = _calibration()
    return users - len(aliases) > extra_users or names > extra_names


def lent_uncounted(aliases: Sequence[Tensor]) -> bool:
    """Whether numpy may view the storage without being counted: its old memory must then stay alive."""
    return not _numpy_is_counted() and not aliases[0].untyped_storage().resizable()


def _use_count() -> Callable[[int], int] | None:
    return getattr(torch._C, "_storage_Use_Count", None)  # noqa: SLF001 -- torch has no public way


def _users(tensor: Tensor, count: Callable[[int], int]) -> tuple[int, int]:
    """Return references to the storage object and to its Python wrapper while this function holds one."""
    storage = tensor.untyped_storage()
    return count(storage._cdata), sys.getrefcount(storage)  # noqa: SLF001 -- the counter takes this pointer


@cache
def _calibration() -> tuple[int, int]:
    """Measure what `_users` reports beyond the tensors, on a storage whose users are known: two tensors."""
    count = _use_count()
    if count is None:
        return 0, 0
    first = torch.zeros(2)
    second = first[1:]
    users, names = _users(first, count)
    return users - len((first, second)), names


@cache
def _numpy_is_counted() -> bool:
    count = _use_count()
    if count is None:
        return False
    tensor = torch.zeros(2)
    before, _ = _users(tensor, count)
    array = tensor.numpy()
    after, _ = _users(tensor, count)
    return after > before and array is not None
