"""What the kernels must compute, bit for bit, in plain numpy; and the definition of the digest.

The digest of a set of bytes of one checkpoint tensor. Take the tensor in its wire dtype (the dtype the reader
installs), flat and contiguous in canonical order, as little-endian 32-bit words; word ``w`` holds bytes
``4w`` to ``4w + 3``, and bytes that are not in the set count as zero. Then

    D = sum over w of A(w >> 12) * B(w & 4095) * word(w)   modulo 2**64

    A(b) = splitmix64(b) | 1                                   one odd 64-bit weight a block of 4096 words
    B(j) = (splitmix64(j ^ 0x53594E434C494E45) >> 32) | 1      4096 odd 32-bit keys, pairwise distinct

- It is additive: the digests of disjoint sets add up to the digest of their union, wherever a sharding
  cuts, odd positions of 1- and 2-byte elements included, because every byte contributes its own term.
- A change within one word is always seen: an odd 32-bit key times a non-zero difference below 2**32 is not
  zero below 2**64, nor after multiplying by an odd weight.
- A swap of two different elements of 1, 2 or 4 bytes within a block is always seen: their weights, shifts of
  distinct odd keys, differ, and the product stays below 2**64 in magnitude. Other faults (across blocks, in
  many words, in 8-byte elements, which span two words) escape with a chance of about 2**-64.
- It is linear, so it proves transport against faults, not against an adversary, and never proves a layout.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from syncline.kernels.constants import BLOCK_KEYS, BLOCK_WORDS, mix

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


def memory_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Return uint8[nbytes] over memory of this process; nothing keeps that memory alive."""
    if nbytes == 0:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def digest_bytes(data: NDArray[np.uint8], position: int) -> int:
    """Return the digest of contiguous bytes, the first at canonical byte ``position``."""
    first = position // 4
    lead = position % 4
    words = np.zeros(-(-(lead + len(data)) // 4), "<u4")
    words.view(np.uint8)[lead : lead + len(data)] = data
    index = np.arange(first, first + len(words), dtype=np.uint64)
    weights = mix(index // np.uint64(BLOCK_WORDS)) | np.uint64(1)
    keys = BLOCK_KEYS[(index % np.uint64(BLOCK_WORDS)).astype(np.int64)].astype(np.uint64)
    return int(np.sum(weights * keys * words.astype(np.uint64), dtype=np.uint64))


def digest_elements(elements: NDArray[np.generic], position: int) -> int:
    """Return the digest of a flat array of wire elements, the first at canonical position ``position``."""
    flat = np.ascontiguousarray(elements).reshape(-1)
    return digest_bytes(flat.view(np.uint8), position * flat.itemsize)


def combine(digests: NDArray[np.uint64]) -> int:
    """Return the digest of the union of disjoint sets from theirs."""
    return int(np.sum(digests, dtype=np.uint64))


def _rows(
    columns: Sequence[NDArray[np.int64]], rows: NDArray[np.int64], strides: Sequence[NDArray[np.int64]]
) -> Iterator[tuple[int, list[int]]]:
    """Yield (run, one value a column) for every row of every run; each column advances by its stride."""
    for run in range(len(rows)):
        for row in range(int(rows[run])):
            pairs = zip(columns, strides, strict=True)
            yield run, [int(base[run]) + row * int(stride[run]) for base, stride in pairs]


def copy_runs(
    dst: NDArray[np.int64],
    src: NDArray[np.int64],
    rows: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    dst_stride: NDArray[np.int64],
    src_stride: NDArray[np.int64],
) -> None:
    """Copy as `syncline.kernels.host.copy_runs` does."""
    for run, (d, s) in _rows((dst, src), rows, (dst_stride, src_stride)):
        memory_at(d, int(nbytes[run]))[:] = memory_at(s, int(nbytes[run]))


def digest_runs(
    addr: NDArray[np.int64],
    rows: NDArray[np.int64],
    elems: NDArray[np.int64],
    stride: NDArray[np.int64],
    pos: NDArray[np.int64],
    pos_stride: NDArray[np.int64],
    itemsize: NDArray[np.uint8],
    group: NDArray[np.int32],
    groups: int,
) -> NDArray[np.uint64]:
    """Return uint64[groups]: digests as `syncline.kernels.host.digest_runs` accumulates them from zero."""
    out = np.zeros(groups, np.uint64)
    for run, (a, p) in _rows((addr, pos), rows, (stride, pos_stride)):
        if group[run] >= 0:
            size = int(itemsize[run])
            part = digest_bytes(memory_at(a, int(elems[run]) * size), p * size)
            out[group[run]] = (int(out[group[run]]) + part) % 2**64
    return out


def cast(bits: NDArray[np.generic], src_dtype: str, dst_dtype: str) -> NDArray[np.generic]:
    """Return the bits of the cast elements: uint32 for float32, uint16 for bfloat16 and float16.

    Rounding is to nearest, ties to even. A NaN becomes 0xFFFF in bfloat16, and keeps its sign and upper
    payload and turns quiet in float16 and from float16: what torch's vectorised conversions yield on x86.
    """
    pair = (src_dtype, dst_dtype)
    if pair == ("float32", "bfloat16"):
        x = bits.astype(np.uint64)
        rounded = (x + np.uint64(0x7FFF) + ((x >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
        is_nan = (x & np.uint64(0x7FFFFFFF)) > np.uint64(0x7F800000)
        return np.where(is_nan, np.uint64(0xFFFF), rounded).astype(np.uint16)
    if pair == ("bfloat16", "float32"):
        return bits.astype(np.uint32) << np.uint32(16)
    if pair == ("float32", "float16"):
        return _single_to_half(bits.astype(np.uint32))
    if pair == ("float16", "float32"):
        wide = bits.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        is_nan = (wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return np.where(is_nan, wide | np.uint32(0x400000), wide).astype(np.uint32)
    raise ValueError(f"no reference for a cast from {src_dtype} to {dst_dtype}")


def _single_to_half(bits: NDArray[np.uint32]) -> NDArray[np.uint16]:
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    with np.errstate(all="ignore"):
        half = bits.view(np.float32).astype(np.float16).view(np.uint16)
    quiet = (
        (bits >> np.uint32(16) & np.uint32(0x8000))
        | np.uint32(0x7E00)
        | (bits >> np.uint32(13) & np.uint32(0x1FF))
    )
    return np.where(is_nan, quiet.astype(np.uint16), half)
