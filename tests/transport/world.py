"""Random models cut in random ways: writers' live memory in a memfd, readers' in guarded private buffers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from syncline.kernels.reference import digest_elements
from syncline.layout import Box, Layout, Manifest, Rules, Shard, View
from syncline.memory.arena import Arena
from syncline.memory.binding import Binding
from syncline.plan import Plan, plan

if TYPE_CHECKING:
    from syncline.memory.region import Region

GUARD = 0xA5
CASTABLE = {"float32": "bfloat16", "bfloat16": "float32", "float64": "float32", "float16": "float32"}
ALIGN = 64


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Return finite random values whose bits are as mixed as the dtype allows."""
    torch_dtype = getattr(torch, dtype)
    if torch_dtype.is_floating_point:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float64)).to(torch_dtype)
    return torch.from_numpy(rng.integers(0, 100, shape)).to(torch_dtype)


@dataclass
class Held:
    """One shard of one rank: its whole buffer, and the box that lies strided in it."""

    shard: Shard
    buffer: torch.Tensor
    view: torch.Tensor


@dataclass
class Rank:
    """One process's memory. A writer's storages lie in one memfd, a reader's in buffers of their own."""

    held: list[Held]
    manifest: Manifest
    binding: Binding
    arena: Arena | None = None

    @property
    def fd(self) -> int | None:
        return None if self.arena is None else self.arena.fd

    @property
    def region(self) -> Region:
        return next(iter(self.binding.regions.values()))

    def moved(self) -> Rank:
        """Return a reader rank with the same contents at other addresses, under the next generation."""
        held = [_rehome(h) for h in self.held]
        addresses = [h.buffer.data_ptr() for h in held]
        binding = Binding.private(self.manifest.fingerprint, addresses, self.binding.generation + 1)
        return Rank(held, self.manifest, binding)

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()


def _rehome(held: Held) -> Held:
    buffer = held.buffer.view(torch.uint8).clone().view(held.buffer.dtype)
    view = buffer.as_strided(held.view.shape, held.view.stride(), held.view.storage_offset())
    return Held(held.shard, buffer, view)


def cut(rng: np.random.Generator, shape: tuple[int, ...], ranks: int, how: str) -> list[list[Box]]:
    """Return the boxes of each rank: ``whole`` (replicas), or uneven cuts along one dimension or two."""
    if how == "whole" or not shape or ranks == 1:
        return [[Box.whole(shape)] for _ in range(ranks)]
    dim = int(rng.integers(len(shape)))
    edges = np.sort(rng.integers(0, shape[dim] + 1, ranks - 1)).tolist()
    boxes: list[list[Box]] = []
    for low, high in zip([0, *edges], [*edges, shape[dim]], strict=True):
        offset, size = [0] * len(shape), list(shape)
        offset[dim], size[dim] = low, high - low
        boxes.append([Box(tuple(offset), tuple(size))] if high > low else [])
    if how == "grid" and len(shape) > 1:
        other = (dim + 1) % len(shape)
        boxes = [[half for box in own for half in _halves(box, other)] for own in boxes]
    return boxes


def _halves(box: Box, dim: int) -> list[Box]:
    middle = box.size[dim] // 2
    if not 0 < middle < box.size[dim]:
        return [box]
    first, second = list(box.size), list(box.size)
    first[dim], second[dim] = middle, box.size[dim] - middle
    offset = list(box.offset)
    offset[dim] += middle
    return [Box(box.offset, tuple(first)), Box(tuple(offset), tuple(second))]


