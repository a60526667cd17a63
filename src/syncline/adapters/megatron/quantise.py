"""Block-scaled fp8 at the source: what a rank publishes of a weight is its payload and its scales.

A block is quantised by whoever holds all of it. A shard's border that cuts a block is refused by name: such a
tensor is published as it is held, and quantised by the reader. Nothing is approximated.
"""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from syncline.adapters.megatron.learn import PREFIX, values_of
from syncline.adapters.megatron.trace import Held
from syncline.errors import AdapterError
from syncline.kernels.fp8 import BLOCK, quantise
from syncline.layout.box import Box
from syncline.layout.view import View

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncline.adapters.megatron.learn import Learned

PAYLOAD = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class BlockFP8:
    """Which checkpoint tensors are published in blocks of 128 x 128, each with a scale.

    Attributes:
        patterns: fnmatch patterns of checkpoint names.
        scale: the checkpoint's name of a tensor's scales; ``{}`` stands for the tensor's name.
        power_of_two: whether scales are rounded up to powers of two.
    """

    patterns: tuple[str, ...]
    scale: str = "{}_scale_inv"
    power_of_two: bool = False

    def wants(self, name: str) -> bool:
        """Return whether a checkpoint tensor is to be quantised."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class Quantised:
    """A held box that is quantised before every version.

    Attributes:
        source: the box as it is held.
        payload: key of the memory of its fp8 payload, of the box's shape.
        scale: key of the memory of its scales, float32.
    """

    source: Held
    payload: str
    scale: str


def plan(learned: Learned, wanted: BlockFP8, rank: object) -> Learned:
    """Return what a rank holds once the wanted tensors are quantised; memory is allocated, nothing computed.

    Raises:
        AdapterError: a box that is no bfloat16 matrix in host memory, or that cuts a block; named.
    """
    held, made, done = list[Held](), dict(learned.made), list[Quantised]()
    for one in learned.held:
        if not wanted.wants(one.name):
            held.append(one)
            continue
        _check(one, rank)
        number = len(done)
        shape, offset, size = _blocks(one.shape), _corner(one.box.offset), _blocks(one.box.size)
        scale = wanted.scale.format(one.name)
        payload_key, scale_key = f"{one.name}#{number}", f"{scale}#{number}"
        made[payload_key] = torch.zeros(one.box.size, dtype=getattr(torch, PAYLOAD))
        made[scale_key] = torch.zeros(size, dtype=torch.float32)
        held.append(_whole(one.name, one.shape, PAYLOAD, one.box, payload_key))
        held.append(_whole(scale, shape, "float32", Box(offset, size), scale_key))
        done.append(Quantised(one, payload_key, scale_key))
    names = {wanted.scale.format(n) for n in learned.names if wanted.wants(n)}
    return replace(
        learned, held=tuple(held), made=made, quantised=tuple(done), names=(*learned.names, *sorted(names))
    )


def run(learned: Learned, live: Callable[[str], torch.Tensor], *, power_of_two: bool) -> None:
    """Quantise every planned box from live memory, bit for bit as `syncline.kernels.fp8` says."""
    for one in learned.quantised:
        weight = values_of(one.source, live(one.source.live)).contiguous()
        if weight.device.type != "cpu":
            raise AdapterError(
                "a weight that is quantised at the source left host memory",
                found=str(weight.device),
                tensor=one.source.name,
                hint="quantise on the reader",
            )
        payload, scale = learned.made[one.payload], learned.made[one.scale]
        matrices = weight.view(torch.int16).numpy().view(np.uint16).reshape(-1, *weight.shape[-2:])
        payloads = payload.view(torch.uint8).view(-1, *payload.shape[-2:])
        scales = scale.view(-1, *scale.shape[-2:])
        for number, matrix in enumerate(matrices):
            bits, factors = quantise(matrix, power_of_two=power_of_two)
            payloads[number].copy_(torch.from_numpy(bits))
            scales[number].copy_(torch.from_numpy(factors))


def _check(one: Held, rank: object) -> None:
    if one.dtype != "bfloat16" or len(one.shape) < 2 or one.live.startswith(PREFIX):
        raise AdapterError(
            "a tensor that cannot be quantised at the source",
            expected="a bfloat16 matrix in live memory",
            found=f"{one.dtype} {one.shape}",
            rank=rank,
            tensor=one.name,
            hint="leave it out of the patterns, and quantise on the reader",
        )
    for n, low, size in list(zip(one.shape, one.box.offset, one.box.size, strict=True))[-2:]:
        if low % BLOCK or (size % BLOCK and low + size != n):
            raise AdapterError(
                "a shard's border cuts a block of scales",
                expected=f"borders at multiples of {BLOCK}, or at the tensor's end",
                found=f"{one.box} of {one.shape}",
                rank=rank,
                tensor=one.name,
                hint="leave it out of the patterns: published as it is held, it is quantised by the reader",
            )


def _blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], *(math.ceil(n / BLOCK) for n in shape[-2:]))


def _corner(offset: tuple[int, ...]) -> tuple[int, ...]:
    return (*offset[:-2], *(low // BLOCK for low in offset[-2:]))


def _whole(name: str, shape: tuple[int, ...], kind: str, box: Box, key: str) -> Held:
    return Held(name, shape, kind, box, PREFIX + key, View.contiguous(0, 0, box.size))
