"""Live tensors in memory that other processes can map: which tensors share a storage, and where they went."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from syncline.adapters.modules import Cell, local_part
from syncline.errors import AdapterError
from syncline.memory.adopt import Adoption
from syncline.memory.storages import storage_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from syncline.adapters.modules import Tree
    from syncline.memory.region import Region


class SharedTensors:
    """Moves the storages of live tensors, in place, into memory that can be handed out by descriptor.

    Every tensor known to lie in such a storage moves along: the parameter, its local part, FSDP2's padded
    flat shard behind it, second names, buffers.

    Args:
        tree: the walked model.
        names: the live tensors that must be shared; the first of a storage is its truth if aliases part.

    Raises:
        MemoryBudgetError: before anything moved.
        AdapterError: tensors that are not in host memory.
    """

    def __init__(self, tree: Tree, names: Sequence[str]) -> None:
        self._cells, self._names = _groups(tree, names)
        self._adoption = Adoption(self._tensors(), self._names)
        self._renewed = 0  # generation of the regions: grows with every new arena

    @property
    def generation(self) -> int:
        """Grows whenever a tensor was brought back, or all were moved anew."""
        return self._renewed + self._adoption.generation

    @property
    def descriptors(self) -> dict[int, int]:
        """A read-only descriptor of each region by its id; they stay owned by this object."""
        return self._adoption.descriptors()

    @property
    def regions(self) -> dict[int, Region]:
        """The regions by id."""
        regions = self._adoption.regions
        return {key: replace(r, generation=r.generation + self._renewed) for key, r in regions.items()}

    def bring_back(self) -> None:
        """Move back whatever left since (an offload and reload)."""
        with suppress(AdapterError):  # other aliases than before: everything moves into a new arena instead
            self._adoption.readopt(self._tensors())
            return
        before = self.generation
        old = self._adoption
        self._adoption = Adoption(self._tensors(), self._names)
        self._renewed = before
        old.close()

    def locate(self, addresses: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the region and the offset in it of each address, int32[S] and int64[S].

        Raises:
            AdapterError: an address outside of all regions.
        """
        regions = sorted(self._adoption.regions.values(), key=lambda r: r.ptr)
        starts = np.array([r.ptr for r in regions], np.int64)
        ends = np.array([r.ptr + r.nbytes for r in regions], np.int64)
        ids = np.array([r.id for r in regions], np.int32)
        slot = np.clip(np.searchsorted(starts, addresses, side="right") - 1, 0, None)
        inside = (addresses >= starts[slot]) & (addresses < ends[slot])
        empty = addresses == 0  # storages without a byte lie nowhere
        if not bool((inside | empty).all()):
            raise AdapterError(
                "a live tensor is not in shared memory",
                expected="all storages in the arena",
                found=f"{int((~inside & ~empty).sum())} outside",
                hint="call share() again",
            )
        return np.where(empty, ids[0], ids[slot]), np.where(empty, 0, addresses - starts[slot])

    def _tensors(self) -> list[list[Tensor]]:
        return [[local_part(cell.get()) for cell in group] for group in self._cells]


def _groups(tree: Tree, names: Sequence[str]) -> tuple[list[list[Cell]], list[str]]:
    """Return the cells of each storage, the truth first, and the name of each storage's first tensor."""
    order = dict.fromkeys((*names, *tree.state, *tree.local))
    cells = tree.state | tree.local
    groups: dict[int, list[Cell]] = {}
    first: dict[int, str] = {}
    wanted = set(names)
    for name in order:
        part = local_part(cells[name].get())
        key = storage_id(part)
        if name in wanted:
            first.setdefault(key, name)
        if key not in first:
            continue
        groups.setdefault(key, []).append(cells[name])
        if (record := tree.fsdp.get(name)) is not None:
            groups[key].append(Cell(record.__dict__, "_sharded_param_data"))
    return list(groups.values()), [first[key] for key in groups]