def hold(
    rng: np.random.Generator, storage: int, name: str, shape: tuple[int, ...], dtype: str, box: Box
) -> Held:
    """Return a shard in a guarded buffer: contiguous, or padded on all sides, or transposed."""
    size = box.size
    pads = (
        [(int(rng.integers(0, 3)), int(rng.integers(0, 3))) for _ in size]
        if rng.random() < 0.7
        else [(0, 0)] * len(size)
    )
    order = rng.permutation(len(size)).tolist() if rng.random() < 0.4 else list(range(len(size)))
    outer = [size[d] + sum(pads[d]) for d in order]
    torch_dtype = getattr(torch, dtype)
    lead = int(rng.integers(0, 5))
    count = lead + int(np.prod(outer, dtype=np.int64)) + int(rng.integers(0, 5))
    buffer = torch.full((max(count, 1) * torch_dtype.itemsize,), GUARD, dtype=torch.uint8).view(torch_dtype)
    strides = [0] * len(size)
    step = 1
    for d, extent in zip(reversed(order), reversed(outer), strict=True):
        strides[d] = step
        step *= extent
    offset = lead + sum(pads[d][0] * strides[d] for d in range(len(size)))
    view = buffer.as_strided(size, strides, offset)
    shard = Shard(name, shape, dtype, box, View.simple(storage, offset, size, strides))
    return Held(shard, buffer, view)


def make_rank(
    rng: np.random.Generator,
    boxes: dict[str, list[Box]],
    shapes: dict[str, tuple[int, ...]],
    dtypes: dict[str, str],
) -> list[Held]:
    held: list[Held] = []
    for name, own in boxes.items():
        for box in own:
            held.append(hold(rng, len(held), name, shapes[name], dtypes[name], box))
    return held


def manifest_of(held: list[Held]) -> Manifest:
    return Manifest.from_shards([h.shard for h in held], [h.buffer.nbytes for h in held])


def private_rank(held: list[Held]) -> Rank:
    manifest = manifest_of(held)
    return Rank(held, manifest, Binding.private(manifest.fingerprint, [h.buffer.data_ptr() for h in held]))


