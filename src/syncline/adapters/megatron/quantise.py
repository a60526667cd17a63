"""Block-scaled fp8 at the source: what a rank publishes of a weight is its payload and its scales.

A block is quantised by whoever holds all of it. Where a shard's border cuts a block, the tensor is refused
by name, or, with ``halo="exchange"``, the block's holders agree on its scale before each of them quantises
its own elements of it (`syncline.adapters.megatron.halo`). Nothing is approximated.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from syncline.adapters.megatron.halo import Halo, blocks_of, touched
from syncline.adapters.megatron.learn import PREFIX, values_of
from syncline.adapters.megatron.trace import Held
from syncline.errors import AdapterError
from syncline.kernels.fp8 import BLOCK, largest, quantise
from syncline.layout.view import View, row_major

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from syncline.adapters.megatron.halo import Key
    from syncline.adapters.megatron.learn import Learned
    from syncline.adapters.megatron.neighbours import Neighbours
    from syncline.adapters.megatron.quantise_device import DeviceBlocks
    from syncline.layout.box import Box

PAYLOAD = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class BlockFP8:
    """Which checkpoint tensors are published in blocks of 128 x 128, each with a scale.

    Attributes:
        patterns: fnmatch patterns of checkpoint names.
        scale: the checkpoint's name of a tensor's scales; ``{}`` stands for the tensor's name.
        power_of_two: whether scales are rounded up to powers of two.
        halo: what becomes of a block that a shard's border cuts. ``"refuse"``: its tensor is refused by name;
            left out of the patterns, it is published as it is held, and quantised by a reader that takes
            its weights in stages (`syncline.store.adapter.StagedEngine`).
            ``"exchange"``: its holders tell each other the largest magnitude of their parts, 4 bytes a block,
            before every version; `quiesce` is then collective over them.
        timeout: seconds that a rank waits for another in that exchange.
    """

    patterns: tuple[str, ...]
    scale: str = "{}_scale_inv"
    power_of_two: bool = False
    halo: Literal["refuse", "exchange"] = "refuse"
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.halo not in ("refuse", "exchange"):
            raise AdapterError(
                "an unknown way with blocks that a border cuts",
                expected="'refuse' or 'exchange'",
                found=repr(self.halo),
            )

    def wants(self, name: str) -> bool:
        """Return whether a checkpoint tensor is to be quantised."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class Quantised:
    """A held box that is quantised before every version.

    Attributes:
        source: the box as it is held.
        payload: key of the memory of its fp8 payload, of the box's shape.
        scale: key of the memory of its scales, float32, one a block that the box touches.
        shared: whether some of its blocks are held by others, too.
    """

    source: Held
    payload: str
    scale: str
    shared: bool = False

    @property
    def key(self) -> Key:
        """The box by its checkpoint name."""
        return self.source.name, self.source.box

    @property
    def at(self) -> tuple[int, int]:
        """Row and column of the box's first element within its block."""
        down, right = self.source.box.offset[-2:]
        return down % BLOCK, right % BLOCK


def check(learned: Learned, wanted: BlockFP8, rank: object) -> None:
    """Check that this rank can quantise what it holds of the wanted tensors.

    Raises:
        AdapterError: a box that is no bfloat16 matrix in live memory, or that cuts a block; named.
    """
    for one in learned.held:
        if wanted.wants(one.name):
            _check(one, rank)
            if wanted.halo == "refuse":
                _check_borders(one, rank)


def plan(
    learned: Learned, wanted: BlockFP8, live: Callable[[str], torch.Tensor], halo: Halo | None = None
) -> Learned:
    """Return what a rank holds once the wanted tensors are quantised; memory is allocated, nothing computed.

    Args:
        learned: what it holds, checked.
        wanted: which tensors, and how.
        live: live tensors by name; payload and scales lie where they do.
        halo: what is done about shared blocks; None if there are none.
    """
    halo = halo or Halo()
    held, made, done = list[Held](), dict(learned.made), list[Quantised]()
    for one in learned.held:
        if not wanted.wants(one.name):
            held.append(one)
            continue
        number, device = len(done), live(one.live).device
        scale, blocks = wanted.scale.format(one.name), touched(one.box)
        payload_key, scale_key = f"{one.name}#{number}", f"{scale}#{number}"
        made[payload_key] = torch.zeros(one.box.size, dtype=getattr(torch, PAYLOAD), device=device)
        made[scale_key] = torch.zeros(blocks.size, dtype=torch.float32, device=device)
        key = one.name, one.box
        whole = View.contiguous(0, 0, one.box.size)
        held.append(Held(one.name, one.shape, PAYLOAD, one.box, PREFIX + payload_key, whole))
        held += (
            Held(scale, blocks_of(one.shape), "float32", box, PREFIX + scale_key, _inside(box, blocks))
            for box in halo.publishes.get(key, (blocks,))
        )
        done.append(Quantised(one, payload_key, scale_key, key in halo.shares))
    names = {wanted.scale.format(n) for n in learned.names if wanted.wants(n)}
    return replace(
        learned, held=tuple(held), made=made, quantised=tuple(done), names=(*learned.names, *sorted(names))
    )


