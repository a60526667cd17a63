"""The compiled kernels behind `syncline.kernels.host`. Import it only there: it loads numba.

Signatures are explicit, so that importing this module compiles (or loads from numba's cache) exactly the
entry points and nothing is compiled later; inner functions become part of them. Integers are uint64 except
where said, because numba turns a mix of signed and unsigned into floats. Columns are as in
`syncline.kernels.host`; ``keys`` is the address of the digest's table of keys.
"""

# pyright: reportMissingParameterType=false, reportCallIssue=false
# (numba infers these types from the signatures below, and passes intrinsics their first argument itself)

from __future__ import annotations

import numpy as np
from numba import njit, types

from syncline.kernels.native_copy import (
    ABREAST,
    STREAM_FROM,
    alike,
    copy_lines,
    copy_rows,
    short_lines,
    stream_abreast,
    stream_row,
    stream_short,
)
from syncline.kernels.native_digest import digest_chunk, digest_columns, digest_row, side_by_side
from syncline.kernels.native_ir import (
    brain_to_single,
    fence,
    half_to_single,
    load_u8,
    load_u16,
    load_u32,
    memcmp,
    single_to_brain,
    single_to_half,
    store_u16,
    store_u32,
)

U = np.uint64
# Copied, then digested while still in the nearest cache; the next chunk is fetched meanwhile.
COPY_CHUNK = U(4096)

_words = types.Array(types.uint64, 1, "C", readonly=True)
_sizes = types.Array(types.uint8, 1, "C", readonly=True)
_groups = types.Array(types.int32, 1, "C", readonly=True)
_sums = types.Array(types.uint64, 1, "C")
_int, _u64 = types.int64, types.uint64


@njit(types.void(_words, _words, _words, _words, _words, _words, _int, _int), nogil=True, cache=True)
def copy_runs(dst, src, rows, nbytes, dst_stride, src_stride, start, stop):
    """Do as `syncline.kernels.host.copy_runs` says."""
    i = start
    while i < stop:
        if i + ABREAST <= stop and alike(dst, rows, nbytes, i):
            stream_abreast(dst, src, nbytes[i], i)
            i += ABREAST
        elif short_lines(dst[i], rows[i], nbytes[i], dst_stride[i]):
            after = src[i + 1] if i + 1 < stop else src[i]
            stream_short(dst[i], src[i], rows[i], nbytes[i], dst_stride[i], src_stride[i], after)
            i += 1
        else:
            copy_rows(dst[i], src[i], rows[i], nbytes[i], dst_stride[i], src_stride[i])
            i += 1
    fence()


@njit(
    types.void(_words, _words, _words, _words, _words, _words, _sizes, _groups, _sums, _u64, _int, _int),
    nogil=True,
    cache=True,
)
def digest_runs(addr, rows, elems, stride, pos, pos_stride, itemsize, group, out, keys, start, stop):
    """Do as `syncline.kernels.host.digest_runs` says."""
    i = start
    while i < stop:
        if group[i] < 0:
            i += 1
            continue
        size = U(itemsize[i])
        a, p, step = addr[i], pos[i] * size, pos_stride[i] * size
        columns = side_by_side(addr, rows, elems, stride, pos, pos_stride, itemsize, group, i, stop)
        if columns:
            digest_columns(elems, group, out, a, p, rows[i], stride[i], step, size, keys, i, i + columns)
            i += columns
            continue
        total = U(0)
        for _ in range(rows[i]):
            total += digest_row(a, elems[i] * size, p, keys, a + stride[i])
            a += stride[i]
            p += step
        out[group[i]] += total
        i += 1


@njit
def _copy_digest_row(d, s, n, p, keys, next_s):
    total = U(0)
    while n:
        m = min(n, COPY_CHUNK - (p & (COPY_CHUNK - U(1))))
        ahead = s + m if m < n else next_s
        if m < STREAM_FROM:
            copy_lines(d, s, m)
        else:
            stream_row(d, s, m, ahead - s)
        total += digest_chunk(s, m, p, keys, ahead)
        d, s, p, n = d + m, s + m, p + m, n - m
    return total


