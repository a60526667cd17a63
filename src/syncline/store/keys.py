"""Keys of a table, and the boxes that a key and a tensor stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from syncline.errors import LayoutError
from syncline.layout import Box, Shard, View
from syncline.layout.dtensor import boxes_of_dtensor, local_of
from syncline.layout.placement import Placed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncline.layout.dtensor import Storages


@dataclass(frozen=True, slots=True)
class ShardedKey:
    """A box of a tensor: its sizes are those of the tensor that is put, or filled.

    Attributes:
        name: of the whole tensor.
        global_shape: of the whole tensor.
        global_offset: where the box's first element stands in it.
    """

    name: str
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]


Key = str | ShardedKey
"""A name alone means all of a plain tensor, or the boxes that a DTensor's placements give this process."""


def local_part(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain CPU tensor of this process behind a value.

    Raises:
        LayoutError: it is not in host memory.
    """
    local = local_of(tensor)
    if local.device.type != "cpu" or local.layout != torch.strided:
        raise LayoutError(
            "a table holds dense tensors in host memory",
            tensor=name,
            expected="a strided CPU tensor",
            found=f"{local.layout} on {local.device}",
        )
    return local


def shards(key: Key, tensor: torch.Tensor, memory: torch.Tensor, storages: Storages) -> list[Shard]:
    """Return the shards of a value whose elements lie in ``memory``.

    Args:
        key: what the value is called.
        tensor: the value: plain, or a DTensor under a plain name.
        memory: a tensor of the value's local shape: itself, or a copy of any strides.
        storages: numbers the memory's storage.

    Raises:
        LayoutError: the key does not fit the tensor.
    """
    name, shape, placed = _placed(key, tensor)
    number, start, strides = storages.number(memory), int(memory.storage_offset()), memory.stride()
    dtype = str(memory.dtype).removeprefix("torch.")
    return [_shard(name, shape, dtype, one, number, start, strides) for one in placed]


def _placed(key: Key, tensor: torch.Tensor) -> tuple[str, tuple[int, ...], list[Placed]]:
    local = local_of(tensor)
    if isinstance(key, ShardedKey):
        if local is not tensor and type(tensor) is not torch.Tensor and hasattr(tensor, "placements"):
            raise LayoutError(
                "a DTensor says itself where it lies", tensor=key.name, expected="a plain name", found=key
            )
        box = Box(key.global_offset, tuple(local.shape))
        if len(key.global_shape) != len(key.global_offset) or not Box.whole(key.global_shape).contains(box):
            raise LayoutError(
                "a key whose box lies outside its tensor",
                tensor=key.name,
                expected=f"a box within {key.global_shape}",
                found=box,
            )
        return key.name, key.global_shape, [Placed(box, Box.whole(tuple(local.shape)))]
    shape = tuple(tensor.shape)
    if hasattr(tensor, "placements"):
        return key, shape, boxes_of_dtensor(tensor, key)  # pyright: ignore[reportArgumentType]
    return key, shape, [Placed(Box.whole(shape), Box.whole(shape))]


def _shard(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    placed: Placed,
    number: int,
    start: int,
    strides: Sequence[int],
) -> Shard:
    offset = start + sum(at * step for at, step in zip(placed.local.offset, strides, strict=True))
    view = View.simple(number, offset, placed.box.size, tuple(strides))
    return Shard(name, shape, dtype, placed.box, view)