class Quantiser:
    """Quantises what was planned before every version, bit for bit as `syncline.kernels.fp8` says.

    Args:
        learned: what this rank holds.
        power_of_two: whether scales are rounded up to powers of two.
        neighbours: the ranks with which blocks are shared, if there are any.
    """

    def __init__(
        self, learned: Learned, *, power_of_two: bool = False, neighbours: Neighbours | None = None
    ) -> None:
        self._learned, self._power_of_two, self._neighbours = learned, power_of_two, neighbours
        self._device: DeviceBlocks | None = None

    def run(self, live: Callable[[str], torch.Tensor]) -> None:
        """Quantise every planned box from live memory.

        Args:
            live: live tensors by name.

        Raises:
            AdapterError: a weight is not where its payload lies.
            DeadlineError, PeerLostError: a rank that shares blocks did not answer.
        """
        weights: list[torch.Tensor] = []
        for one in self._learned.quantised:
            weights.append(values_of(one.source, live(one.source.live)))
            made = self._learned.made[one.payload].device
            if weights[-1].device != made:
                raise AdapterError(
                    "a weight that is quantised at the source moved to another device",
                    expected=made,
                    found=weights[-1].device,
                    tensor=one.source.name,
                    hint="load the weights back before publish",
                )
        if any(weight.device.type != "cpu" for weight in weights):
            self._run_device(weights)
        else:
            self._run_host(weights)

    def _run_host(self, weights: list[torch.Tensor]) -> None:
        bits = [w.contiguous().view(torch.int16).numpy().view(np.uint16) for w in weights]
        pairs = list(zip(self._learned.quantised, bits, strict=True))
        magnitudes: dict[Key, NDArray[np.uint32]] = {}
        if self._neighbours is not None:
            for one, weight in pairs:
                if one.shared:
                    magnitudes[one.key] = stacked_largest(weight, one)
            self._neighbours.round(magnitudes)
        for one, weight in pairs:
            payload, scale = (self._learned.made[key] for key in (one.payload, one.scale))
            payloads = payload.view(torch.uint8).view(-1, *payload.shape[-2:])
            scales = scale.view(-1, *scale.shape[-2:])
            known = magnitudes.get(one.key)
            given = None if known is None else known.reshape(-1, *known.shape[-2:])
            for number, matrix in enumerate(weight.reshape(-1, *weight.shape[-2:])):
                packed, factors = quantise(
                    matrix,
                    power_of_two=self._power_of_two,
                    at=one.at,
                    magnitudes=None if given is None else given[number],
                )
                payloads[number].copy_(torch.from_numpy(packed))
                scales[number].copy_(torch.from_numpy(factors))

    def _run_device(self, weights: list[torch.Tensor]) -> None:
        from syncline.adapters.megatron.quantise_device import DeviceBlocks  # noqa: PLC0415 (Triton is heavy)

        if self._device is None:
            self._device = DeviceBlocks(self._learned, power_of_two=self._power_of_two)
        self._device.run(weights, None if self._neighbours is None else self._neighbours.round)


def stacked_largest(weight: NDArray[np.uint16], one: Quantised) -> NDArray[np.uint32]:
    """Return the largest magnitudes of a box of any dimensions, of the shape of its blocks."""
    matrices = weight.reshape(-1, *weight.shape[-2:])
    return np.stack([largest(matrix, one.at) for matrix in matrices]).reshape(touched(one.source.box).size)


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


def _check_borders(one: Held, rank: object) -> None:
    for n, low, size in list(zip(one.shape, one.box.offset, one.box.size, strict=True))[-2:]:
        if low % BLOCK or (size % BLOCK and low + size != n):
            raise AdapterError(
                "a shard's border cuts a block of scales",
                expected=f"borders at multiples of {BLOCK}, or at the tensor's end",
                found=f"{one.box} of {one.shape}",
                rank=rank,
                tensor=one.name,
                hint="BlockFP8(..., halo='exchange') lets its holders agree on the scale; left out of the "
                "patterns, it is published as it is held and quantised by the reader",
            )


def _inside(box: Box, blocks: Box) -> View:
    """Return where some scales lie in the memory of all those that a box touches."""
    rows = row_major(blocks.size)
    start = sum(o * s for o, s in zip(box.relative_to(blocks).offset, rows, strict=True))
    return View.simple(0, start, box.size, rows)
