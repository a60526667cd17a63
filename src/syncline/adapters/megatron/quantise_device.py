"""Weights on a device are quantised there, by the kernel of `syncline.kernels.device_fp8`.

A box that begins inside a block is cut at borders of blocks into at most four parts a matrix, so that every
block of the kernel is one block of scales. Where blocks are shared, a first pass writes largest magnitudes
into the memory of the scales, the host compares them with other holders' and makes scales of them, and a
second pass writes the payload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from syncline.kernels.device_fp8 import DeviceQuantiser, Pass
from syncline.kernels.fp8 import BLOCK, COLUMNS, Matrices, scales

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from syncline.adapters.megatron.halo import Key
    from syncline.adapters.megatron.learn import Learned
    from syncline.adapters.megatron.quantise import Quantised

    Compare = Callable[[dict[Key, NDArray[np.uint32]]], None]


class DeviceBlocks:
    """Tables of everything that one rank quantises, made anew only when a weight moved.

    Args:
        learned: what the rank holds; payload and scales lie on one device.
        power_of_two: whether scales are rounded up to powers of two.
    """

    def __init__(self, learned: Learned, *, power_of_two: bool) -> None:
        self._learned, self._power_of_two = learned, power_of_two
        self._where: list[int] = []
        self._whole: DeviceQuantiser | None = None
        self._shared: DeviceQuantiser | None = None

    def run(self, weights: Sequence[torch.Tensor], compare: Compare | None) -> None:
        """Quantise on the current stream; the host waits only where blocks are shared.

        Args:
            weights: one a planned box, in its order and of its shape.
            compare: compares largest magnitudes with those of other holders, in place.
        """
        rows = [weight.contiguous() for weight in weights]
        where = [weight.data_ptr() for weight in rows]
        if where != self._where:
            self._whole, self._shared = self._table(rows, shared=False), self._table(rows, shared=True)
            self._where = where
        if self._whole is not None:
            self._whole.run()
        if self._shared is not None:
            if compare is None:
                self._shared.run()
                return
            self._shared.run(Pass.LARGEST)
            self._compared(compare)
            self._shared.run(Pass.GIVEN)

    def _compared(self, compare: Compare) -> None:
        shared = [one for one in self._learned.quantised if one.shared]
        made = {one.key: self._learned.made[one.scale] for one in shared}
        values = {key: s.view(torch.int32).cpu().numpy().view(np.uint32).copy() for key, s in made.items()}
        compare(values)
        for key, scale in made.items():
            scale.copy_(torch.from_numpy(scales(values[key], power_of_two=self._power_of_two)))

    def _table(self, rows: Sequence[torch.Tensor], *, shared: bool) -> DeviceQuantiser | None:
        listed = [
            matrix
            for one, weight in zip(self._learned.quantised, rows, strict=True)
            if one.shared == shared
            for matrix in self._matrices(one, weight)
        ]
        if not listed:
            return None
        columns = dict(zip(COLUMNS, np.array(listed, np.int64).T.copy(), strict=True))
        return DeviceQuantiser(Matrices(**columns), rows[0].device, power_of_two=self._power_of_two)

    def _matrices(self, one: Quantised, weight: torch.Tensor) -> Iterator[tuple[int, ...]]:
        """Yield the rows of a table (`syncline.kernels.fp8.COLUMNS`) of one held box."""
        payload, scale = self._learned.made[one.payload], self._learned.made[one.scale]
        (height, width), (down, right) = weight.shape[-2:], one.at
        grid = scale.shape[-2:]
        for number in range(weight[..., 0, 0].numel()):
            first = number * height * width
            factors = scale.data_ptr() + number * grid[0] * grid[1] * 4
            for row, rows in _strips(height, down):
                for col, cols in _strips(width, right):
                    at = first + row * width + col
                    block = (down + row) // BLOCK * grid[1] + (right + col) // BLOCK
                    yield (
                        weight.data_ptr() + at * 2, width * 2, payload.data_ptr() + at, width,
                        factors + block * 4, grid[1] * 4, rows, cols,
                    )  # fmt: skip


def _strips(size: int, phase: int) -> Iterator[tuple[int, int]]:
    """Yield (first, size) of what lies before the first border of blocks, and of what lies after it."""
    before = min((BLOCK - phase) % BLOCK, size)
    if before:
        yield 0, before
    if size > before:
        yield before, size - before
