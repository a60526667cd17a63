"""Live memory as a manifest and a binding describe it, read and written by address; digests of tensors."""

from __future__ import annotations

import ctypes
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from syncline.layout.dtype import itemsize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from syncline.layout.manifest import Manifest
    from syncline.layout.shard import Shard
    from syncline.memory.binding import Binding

    Raw = NDArray[Any]

_PATTERN = 0xA5


def at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Return uint8[nbytes], the memory of this process at an address; writing it writes that memory."""
    if nbytes == 0:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def shards_in(manifest: Manifest, binding: Binding) -> Iterator[tuple[Shard, Raw]]:
    """Yield every shard with a view of its elements in memory: raw, an axis for each axis of the nests."""
    addresses, sizes = binding.addresses().tolist(), manifest.storage_nbytes.tolist()
    for shard in manifest.shards():
        if shard.box.numel:
            storage = shard.view.storage
            yield shard, elements(shard, at(addresses[storage], sizes[storage]))


def elements(shard: Shard, storage: NDArray[np.uint8]) -> Raw:
    """Return a view of a shard's elements in its storage's bytes; each element is raw bytes of its size."""
    size = itemsize(shard.dtype)
    whole = storage[: len(storage) // size * size].view(f"V{size}")
    extents = [n for n, _ in shard.view.axes()]
    strides = [step * size for _, step in shard.view.axes()]
    return np.lib.stride_tricks.as_strided(whole[shard.view.offset :], extents, strides)


def part_of(shard: Shard, tensor: torch.Tensor) -> Raw:
    """Return the raw elements of a whole checkpoint tensor that a shard holds, shaped as `elements`."""
    cast = tensor.detach().to(getattr(torch, shard.dtype)).contiguous()
    raw = cast.view(-1).view(torch.uint8).numpy().view(f"V{itemsize(shard.dtype)}")
    box = tuple(slice(low, high) for low, high in zip(shard.box.offset, shard.box.end, strict=True))
    extents = [n for n, _ in shard.view.axes()]
    return raw.reshape(tuple(tensor.shape))[box].reshape(extents)


def poison(manifest: Manifest, binding: Binding) -> None:
    """Fill every element that an update must write with a pattern that no update sends."""
    for shard, live in shards_in(manifest, binding):
        live[...] = np.frombuffer(bytes([_PATTERN]) * itemsize(shard.dtype), live.dtype)[0]


def first_difference(manifest: Manifest, binding: Binding, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return where memory differs from checkpoint tensors, in words; None where it does not.

    Shards with declared transforms are left out.
    """
    for shard, live in shards_in(manifest, binding):
        if shard.transforms:
            continue
        wanted = part_of(shard, tensors[shard.name])
        if np.ascontiguousarray(live).tobytes() != np.ascontiguousarray(wanted).tobytes():
            differs = int((np.ascontiguousarray(live) != np.ascontiguousarray(wanted)).sum())
            return f"{differs} of {shard.box.numel} elements of {shard.name} in box {shard.box}"
    return None


def overlap(manifest: Manifest) -> str | None:
    """Return the name of a tensor whose shard lies over another one's in one storage; None: there is none."""
    by_storage: dict[int, list[Shard]] = {}
    for shard in manifest.shards():
        if shard.box.numel:
            by_storage.setdefault(shard.view.storage, []).append(shard)
    for storage, shards in by_storage.items():
        taken = np.zeros(int(manifest.storage_nbytes[storage]), np.uint8)
        for shard in shards:
            mine = np.zeros_like(taken)
            element = np.frombuffer(b"\x01" * itemsize(shard.dtype), f"V{itemsize(shard.dtype)}")[0]
            elements(shard, mine)[...] = element
            if int(mine.sum()) != shard.nbytes or bool((taken & mine).any()):
                return shard.name
            taken |= mine
    return None


def digest(tensor: torch.Tensor) -> bytes:
    """Return 16 bytes over a tensor's elements in their order."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return the digest of each tensor by name."""
    return {name: digest(tensor) for name, tensor in tensors.items()}