def shared_rank(held: list[Held], region_id: int = 1, generation: int = 1) -> Rank:
    """Move a rank's buffers into one memfd, as an arena does."""
    offsets, total = [], 0
    for h in held:
        offsets.append(total)
        total += -(-h.buffer.nbytes // ALIGN) * ALIGN
    total = max(total, 4096)
    arena = Arena(total, "test", region_id)
    arena.reserve(0, arena.nbytes)
    homes = []
    for h, offset in zip(held, offsets, strict=True):
        buffer = arena.storage(offset, h.buffer.nbytes).view(h.buffer.dtype)
        buffer.copy_(h.buffer)
        view = buffer.as_strided(h.view.shape, h.view.stride(), h.view.storage_offset())
        homes.append(Held(h.shard, buffer, view))
    manifest = manifest_of(homes)
    region = replace(arena.region, generation=generation)
    where = np.full(len(held), region_id), np.array(offsets, np.int64)
    binding = Binding(manifest.fingerprint, generation, *where, {region_id: region})
    return Rank(homes, manifest, binding, arena)


@dataclass
class World:
    """A model, its writers' ranks, and one reader instance's ranks."""

    tensors: dict[str, torch.Tensor]
    wire: dict[str, str]
    writers: list[Rank]
    readers: list[Rank]
    plan: Plan
    casts: bool

    @classmethod
    def random(
        cls,
        seed: int,
        *,
        writers: int = 2,
        readers: int = 2,
        tensors: int = 6,
        largest: int = 40,
        casts: bool = True,
    ) -> World:
        rng = np.random.default_rng(seed)
        kinds = ["float32", "bfloat16", "float16", "float64", "int64", "int8", "uint8", "bool"]
        model: dict[str, torch.Tensor] = {}
        dtypes: dict[str, str] = {}
        for i in range(tensors):
            ndim = int(rng.integers(0, 4))
            shape = tuple(int(n) for n in rng.integers(1, largest, ndim))
            dtype = str(rng.choice(kinds))
            name = f"layer.{i}.weight"
            model[name], dtypes[name] = random_tensor(rng, shape, dtype), dtype
        wire = {
            name: CASTABLE[dtype] if casts and dtype in CASTABLE and rng.random() < 0.5 else dtype
            for name, dtype in dtypes.items()
        }
        return cls.build(rng, model, dtypes, wire, writers, readers, casts=casts)

    @classmethod
    def build(
        cls,
        rng: np.random.Generator,
        model: dict[str, torch.Tensor],
        dtypes: dict[str, str],
        wire: dict[str, str],
        writers: int,
        readers: int,
        *,
        casts: bool = False,
        how: str | None = None,
    ) -> World:
        shapes = {name: tuple(t.shape) for name, t in model.items()}

        def side(ranks: int) -> list[dict[str, list[Box]]]:
            cuts = {
                n: cut(rng, s, ranks, how or str(rng.choice(["whole", "cut", "grid"])))
                for n, s in shapes.items()
            }
            return [{n: cuts[n][r] for n in shapes} for r in range(ranks)]

        sources = [shared_rank(make_rank(rng, boxes, shapes, dtypes)) for boxes in side(writers)]
        targets = [private_rank(make_rank(rng, boxes, shapes, wire)) for boxes in side(readers)]
        rules = Rules(casts="reader") if casts else Rules()
        made = plan(
            Layout(tuple(r.manifest for r in sources), ("host",) * writers),
            {"serve": Layout(tuple(r.manifest for r in targets), ("host",) * readers)},
            rules,
        )
        world = cls(model, wire, sources, targets, made, casts)
        world.publish()
        return world

    def publish(self) -> None:
        """Write the model into the writers' live memory."""
        for rank in self.writers:
            for h in rank.held:
                h.view.copy_(self.box_of(h.shard))

    def change(self, seed: int) -> None:
        """Take an optimizer step, so to speak."""
        rng = np.random.default_rng(seed)
        for name, tensor in self.tensors.items():
            self.tensors[name] = random_tensor(
                rng, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            )
        self.publish()

    def box_of(self, shard: Shard) -> torch.Tensor:
        index = tuple(slice(o, o + s) for o, s in zip(shard.box.offset, shard.box.size, strict=True))
        return self.tensors[shard.name][index]

    def check_reader(self, rank: int, held: list[Held] | None = None) -> None:
        """Every element as published, cast; every byte around it as it was."""
        for h in self.readers[rank].held if held is None else held:
            expected = torch.full_like(h.buffer.view(torch.uint8), GUARD).view(h.buffer.dtype)
            where = expected.as_strided(h.view.shape, h.view.stride(), _offset(h))
            where.copy_(self.box_of(h.shard).to(h.buffer.dtype))
            same = torch.equal(h.buffer.view(torch.uint8), expected.view(torch.uint8))
            assert same, f"{h.shard.name} of reader {rank} is wrong"

    def untouched(self, rank: int) -> bool:
        return all(bool((h.buffer.view(torch.uint8) == GUARD).all()) for h in self.readers[rank].held)

    def digest(self, tensor: int, offset: np.ndarray, size: np.ndarray, dtype: str) -> int:
        """Return the reference digest of a box in the wire dtype, row by row."""
        name = self.plan.names[tensor]
        value = self.tensors[name].to(getattr(torch, dtype)).contiguous()
        flat = value.reshape(-1)
        ndim = value.dim()
        if ndim == 0:
            return digest_elements(_bits(flat), 0)
        low, count = offset[:ndim].tolist(), size[:ndim].tolist()
        total = 0
        strides = value.stride()
        for index in np.ndindex(*count[:-1]):
            start = (
                sum((lo + i) * s for lo, i, s in zip(low[:-1], index, strides[:-1], strict=True)) + low[-1]
            )
            total += digest_elements(_bits(flat[start : start + count[-1]]), start)
        return total % 2**64

    def close(self) -> None:
        for rank in self.writers:
            rank.close()


def _offset(held: Held) -> int:
    return held.shard.view.offset


def _bits(tensor: torch.Tensor) -> np.ndarray:
    width = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[tensor.dtype.itemsize]
    return tensor.contiguous().view(torch.uint8).numpy().view(width)
