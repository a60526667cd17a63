"""The live tensors of a Megatron rank whose checkpoint boxes were learned: their manifest."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from syncline.adapters.live import LiveTensors
from syncline.adapters.transformers_names import CheckpointNames
from syncline.layout.box import Box
from syncline.layout.export import Part, Source, dtype_name
from syncline.layout.manifest import Manifest
from syncline.layout.shard import Shard
from syncline.layout.view import View, row_major

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from syncline.adapters.megatron.trace import Held
    from syncline.adapters.modules import Tree


class HeldTensors(LiveTensors):
    """Live tensors, and the boxes of checkpoint tensors that lie in them.

    Args:
        tree: the walked chunks.
        held: what was learned.
        rank: who this is, for errors.
    """

    def __init__(self, tree: Tree, held: Iterable[Held], rank: object) -> None:
        self.held = tuple(held)
        names = dict.fromkeys(one.live for one in self.held)
        sources = {name: _itself(name, tree.state[name].get()) for name in names}
        super().__init__(tree, CheckpointNames(sources, {}, frozenset()), rank)

    @cached_property
    def manifest(self) -> Manifest:
        """What this process holds, in checkpoint names."""
        where = {
            name: (int(storage), int(inside) // int(item))
            for name, storage, inside, item in zip(
                self.names, self._storage, self._inside, self._itemsize, strict=True
            )
        }
        shards = []
        for one in self.held:
            storage, start = where[one.live]
            view = View(storage, start + one.view.offset, one.view.shape, one.view.stride)
            shards.append(Shard(one.name, one.shape, one.dtype, one.box, view))
        return Manifest.from_shards(shards, self._nbytes.tolist())


def _itself(name: str, tensor: torch.Tensor) -> Source:
    shape = tuple(tensor.shape)
    return Source(name, shape, dtype_name(tensor.dtype), (Part(name, 0, Box.whole(shape), row_major(shape)),))
