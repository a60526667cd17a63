"""Hashes of rows of integer columns, to group equal rows: one multiplication a column, then one mixing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncline.layout.columns import I64
    from syncline.layout.manifest import Manifest

    U64 = NDArray[np.uint64]


def box_hashes(manifest: Manifest) -> U64:
    """Return u64: a hash of each segment's box, dtype and transform; of its shard's box too if that is cut.

    Padding to more dimensions changes nothing.
    """
    m = manifest
    if m.plain:
        offset, size, dtype, shard = m.box_offset, m.box_size, m.dtype, None
    else:
        s = m.segments()
        offset, size, dtype, shard = s.offset, s.size, s.dtype, s.shard
    kinds = (dtype.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    if len(m.transform_names) > 1:
        chain = m.transforms if shard is None else m.transforms[shard]
        kinds += chain.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    if shard is not None and bool((shard[1:] == shard[:-1]).any()):
        kinds += mixed(weighted([m.box_offset[shard], m.box_size[shard] - 1], 3))
    return mixed(weighted([offset, size - 1], 2) + kinds)


def weighted(tables: Sequence[I64], salt: int) -> U64:
    """Return u64[N]: a sum of all columns of i64[N, D] tables, each times its own constant, modulo 2^64."""
    columns = [table[:, d] for table in tables for d in range(table.shape[1])]
    out = np.zeros(len(tables[0]), np.uint64)
    term = np.empty_like(out)
    for column, factor in zip(columns, constants(0, len(columns), salt), strict=True):
        np.multiply(column.view(np.uint64), factor, out=term)
        out += term
    return out


def kinds(tables: Sequence[I64]) -> tuple[I64, NDArray[np.bool_]]:
    """Return (order i64[N], bool[N]): rows by hash, and where in that order another hash begins."""
    hashes = mixed(weighted(tables, 4))
    order = np.argsort(hashes)
    first = np.ones(len(order), np.bool_)
    first[1:] = hashes[order[1:]] != hashes[order[:-1]]
    return order, first


def mixed(value: U64) -> U64:
    """Mix 64-bit values in place so that every bit depends on every other (the finaliser of SplitMix64)."""
    term = np.empty_like(value)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        np.right_shift(value, np.uint64(shift), out=term)
        value ^= term
        if factor > 1:
            value *= np.uint64(factor)
    return value


def constants(first: int, count: int, salt: int) -> U64:
    """Return u64[count]: odd constants number ``first``, ``first + 1``, ..., the same in every process."""
    number = np.arange(first + 1, first + count + 1, dtype=np.uint64) + np.uint64(salt << 40)
    return mixed(number * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
