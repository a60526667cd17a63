"""Layouts from torch tensors: plain ones, and DTensors by their mesh and placements.

Nothing is computed from a table of models: a DTensor's mesh and placements say which elements its local
tensor holds, and the local tensor's storage, offset and strides say where they are. torch's own
``compute_local_shape_and_global_offset`` gives one box where a ``_StridedShard`` has several, so boxes are
derived from the definition of the placements in `syncline.layout.placement`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from syncline.errors import LayoutError
from syncline.layout.box import Box
from syncline.layout.dtype import BY_NAME
from syncline.layout.manifest import Manifest
from syncline.layout.placement import Cut, Placed, place
from syncline.layout.shard import Shard
from syncline.layout.view import View

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.tensor.placement_types import Placement


class Storages:
    """Numbers torch storages in the order in which they are first seen; one storage has one number."""

    def __init__(self) -> None:
        self.listed: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage."""
        storage = tensor.untyped_storage()
        # the address of the StorageImpl: unlike data_ptr it tells empty and meta storages apart, and `listed`
        # keeps the storage alive, so that no other one can get this address
        key = storage._cdata  # noqa: SLF001
        if key not in self._numbers:
            self._numbers[key] = len(self.listed)
            self.listed.append(storage)
        return self._numbers[key]


def boxes_of_dtensor(tensor: DTensor, name: str | None = None) -> list[Placed]:
    """Return the boxes that this process holds of a DTensor, each with its place in the local tensor.

    Any number of mesh dimensions; uneven and empty shards; several boxes for one local tensor where
    placements are strided (FSDP2 over TP on one dimension, packed experts). Empty if this process holds no
    element.

    Raises:
        LayoutError: a placement that holds no elements of its own (Partial), an unknown one, or a local
            tensor whose shape contradicts the placements.
    """
    return _placed(tensor, local_of(tensor), name)


def _placed(tensor: DTensor, local: torch.Tensor, name: str | None) -> list[Placed]:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    cuts = [
        cut
        for axis in _mesh_order(tensor)
        if (cut := _cut(tensor.placements[axis], tensor, axis, coordinate[axis], name)) is not None
    ]
    return place(tuple(tensor.shape), cuts, tuple(local.shape), name)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor of this process behind a DTensor, or the tensor itself; of the same storage."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()


def shards_of(name: str, tensor: torch.Tensor, storages: Storages) -> list[Shard]:
    """Return the shards of one tensor of this process under a checkpoint name.

    A tensor of which this process holds no element yields one empty shard, so that its name, shape and dtype
    are known; a process outside of a DTensor's mesh yields none.

    Args:
        name: the checkpoint's name of the tensor.
        tensor: plain or DTensor, of any strides (0 as well), on any device; meta tensors give layouts too.
        storages: numbers the tensor's storage.

    Raises:
        LayoutError: as `boxes_of_dtensor`; or the tensor's elements are not simply in its storage (sparse,
            quantised, conjugated, another wrapper subclass), or its dtype is unknown.
    """
    local = local_of(tensor)
    _refuse_opaque(name, local)
    kind = _dtype_name(name, local)
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return []
        placed = _placed(tensor, local, name)
    else:
        placed = [Placed(Box.whole(shape), Box.whole(shape))] if local.numel() else []
    number, start, strides = storages.number(local), int(local.storage_offset()), local.stride()
    if not placed:
        nothing = (0,) * len(shape)
        return [Shard(name, shape, kind, Box.whole(nothing), View.contiguous(number, 0, nothing))]
    return [_shard(name, shape, kind, p, number, start, strides) for p in placed]


def manifest_of(tensors: Mapping[str, torch.Tensor]) -> tuple[Manifest, list[torch.UntypedStorage]]:
    """Return the manifest of this process and its storages, by their number in it.

    Storages are listed once however many tensors share them (tied weights, views of one buffer).

    Args:
        tensors: by checkpoint name, plain or DTensor.

    Raises:
        LayoutError: as `shards_of`, naming the tensor.
    """
    storages = Storages()
    shards = [shard for name, tensor in tensors.items() for shard in shards_of(name, tensor, storages)]
    return Manifest.from_shards(shards, [s.nbytes() for s in storages.listed]), storages.listed


def _shard(
    name: str,
    shape: tuple[int, ...],
    kind: str,
    placed: Placed,
    storage: int,
    start: int,
    strides: tuple[int, ...],
) -> Shard:
    offset = start + sum(at * step for at, step in zip(placed.local.offset, strides, strict=True))
    return Shard(name, shape, kind, placed.box, View.simple(storage, offset, placed.box.size, strides))


def _mesh_order(tensor: DTensor) -> list[int]:
    """Return the mesh dimensions in the order in which they cut the tensor."""
    order = list(range(tensor.device_mesh.ndim))
    # newer torch can shard a dimension over mesh dimensions in another order and keeps that order in the spec
    entries = getattr(tensor._spec, "shard_order", None)  # noqa: SLF001
    for entry in entries or ():
        places = sorted(entry.mesh_dims)
        for at, axis in zip(places, entry.mesh_dims, strict=True):
            order[at] = axis
    return order


def _cut(placement: Placement, tensor: DTensor, axis: int, index: int, name: str | None) -> Cut | None:
    parts = tensor.device_mesh.size(axis)
    if parts == 1 or isinstance(placement, Replicate):
        return None
    if isinstance(placement, _StridedShard):
        return Cut(placement.dim % tensor.ndim, parts, index, int(placement.split_factor))
    if isinstance(placement, ShardPlacement):
        return Cut(placement.dim % tensor.ndim, parts, index)
    raise LayoutError(
        f"a DTensor with the placement {placement} holds no elements that could be sent or received",
        tensor=name,
        expected="Replicate, Shard or _StridedShard on every mesh dimension",
        found=tensor.placements,
        hint="redistribute it before it is published",
    )


def _dtype_name(name: str, local: torch.Tensor) -> str:
    found = str(local.dtype).removeprefix("torch.")
    if found not in BY_NAME:
        raise LayoutError(
            "a dtype that syncline does not know", tensor=name, expected=", ".join(BY_NAME), found=found
        )
    return found


def _refuse_opaque(name: str, local: torch.Tensor) -> None:
    why = None
    if local.layout != torch.strided:
        why = f"its layout is {local.layout}"
    elif local.is_quantized:
        why = "it is a quantised tensor with parameters of its own"
    elif local.is_conj() or local.is_neg():
        why = "it is a lazily conjugated or negated view"
    elif is_traceable_wrapper_subclass(local):
        why = f"it is a {type(local).__name__}, which wraps other tensors"
    if why is not None:
        raise LayoutError(
            f"the tensor's values are not simply in its storage: {why}",
            tensor=name,
            expected="a strided tensor, or a DTensor of one",
            found=type(local).__name__,
        )
