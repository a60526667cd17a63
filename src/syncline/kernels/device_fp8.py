"""Quantises tables of matrices on a device, reading each source byte once; see `syncline.kernels.fp8`."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from syncline.errors import TransportError
from syncline.kernels.device import multiprocessors
from syncline.kernels.fp8 import BLOCK, COLUMNS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncline.kernels.fp8 import Matrices

_PER_SM = 3
_WARPS = 4


def _kernel() -> Any:
    try:
        from syncline.kernels import triton_fp8  # noqa: PLC0415 - Triton is optional and heavy
    except ImportError as error:
        raise TransportError(
            "device kernels need Triton", expected="an importable triton", found=error
        ) from error
    return triton_fp8.quantise


class Pass(Enum):
    """What one run does: everything, or the first or second half of it."""

    WHOLE = "whole"
    LARGEST = "largest"
    """The largest magnitude of each block is written in place of its scale, as float32 bits."""
    GIVEN = "given"
    """Scales are there, made by `syncline.kernels.fp8.scales`; payload is written."""


class DeviceQuantiser:
    """A table of matrices, made once and run any number of times.

    Args:
        matrices: sources (a peer's memory included) and destinations.
        device: where the kernel runs.
        power_of_two: whether scales are rounded up to powers of two.
    """

    def __init__(self, matrices: Matrices, device: torch.device, *, power_of_two: bool = False) -> None:
        self._kernel, self._power_of_two = _kernel(), power_of_two
        self._programs = multiprocessors(device) * _PER_SM
        self._hardware = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
        self._parts = []
        for straight in (True, False):
            index = np.flatnonzero((matrices.aligned() == straight) & (matrices.blocks() > 0))
            if len(index):
                columns = [getattr(matrices, name)[index] for name in COLUMNS]
                table = torch.from_numpy(np.stack(columns, axis=1)).to(device)
                self._parts.append((straight, _blocks(matrices, index).to(device), table))

    @property
    def launches(self) -> int:
        """Kernels that one run launches."""
        return len(self._parts)

    def run(self, which: Pass = Pass.WHOLE) -> None:
        """Launch everything on the current stream of the device.

        Args:
            which: all at once, or, where blocks have elements elsewhere, one of two passes with a comparison
                between them.
        """
        for straight, tiles, table in self._parts:
            grid = min(self._programs, len(tiles))
            self._kernel[(grid,)](
                tiles,
                table,
                len(tiles),
                ALIGNED=straight,
                POWER_OF_TWO=self._power_of_two,
                HARDWARE=self._hardware,
                LARGEST=which is Pass.LARGEST,
                GIVEN=which is Pass.GIVEN,
                num_warps=_WARPS,
            )


def _blocks(matrices: Matrices, index: NDArray[np.intp]) -> torch.Tensor:
    """Return int32[blocks, 3]: matrix, block row, block column."""
    counts = matrices.blocks()[index]
    matrix = np.repeat(np.arange(len(index)), counts)
    nth = np.arange(len(matrix)) - np.repeat(np.cumsum(counts) - counts, counts)
    across = (-(-matrices.cols[index] // BLOCK))[matrix]
    return torch.from_numpy(np.stack([matrix, nth // across, nth % across], axis=1).astype(np.int32))
