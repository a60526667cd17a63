"""Who holds what in the many-to-many case: layouts over the GPUs of one host, sized to their memory."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.plan_layouts import engine, megatron, packed
from benchmarks.plan_presets import MODELS, Model
from syncline.layout import Layout
from syncline.plan import plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from syncline.layout import Manifest
    from syncline.plan import Plan

    I64 = NDArray[np.int64]

INSTANCE = "serve"
TINY = "tiny"
SHAPES = {**MODELS, TINY: Model(2, 16, 96, 4, 2, 8, 8, 16)}
"""``tiny`` is for fake devices."""
_SHIFTS = 4_000_037
_RESERVE = 6 << 30
_SHARE = 0.9


@dataclass(frozen=True)
class Case:
    """A trainer over some GPUs and an engine over some.

    Attributes:
        model: a key of `SHAPES`; layers: so many of its layers.
        trainer: ``FSDP``, or ``EP``: experts dealt, all else held by every rank.
        engine: ``TP``, or ``EP``: experts and vocabulary dealt, all else held by every rank.
        writer_gpus, reader_gpus: the GPU of each rank.
    """

    model: str
    layers: int
    trainer: str
    engine: str
    writer_gpus: tuple[int, ...]
    reader_gpus: tuple[int, ...]

    @property
    def colocated(self) -> bool:
        """Whether trainer and engine share their GPUs."""
        return bool(set(self.writer_gpus) & set(self.reader_gpus))

    @property
    def name(self) -> str:
        """The layout in words."""
        where = "colocated" if self.colocated else "split"
        ends = f"{self.trainer}{len(self.writer_gpus)} to {self.engine}{len(self.reader_gpus)}"
        return f"{self.model} {ends}, {where}"

    def manifests(self) -> tuple[tuple[Manifest, ...], tuple[Manifest, ...]]:
        """Return those of the trainer's ranks, and of the engine's."""
        return _manifests(self)

    def plan(self) -> Plan:
        """Return the plan; all ranks are on one host."""
        sides = [Layout(m, ("host",) * len(m)) for m in self.manifests()]
        return plan(sides[0], {INSTANCE: sides[1]})

    def nbytes(self) -> dict[int, int]:
        """Return by GPU the bytes that its ranks hold."""
        found: dict[int, int] = {}
        for gpus, manifests in zip((self.writer_gpus, self.reader_gpus), self.manifests(), strict=True):
            for gpu, manifest in zip(gpus, manifests, strict=True):
                found[gpu] = found.get(gpu, 0) + int(manifest.storage_nbytes.sum())
        return found

    def fitted(self, free: Sequence[int]) -> Case:
        """Return the case with as many layers as leave every GPU some of its ``free`` bytes.

        Raises:
            MemoryError: not even one layer fits.
        """
        one, two = (replace(self, layers=n).nbytes() for n in (1, 2))
        room = {gpu: int(_SHARE * free[gpu]) - _RESERVE for gpu in one}
        layers = min((room[gpu] - one[gpu]) // (two[gpu] - one[gpu]) + 1 for gpu in one)
        if layers < 1:
            raise MemoryError(f"no layer of {self.name} fits into {min(room.values()) / 1e9:.1f} GB a GPU")
        return replace(self, layers=min(self.layers, layers))


@cache
def _manifests(case: Case) -> tuple[tuple[Manifest, ...], tuple[Manifest, ...]]:
    model = replace(SHAPES[case.model], layers=case.layers)
    ranks = len(case.writer_gpus)
    trainer = packed(model, ranks) if case.trainer == "FSDP" else megatron(model, ranks, (1, ranks, 1))
    return trainer.manifests, engine(model, case.engine, len(case.reader_gpus))


def cases(gpus: int, modes: Sequence[str], models: Sequence[str], layers: int | None) -> Iterator[Case]:
    """Yield the cases over so many GPUs; those of one mode follow each other."""
    every, half = tuple(range(gpus)), gpus // 2
    for mode in modes:
        ends = (every, every) if mode == "colocated" else (every[:half], every[half : 2 * half])
        for model in models:
            most = min(layers or SHAPES[model].layers, SHAPES[model].layers)
            for trainer, reader in _kinds(model, gpus):
                yield Case(model, most, trainer, reader, *ends)


def _kinds(model: str, gpus: int) -> tuple[tuple[str, str], ...]:
    """Return (trainer, engine): all four of the smaller models; on one GPU they differ in storages only."""
    if model == "qwen3-235b":
        return (("FSDP", "TP"),) if gpus == 1 else (("FSDP", "TP"), ("EP", "EP"))
    if gpus == 1:
        return (("FSDP", "TP"), ("EP", "EP"))
    return (("FSDP", "TP"), ("EP", "TP"), ("EP", "EP"), ("FSDP", "EP"))


class Contents:
    """What every checkpoint tensor holds: made on the CPU, once, for all ranks.

    A tensor's elements are a window of one row of random bits, at a place of its own in each version, so
    that any box of it is a strided view of that row.

    Args:
        bits: int16[...], on the CPU or uploaded.
    """

    def __init__(self, bits: torch.Tensor) -> None:
        self.bits = bits

    @staticmethod
    def make(path: Path, largest: int) -> int:
        """Write random bits for tensors of up to ``largest`` elements; return how many elements."""
        words = -(-(largest + _SHIFTS) // 4)
        np.random.default_rng(6).integers(0, 2**64, words, dtype=np.uint64).tofile(path)
        return 4 * words

    @classmethod
    def read(cls, path: str, count: int) -> Contents:
        """Map what `make` wrote."""
        return cls(torch.from_file(path, shared=True, size=count, dtype=torch.int16))

    def boxes(self, manifest: Manifest, storages: Sequence[torch.Tensor], version: int) -> Iterator[Box]:
        """Yield every shard's place in the storages, beside what a version has there.

        Raises:
            TypeError: elements that are not of 16 bits.
        """
        if manifest.dtype.size and {int(d) for d in manifest.dtype} != {int(manifest.dtype[0])}:
            raise TypeError("all tensors must have one dtype of 16 bits")
        flat = [s.view(torch.int16) for s in storages]
        shifts = [(zlib.crc32(name.encode()) + 13 * version) % _SHIFTS for name in manifest.names]
        columns = (manifest.tensor, manifest.box_offset, manifest.box_size, manifest.storage)
        shapes = manifest.global_shape
        for row in range(manifest.rows):
            tensor, offset, size, storage = (column[row] for column in columns)
            width = int(shapes[tensor][1]) if shapes.shape[1] > 1 else 1
            place = shifts[tensor] + int(offset[0]) * width + (int(offset[1]) if len(offset) > 1 else 0)
            shape = (int(size[0]), int(size[1]) if len(size) > 1 else 1)
            start = int(manifest.view_offset[row])
            held = flat[storage][start : start + shape[0] * shape[1]].view(shape)
            yield Box(held, self.bits.as_strided(shape, (width, 1), place))

    def fill(self, manifest: Manifest, storages: Sequence[torch.Tensor], version: int) -> None:
        """Write a version into a rank's storages."""
        for box in self.boxes(manifest, storages, version):
            box.held.copy_(box.wanted)

    def check(self, manifest: Manifest, storages: Sequence[torch.Tensor], version: int) -> tuple[int, int]:
        """Return how many of a rank's tensors are a version, bit for bit, and how many there are."""
        equal = [torch.equal(box.held, box.wanted) for box in self.boxes(manifest, storages, version)]
        return sum(equal), len(equal)


@dataclass(frozen=True)
class Box:
    """A shard in memory, int16[rows, columns], and what it should be."""

    held: torch.Tensor
    wanted: torch.Tensor


def largest(names: Sequence[str]) -> int:
    """Return the elements of the largest tensor of some models."""
    return max(int(np.prod(t.shape)) for name in names for t in replace(SHAPES[name], layers=1).tensors())
