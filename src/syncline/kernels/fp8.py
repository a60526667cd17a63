"""Block-scaled fp8: what quantised engines keep, from the trainer's bfloat16; the reference in plain numpy.

A matrix is cut into blocks of 128 x 128 (the last ones may be smaller). For each block

    scale = largest magnitude / 448, in float32, at least 2**-126; 1 for a block of zeros
    q     = e4m3fn(w * (1 / scale)), both in float32, rounded to nearest, ties to even, at most 448

448 is the largest finite value of ``float8_e4m3fn``. With ``power_of_two`` the scale is rounded up to a power
of two, the only scales that the e8m0 format holds. A block with an infinity or a NaN becomes NaN altogether,
scale included, so that it cannot pass for weights. An engine multiplies by the scale: ``w = q * scale``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from syncline.errors import TransportError

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

BLOCK = 128
LARGEST = 448.0
NAN_BITS = 0x7FC00000
COLUMNS = ("src", "src_stride", "dst", "dst_stride", "scale", "scale_stride", "rows", "cols")
"""Columns of `Matrices`, and of a matrix on the device, int64 each."""
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITE = np.uint32(0x7F800000)
_SMALLEST = np.uint32(0x00800000)  # 2**-126: its inverse is finite


def to_e4m3(bits: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Return float32 bits of magnitudes up to 448 rounded to e4m3fn, as bytes; NaN becomes 0x7F or 0xFF."""
    sign = (bits >> np.uint32(24) & np.uint32(0x80)).astype(np.uint8)
    magnitude = bits & _MAGNITUDE
    rounded = magnitude + np.uint32(0x7FFFF) + (magnitude >> np.uint32(20) & np.uint32(1))
    normal = (rounded >> np.uint32(20)) - np.uint32(120 << 3)
    # multiples of 2**-9: adding 2**14 leaves exactly those nine bits of fraction, rounded to even
    lifted = magnitude.view(np.float32) + np.float32(16384.0)
    subnormal = lifted.view(np.uint32) - np.float32(16384.0).view(np.uint32)
    small = magnitude < np.uint32(121 << 23)  # 2**-6
    out = np.where(small, subnormal, normal).astype(np.uint8)
    return sign | np.where(magnitude > _INFINITE, np.uint8(0x7F), out)


def quantise(weight: NDArray[np.uint16], *, power_of_two: bool = False) -> tuple[NDArray[Any], NDArray[Any]]:
    """Quantise a bfloat16 matrix.

    Args:
        weight: bits [M, N].
        power_of_two: whether scales are rounded up to powers of two.

    Returns:
        uint8 [M, N], bits of e4m3fn, and float32 [ceil(M / 128), ceil(N / 128)].
    """
    rows, cols = weight.shape
    wide = weight.astype(np.uint32) << np.uint32(16)
    grid = -(-rows // BLOCK), -(-cols // BLOCK)
    padded = np.zeros((grid[0] * BLOCK, grid[1] * BLOCK), np.uint32)
    padded[:rows, :cols] = wide
    blocks = padded.reshape(grid[0], BLOCK, grid[1], BLOCK)
    largest = (blocks & _MAGNITUDE).max(axis=(1, 3))
    with np.errstate(all="ignore"):
        scale = (largest.view(np.float32) / np.float32(LARGEST)).view(np.uint32)
        scale = np.where(largest == 0, np.float32(1).view(np.uint32), np.maximum(scale, _SMALLEST))
        if power_of_two:
            scale = (scale + np.uint32(0x7FFFFF)) & _INFINITE
        scale = np.where(largest >= _INFINITE, np.uint32(NAN_BITS), scale).astype(np.uint32)
        inverse = np.float32(1) / scale.view(np.float32)
        product = blocks.view(np.float32) * inverse[:, None, :, None]
        limited = np.minimum(np.abs(product), np.float32(LARGEST)).view(np.uint32)
    signed = limited & _MAGNITUDE | blocks & np.uint32(0x80000000)
    broken = np.broadcast_to((scale == NAN_BITS)[:, None, :, None], blocks.shape)
    q = np.where(broken, np.uint8(0x7F), to_e4m3(signed))
    return q.reshape(padded.shape)[:rows, :cols].copy(), scale.view(np.float32)


@dataclass(frozen=True, eq=False)
class Matrices:
    """M matrices to quantise, as addresses on one device or its peers.

    Attributes:
        src: int64[M], address of the first bfloat16; src_stride: int64[M], bytes from row to row.
        dst: int64[M], address of the first byte of the result; dst_stride: int64[M].
        scale: int64[M], address of the first float32 scale; scale_stride: int64[M], bytes from row to row.
        rows, cols: int64[M], below 2**31 each.
    """

    src: NDArray[np.int64]
    src_stride: NDArray[np.int64]
    dst: NDArray[np.int64]
    dst_stride: NDArray[np.int64]
    scale: NDArray[np.int64]
    scale_stride: NDArray[np.int64]
    rows: NDArray[np.int64]
    cols: NDArray[np.int64]

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in COLUMNS}
        if len(set(lengths.values())) != 1:
            raise TransportError("columns of one table differ in length", found=lengths)
        odd = (self.src | self.src_stride) % 2 | (self.scale | self.scale_stride) % 4
        if odd.any():
            raise TransportError(
                "elements to quantise are not aligned to their own size",
                expected="bfloat16 at multiples of 2 bytes, scales at multiples of 4",
                found=f"matrix {int(np.argmax(odd > 0))}",
            )

    def blocks(self) -> NDArray[np.int64]:
        """Return int64[M]: blocks of each matrix."""
        return -(-self.rows // BLOCK) * -(-self.cols // BLOCK)

    def aligned(self) -> NDArray[np.bool_]:
        """Return bool[M]: whether rows are whole 16-byte accesses on both sides."""
        return (self.src | self.src_stride | self.dst | self.dst_stride | self.cols) % 16 == 0
