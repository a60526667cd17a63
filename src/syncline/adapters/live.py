"""The live tensors of one process as a manifest, and where they lie now.

Storages of the manifest are the disjoint byte ranges that live tensors cover, not torch's storages: the
manifest is the same before and after tensors moved into one arena, or out of one flat buffer.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from syncline.adapters.modules import local_part
from syncline.errors import AdapterError, LayoutError
from syncline.layout.dtensor import Storages, shards_of
from syncline.layout.export import compose
from syncline.layout.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from syncline.adapters.modules import Tree
    from syncline.adapters.transformers_names import CheckpointNames
    from syncline.layout.shard import Shard

_dtype = operator.attrgetter("dtype")


class LiveTensors:
    """The synced live tensors of one process.

    Args:
        tree: the walked model.
        names: its checkpoint form.
        rank: who this is, for errors.
    """

    def __init__(self, tree: Tree, names: CheckpointNames, rank: object) -> None:
        self._tree, self._rank = tree, rank
        self.names = tuple(dict.fromkeys(p.live for source in names.sources.values() for p in source.parts))
        self._cells = [tree.state[name] for name in self.names]
        sharded = (cell.get() is not local_part(cell.get()) for cell in self._cells)
        self._owners, self._keys = [c.owner for c in self._cells], [c.key for c in self._cells]
        self._sharded = [i for i, flag in enumerate(sharded) if flag]
        parts = self.parts()
        self._dtypes = [part.dtype for part in parts]
        self._shapes = [part.shape for part in parts]
        self._strides = [part.stride() for part in parts]
        self._empty = np.array([part.numel() == 0 for part in parts], bool)
        itemsize = np.array([part.element_size() for part in parts], np.int64)
        spans = np.array([_span(part) for part in parts], np.int64) * itemsize
        self._storage, self._inside, self._nbytes = group_ranges(_pointers(parts), spans)
        self._first = first_members(self._storage, self._empty, len(self._nbytes))
        self._sources, self._itemsize = names.sources, itemsize
        self._seen: tuple[list[int], list[int], NDArray[np.int64]] | None = None

    def parts(self) -> list[torch.Tensor]:
        """Return this process's parts of the live tensors, in the order of ``names``."""
        try:
            parts = list(map(operator.getitem, self._owners, self._keys))
            for i in self._sharded:
                parts[i] = parts[i]._local_tensor  # noqa: SLF001
        except (AttributeError, KeyError) as error:
            raise AdapterError(
                "a parameter is gone, or no DTensor any more",
                expected="the sharding it had when the adapter was made",
                found=error,
                rank=self._rank,
                hint="make a new adapter for the changed model",
            ) from error
        return parts

    @cached_property
    def manifest(self) -> Manifest:
        """What this process holds, in checkpoint names."""
        live: dict[str, list[Shard]] = {}
        for i, (name, cell) in enumerate(zip(self.names, self._cells, strict=True)):
            live[name] = self._shards(i, name, cell.get())
        shards = [shard for source in self._sources.values() for shard in compose(source, live)]
        return Manifest.from_shards(shards, self._nbytes.tolist())

    def _shards(self, index: int, name: str, tensor: torch.Tensor) -> list[Shard]:
        part = local_part(tensor)
        try:
            found = shards_of(name, tensor, Storages())
        except LayoutError as error:
            if part.numel():
                raise
            raise AdapterError(
                "a parameter has no elements here: its weights are offloaded",
                expected=error.expected,
                found=error.found,
                rank=self._rank,
                tensor=name,
                hint="load the weights back before the adapter's manifest is first needed",
            ) from error
        storage = int(self._storage[index])
        shift = int(self._inside[index] // self._itemsize[index]) - part.storage_offset()
        return [
            replace(s, view=replace(s.view, storage=storage, offset=s.view.offset + shift)) for s in found
        ]

    def addresses(self) -> NDArray[np.int64]:
        """Check every live tensor and return the address of each storage's first byte, int64[S].

        As long as nothing moved, it is the same array. Compared at every call are the tensors' identities,
        addresses and dtypes (no line of Python runs for each: twenty thousand take some 10 ms); shapes and
        strides where one of these changed.

        Raises:
            AdapterError: a module was replaced; a tensor changed its dtype, shape or strides, has no memory,
                or left the tensors with which it shared memory.
        """
        self._tree.check_links()
        parts = self.parts()
        dtypes = list(map(_dtype, parts))
        if dtypes != self._dtypes:
            self._refuse("dtype", dtypes, self._dtypes)
        seen = list(map(torch.Tensor.data_ptr, parts))
        if self._seen is not None:
            old, identities, base = self._seen
            if seen == old and list(map(id, parts)) == identities:
                return base
        base = self._checked(parts, np.array(seen, np.int64))
        self._seen = seen, list(map(id, parts)), base  # no references: an offload must free what it leaves
        return base

    def _checked(self, parts: list[torch.Tensor], pointers: NDArray[np.int64]) -> NDArray[np.int64]:
        if [part.shape for part in parts] != self._shapes:
            self._refuse("shape", [tuple(p.shape) for p in parts], [tuple(s) for s in self._shapes])
        if [part.stride() for part in parts] != self._strides:
            self._refuse("strides", [part.stride() for part in parts], self._strides)
        gone = (pointers == 0) & ~self._empty
        if gone.any():
            raise AdapterError(
                "a parameter has no memory now",
                expected="resident weights",
                found="offloaded",
                rank=self._rank,
                tensor=self.names[int(np.flatnonzero(gone)[0])],
                hint="load the weights back before publish",
            )
        start = pointers - self._inside
        base = np.where(self._first >= 0, start[self._first], 0) if len(start) else np.zeros(0, np.int64)
        apart = (base[self._storage] != start) & ~self._empty
        if apart.any():
            raise AdapterError(
                "tensors that shared memory were torn apart",
                expected="the same offsets in one storage",
                rank=self._rank,
                tensor=self.names[int(np.flatnonzero(apart)[0])],
                hint="make a new adapter for the changed model",
            )
        return base

    def name_of(self, storage: int) -> str:
        """Return the live name of the first tensor in a storage of the manifest."""
        return self.names[int(np.flatnonzero(self._storage == storage)[0])]

    def _refuse(self, what: str, found: Sequence[object], expected: Sequence[object]) -> None:
        index = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        raise AdapterError(
            f"a live tensor changed its {what}",
            expected=expected[index],
            found=found[index],
            rank=self._rank,
            tensor=self.names[index],
            hint="the manifest holds one dtype and shape for each tensor: make a new adapter",
        )


def _span(part: torch.Tensor) -> int:
    """Return the number of elements from a tensor's first to one behind its last."""
    if part.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(part.shape, part.stride(), strict=True))


