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


def largest(weight: NDArray[np.uint16], at: tuple[int, int] = (0, 0)) -> NDArray[np.uint32]:
    """Return the largest magnitude of every block, as float32 bits; a NaN's are the largest of all.

    Magnitudes of a block's parts, compared as these bits, make the block's.

    Args:
        weight: bfloat16 bits [M, N], a part of a matrix.
        at: row and column of the first element within its block, each below 128.

    Returns:
        uint32 [ceil((at[0] + M) / 128), ceil((at[1] + N) / 128)].
    """
    return (_blocks(weight, at) & _MAGNITUDE).max(axis=(1, 3))


def scales(magnitudes: NDArray[np.uint32], *, power_of_two: bool = False) -> NDArray[np.float32]:
    """Return the scales, float32, of blocks whose largest magnitudes these are; see `largest`."""
    with np.errstate(all="ignore"):
        scale = (magnitudes.view(np.float32) / np.float32(LARGEST)).view(np.uint32)
    scale = np.where(magnitudes == 0, np.float32(1).view(np.uint32), np.maximum(scale, _SMALLEST))
    if power_of_two:
        scale = (scale + np.uint32(0x7FFFFF)) & _INFINITE
    return np.where(magnitudes >= _INFINITE, np.uint32(NAN_BITS), scale).astype(np.uint32).view(np.float32)


def quantise(
    weight: NDArray[np.uint16],
    *,
    power_of_two: bool = False,
    at: tuple[int, int] = (0, 0),
    magnitudes: NDArray[np.uint32] | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Quantise a bfloat16 matrix, or a part of one.

    Args:
        weight: bits [M, N].
        power_of_two: whether scales are rounded up to powers of two.
        at: row and column of the first element within its block: a part may begin inside one.
        magnitudes: of every block, as `largest` returns them, where some of a block's elements are elsewhere.

    Returns:
        uint8 [M, N], bits of e4m3fn, and float32 scales, one a block that the part touches.
    """
    blocks = _blocks(weight, at)
    most = (blocks & _MAGNITUDE).max(axis=(1, 3)) if magnitudes is None else magnitudes
    scale = scales(most, power_of_two=power_of_two).view(np.uint32)
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / scale.view(np.float32)
        product = blocks.view(np.float32) * inverse[:, None, :, None]
        limited = np.minimum(np.abs(product), np.float32(LARGEST)).view(np.uint32)
    signed = limited & _MAGNITUDE | blocks & np.uint32(0x80000000)
    broken = np.broadcast_to((scale == NAN_BITS)[:, None, :, None], blocks.shape)
    q = np.where(broken, np.uint8(0x7F), to_e4m3(signed))
    flat = q.reshape(blocks.shape[0] * BLOCK, -1)
    return flat[at[0] : at[0] + weight.shape[0], at[1] : at[1] + weight.shape[1]].copy(), scale.view(
        np.float32
    )


def _blocks(weight: NDArray[np.uint16], at: tuple[int, int]) -> NDArray[np.uint32]:
    """Return float32 bits, uint32[blocks, 128, blocks, 128]; zeros where the part has no elements."""
    (rows, cols), (down, right) = weight.shape, at
    grid = -(-(down + rows) // BLOCK), -(-(right + cols) // BLOCK)
    padded = np.zeros((grid[0] * BLOCK, grid[1] * BLOCK), np.uint32)
    padded[down : down + rows, right : right + cols] = weight.astype(np.uint32) << np.uint32(16)
    return padded.reshape(grid[0], BLOCK, grid[1], BLOCK)


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
