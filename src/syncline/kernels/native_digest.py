"""How rows are digested: the inner functions of `syncline.kernels.native`; the format is `reference`'s."""

# pyright: reportMissingParameterType=false, reportCallIssue=false
# (numba infers these types where they are called, and passes intrinsics their first argument itself)

from __future__ import annotations

import numpy as np
from numba import njit

from syncline.kernels.native_ir import digest_lines, digest_lines_here, load_u8, load_u32

U = np.uint64
READ_CHUNK = U(1024)  # how far ahead a pass that only reads fetches
# Long runs are read in READS places that lie APART bytes apart, READ_TURN bytes at each in turn.
APART = U(65536)
READS, READ_TURN = U(4), U(256)
# Rows of column cuts likewise, READ_TURN bytes at each in turn, APART bytes apart if there are enough.
ROWS = U(4)


@njit(inline="always")
def block_weight(p):
    """Return the odd weight of the block that canonical byte p lies in."""
    x = (p >> U(14)) + U(0x9E3779B97F4A7C15)
    x = (x ^ (x >> U(30))) * U(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U(27))) * U(0x94D049BB133111EB)
    return (x ^ (x >> U(31))) | U(1)


@njit(inline="always")
def digest_bytes(addr, n, p, keys):
    """Sum over n < 4 bytes that lie within one word, the first at canonical byte p."""
    bits = U(0)
    for k in range(n):
        bits |= U(load_u8(addr, U(k))) << (((p + U(k)) & U(3)) << U(3))
    return bits * U(load_u32(keys, (p >> U(2)) & U(4095)))


@njit(inline="always")
def digest_words(addr, n, p, keys):
    """Sum over n < 16 whole words, the first at canonical byte p."""
    total = U(0)
    key = keys + (p & U(16380))
    for k in range(n):
        total += U(load_u32(addr, U(k))) * U(load_u32(key, U(k)))
    return total


@njit
def digest_chunk(addr, n, p, keys, read_ahead):
    """Digest n bytes that lie within one block, the first at canonical byte p."""
    total = U(0)
    block = block_weight(p)
    head = min(n, (U(4) - p) & U(3))
    if head:
        total += digest_bytes(addr, head, p, keys)
        addr, p, n = addr + head, p + head, n - head
    lines = n >> U(6)
    if lines:
        total += digest_lines(addr, lines, keys + (p & U(16380)), read_ahead)
        addr, p, n = addr + (lines << U(6)), p + (lines << U(6)), n & U(63)
    if n >= U(4):
        total += digest_words(addr, n >> U(2), p, keys)
        addr, p, n = addr + (n & U(60)), p + (n & U(60)), n & U(3)
    if n:
        total += digest_bytes(addr, n, p, keys)
    return total * block


@njit
def digest_long(addr, n, p, keys):
    """Digest a multiple of APART * READS bytes, the first at a canonical multiple of READ_TURN."""
    total = U(0)
    for _ in range(n // (APART * READS)):
        for i in range(APART // READ_TURN):
            at = U(i) * READ_TURN
            for _ in range(READS):
                key = keys + ((p + at) & U(16380))
                total += digest_lines_here(addr + at, READ_TURN >> U(6), key) * block_weight(p + at)
                at += APART
        addr, p = addr + APART * READS, p + APART * READS
    return total


@njit
def digest_row(addr, n, p, keys, next_row):
    """Digest a row of n bytes, the first at canonical byte p; the next row's start is fetched at its end."""
    total = U(0)
    head = (READ_TURN - p) & (READ_TURN - U(1))
    if n >= head + APART * READS:
        if head:
            total += digest_chunk(addr, head, p, keys, addr + head)
        long = (n - head) // (APART * READS) * (APART * READS)
        total += digest_long(addr + head, long, p + head, keys)
        addr, p, n = addr + head + long, p + head + long, n - head - long
    while n:
        m = min(
            n, READ_CHUNK - (p & (READ_CHUNK - U(1)))
        )  # chunks end at canonical multiples: within a block
        ahead = addr + m if m < n else next_row
        total += digest_chunk(addr, m, p, keys, ahead)
        addr, p, n = addr + m, p + m, n - m
    return total


@njit
def side_by_side(addr, rows, elems, stride, pos, pos_stride, itemsize, group, start, stop):
    """Count the descriptors from ``start`` that are columns of the same rows, one beside the other.

    None are where `digest_columns` cannot take them: few or long rows, or such as READ_TURN does not divide.
    """
    size, count = U(itemsize[start]), 0
    step = pos_stride[start] * size
    if rows[start] < ROWS or step & (READ_TURN - U(1)) or pos[start] * size & (READ_TURN - U(1)):
        return count
    at, p = addr[start], pos[start]
    for i in range(start, stop):
        n = elems[i] * size
        same = rows[i] == rows[start] and stride[i] == stride[start] and pos_stride[i] == pos_stride[start]
        if not (same and addr[i] == at and pos[i] == p and U(itemsize[i]) == size and group[i] >= 0):
            break
        if n == U(0) or n & (READ_TURN - U(1)) or n >= APART * READS:
            break
        at, p, count = at + n, p + elems[i], count + 1
    return count


@njit
def digest_columns(elems, group, out, a, p, rows, pitch, step, size, keys, start, stop):
    """Digest columns that lie side by side, row by row as they lie in memory, ROWS rows abreast.

    The first row of the first column is at address a and canonical byte p; rows are ``pitch`` bytes apart
    in memory and ``step`` canonically. Descriptors from ``start`` to ``stop`` are a column each, of ``elems``
    elements of ``size`` bytes; their digests are added to ``out``.
    """
    while rows:
        apart = U(1) if rows < ROWS else max(U(1), min(rows // ROWS, APART // max(U(1), pitch)))
        abreast = ROWS if rows >= ROWS else rows
        for r in range(apart):
            at, q = a + U(r) * pitch, p + U(r) * step
            for i in range(start, stop):
                n = elems[i] * size
                out[group[i]] += _turns(at, q, n, abreast, apart * pitch, apart * step, keys)
                at, q = at + n, q + n
        a, p, rows = a + apart * abreast * pitch, p + apart * abreast * step, rows - apart * abreast


@njit(inline="always")
def _turns(addr, p, n, abreast, pitch, step, keys):
    total = U(0)
    for k in range(n // READ_TURN):
        a, q = addr + U(k) * READ_TURN, p + U(k) * READ_TURN
        for _ in range(abreast):
            total += digest_lines_here(a, READ_TURN >> U(6), keys + (q & U(16380))) * block_weight(q)
            a, q = a + pitch, q + step
    return total