@njit(
    types.void(
        _words,
        _words,
        _words,
        _words,
        _words,
        _words,
        _words,
        _words,
        _sizes,
        _groups,
        _sums,
        _u64,
        _int,
        _int,
    ),
    nogil=True,
    cache=True,
)
def copy_digest_runs(  # noqa: PLR0917 -- a table's columns
    dst, src, rows, elems, dst_stride, src_stride, pos, pos_stride, itemsize, group, out, keys, start, stop
):
    """Do as `syncline.kernels.host.copy_digest_runs` says."""
    for i in range(start, stop):
        size = U(itemsize[i])
        d, s, p, n = dst[i], src[i], pos[i] * size, elems[i] * size
        dd, ss = dst_stride[i], src_stride[i]
        if group[i] < 0:
            copy_rows(d, s, rows[i], n, dd, ss)
            continue
        total = U(0)
        for _ in range(rows[i]):
            total += _copy_digest_row(d, s, n, p, keys, s + ss)
            d, s, p = d + dd, s + ss, p + pos_stride[i] * size
        out[group[i]] += total
    fence()


@njit(inline="always")
def _cast_elements(code, d, s, n):
    if code == 1:
        for k in range(n):
            store_u16(d, U(k), single_to_brain(load_u32(s, U(k))))
    elif code == 2:
        for k in range(n):
            store_u32(d, U(k), brain_to_single(load_u16(s, U(k))))
    elif code == 3:
        for k in range(n):
            store_u16(d, U(k), single_to_half(load_u32(s, U(k))))
    else:
        for k in range(n):
            store_u32(d, U(k), half_to_single(load_u16(s, U(k))))


@njit
def _cast_digest_row(code, d, s, n, p, keys, digested, in_place, src_size, size, next_s):
    """Cast n elements; with in_place false, d is a buffer of one chunk that every chunk overwrites."""
    total = U(0)
    while n:
        m = min(n, (COPY_CHUNK - (p & (COPY_CHUNK - U(1)))) // size)
        _cast_elements(code, d, s, m)
        if digested:
            total += digest_chunk(d, m * size, p, keys, s + m * src_size if m < n else next_s)
        s, p, n = s + m * src_size, p + m * size, n - m
        if in_place:
            d += m * size
    return total


@njit(
    types.void(
        _int,
        _words,
        _words,
        _words,
        _words,
        _words,
        _words,
        _words,
        _words,
        _groups,
        _sums,
        _u64,
        _u64,
        _int,
        _int,
    ),
    nogil=True,
    cache=True,
)
def cast_digest_runs(  # noqa: PLR0917 -- a table's columns
    code,
    dst,
    src,
    rows,
    elems,
    dst_stride,
    src_stride,
    pos,
    pos_stride,
    group,
    out,
    keys,
    buffer,
    start,
    stop,
):
    """Cast by code (`syncline.kernels.host.CASTS`); with a buffer (an address, not 0) nothing goes to dst."""
    size = U(2) if code == 1 or code == 3 else U(4)  # noqa: PLR1714 -- numba has no fast `in` over a tuple here
    src_size = U(6) - size
    for i in range(start, stop):
        d, s, p = dst[i], src[i], pos[i] * size
        total = U(0)
        for _ in range(rows[i]):
            target = buffer if buffer else d
            total += _cast_digest_row(
                code,
                target,
                s,
                elems[i],
                p,
                keys,
                group[i] >= 0,
                not buffer,
                src_size,
                size,
                s + src_stride[i],
            )
            d, s, p = d + dst_stride[i], s + src_stride[i], p + pos_stride[i] * size
        if group[i] >= 0:
            out[group[i]] += total


@njit(inline="always")
def _first_byte(d, s, n):
    for k in range(n):
        if load_u8(d, U(k)) != load_u8(s, U(k)):
            return U(k)
    return n


@njit(
    types.UniTuple(_int, 3)(_words, _words, _words, _words, _words, _words, _int, _int),
    nogil=True,
    cache=True,
)
def first_difference(dst, src, rows, nbytes, dst_stride, src_stride, start, stop):
    """Return (run, row, byte in the row) of the first bytes that differ, or (-1, -1, -1)."""
    for i in range(start, stop):
        d, s = dst[i], src[i]
        for r in range(rows[i]):
            if memcmp(d, s, nbytes[i]) != 0:
                return (i, np.int64(r), np.int64(_first_byte(d, s, nbytes[i])))
            d += dst_stride[i]
            s += src_stride[i]
    return (np.int64(-1), np.int64(-1), np.int64(-1))
