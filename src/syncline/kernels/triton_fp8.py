"""The kernel of `syncline.kernels.fp8`: one block a step, read once, bit for bit as the reference does it."""

# Triton reads this module's functions as source, constants and annotations included; it is optional, and its
# compile-time constants are written in capitals.
# ruff: noqa: N803
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl


@triton.jit
def _scale(largest: tl.tensor, POWER_OF_TWO: tl.constexpr):
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), 448.0).to(tl.uint32, bitcast=True)
    scale = tl.where(largest == 0, 0x3F800000, tl.maximum(scale, 0x00800000)).to(tl.uint32)
    if POWER_OF_TWO:
        scale = (scale + 0x7FFFFF) & 0x7F800000
    return tl.where(largest >= 0x7F800000, 0x7FC00000, scale).to(tl.uint32)


@triton.jit
def _payload(x: tl.tensor, scale: tl.tensor, HARDWARE: tl.constexpr):
    product = x.to(tl.float32, bitcast=True) * tl.div_rn(1.0, scale.to(tl.float32, bitcast=True))
    if HARDWARE:  # rounds to nearest even and saturates, and makes 0x7F of NaN
        q = product.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = (tl.minimum(tl.abs(product), 448.0).to(tl.uint32, bitcast=True)) & 0x7FFFFFFF
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        lifted = bits.to(tl.float32, bitcast=True) + 16384.0
        subnormal = lifted.to(tl.uint32, bitcast=True) - 0x46800000
        q = tl.where(bits < 0x3C800000, subnormal, normal) | ((x >> 24) & 0x80)
        q = tl.where(scale == 0x7FC00000, 0x7F, q).to(tl.uint8)
    return q


@triton.jit
def quantise(
    tile: tl.tensor,  # int32[tiles, 3]: matrix, block row, block column
    matrix: tl.tensor,  # int64[matrices, 8]: see `syncline.kernels.fp8.COLUMNS`
    tiles: tl.tensor,
    ALIGNED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HARDWARE: tl.constexpr,
    LARGEST: tl.constexpr,
    GIVEN: tl.constexpr,
):
    """Quantise all blocks; each program takes every ``programs``-th.

    With LARGEST, only each block's largest magnitude is written, in place of its scale; with GIVEN, scales
    are read, and only the payload is written.
    """
    i = tl.arange(0, 128)
    for t in range(tl.program_id(0), tiles, tl.num_programs(0)):
        m = matrix + tl.load(tile + t * 3) * 8
        down, right = tl.load(tile + t * 3 + 1).to(tl.int64), tl.load(tile + t * 3 + 2).to(tl.int64)
        src_stride, dst_stride = tl.load(m + 1), tl.load(m + 3)
        row = down * 128 + i
        # rows are multiples of 16 elements where ALIGNED: one comparison for each access
        edge = i // 16 * 16 if ALIGNED else i
        mask = (row < tl.load(m + 6))[:, None] & (
            edge < tl.load(m + 7).to(tl.int32) - right.to(tl.int32) * 128
        )[None, :]
        src = (tl.load(m) + row * src_stride + right * 256).to(tl.pointer_type(tl.uint16))[:, None] + i[
            None, :
        ]
        dst = (tl.load(m + 2) + row * dst_stride + right * 128).to(tl.pointer_type(tl.uint8))[:, None] + i[
            None, :
        ]
        if ALIGNED:
            src = tl.max_contiguous(tl.multiple_of(src, (1, 16)), (1, 128))
            dst = tl.max_contiguous(tl.multiple_of(dst, (1, 16)), (1, 128))
        where = (tl.load(m + 4) + down * tl.load(m + 5) + right * 4).to(tl.pointer_type(tl.uint32))
        x = tl.load(src, mask=mask, other=0).to(tl.uint32) << 16
        if GIVEN:
            tl.store(dst, _payload(x, tl.load(where), HARDWARE), mask=mask)
        else:
            largest = tl.max(tl.max((x & 0x7FFFFFFF).to(tl.int32), axis=1), axis=0).to(tl.uint32)
            if LARGEST:
                tl.store(where, largest)
            else:
                scale = _scale(largest, POWER_OF_TWO)
                tl.store(dst, _payload(x, scale, HARDWARE), mask=mask)
                tl.store(where, scale)