def _pointers(parts: Sequence[torch.Tensor]) -> NDArray[np.int64]:
    return np.array(list(map(torch.Tensor.data_ptr, parts)), np.int64)


def group_ranges(
    start: NDArray[np.int64], nbytes: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Merge overlapping byte ranges.

    Args:
        start: int64[N] addresses; ranges at address 0 have no memory yet and stay alone.
        nbytes: int64[N]; empty ranges stay alone too.

    Returns:
        int32[N], the group of each range, numbered in the order of their first members; int64[N], each
        range's offset in its group; int64[G], the groups' sizes.
    """
    n = len(start)
    alone = (start == 0) | (nbytes == 0)
    low = np.where(alone, 0, start)
    order = np.argsort(low, kind="stable")
    low, high = low[order], np.where(alone, 0, start + nbytes)[order]
    reach = np.maximum.accumulate(high) if n else high
    opens = np.ones(n, bool)
    opens[1:] = (low[1:] >= reach[:-1]) | alone[order][1:]
    label = np.cumsum(opens) - 1
    group = np.empty(n, np.int64)
    group[order] = label
    # numbers must not depend on addresses: equal processes have equal manifests
    first = np.full(int(label[-1]) + 1 if n else 0, n, np.int64)
    np.minimum.at(first, group, np.arange(n))
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    group = rank[group]
    base = np.full(len(first), np.iinfo(np.int64).max, np.int64)
    np.minimum.at(base, group, start)
    inside = start - base[group] if n else np.zeros(0, np.int64)
    sizes = np.zeros(len(first), np.int64)
    np.maximum.at(sizes, group, inside + nbytes)
    return group.astype(np.int32), inside, sizes


def first_members(group: NDArray[np.int32], empty: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
    """Return for each group its first range that has memory; -1 where it has none."""
    first = np.full(count, len(group), np.int64)
    index = np.flatnonzero(~empty)
    np.minimum.at(first, group[index], index)
    return np.where(first == len(group), -1, first)


def live_names_of(names: CheckpointNames, tree: Tree) -> Mapping[str, tuple[str, ...]]:
    """Return for each live name of the state the checkpoint names whose elements it holds."""
    found: dict[str, list[str]] = {name: [] for name in tree.state}
    for name, source in names.sources.items():
        for part in source.parts:
            found[part.live].append(name)
    return {name: tuple(dict.fromkeys(listed)) for name, listed in found.items()}
