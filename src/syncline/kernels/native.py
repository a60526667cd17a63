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

from syncline.kernels.native_ir import (
    brain_to_single,
    copy_line,
    digest_lines,
    digest_lines_here,
    fence,
    fetch_line,
    half_to_single,
    load_u8,
    load_u16,
    load_u32,
    load_u64,
    memcmp,
    memcpy,
    single_to_brain,
    single_to_half,
    store_u8,
    store_u16,
    store_u32,
    store_u64,
    stream_line,
)

U = np.uint64
FOUR_FROM = U(1024)  # shorter rows are copied one by one
STREAM_FROM = U(
    256
)  # shorter rows go through the caches: their ragged edges would cost more than streaming saves
COPY_CHUNK = U(
    4096
)  # copied, then digested while still in the nearest cache; the next chunk is fetched meanwhile
NEAR_ROW = U(
    32768
)  # rows up to this length are copied four at a time, or with the next one fetched meanwhile
AHEAD = U(512)  # how far ahead of itself the copy of a longer row fetches
READ_CHUNK = U(1024)  # how far ahead a pass that only reads fetches
# A core follows several streams of addresses better than one: long runs are worked on in several places that
# lie APART bytes apart, some bytes at each in turn.
APART = U(65536)
COPIES, COPY_TURN = U(2), U(1024)  # places, and bytes at each, of a copy
READS, READ_TURN = U(4), U(256)  # and of a pass that only reads
ABREAST, ABREAST_TURN = 4, U(512)  # runs of one length that follow each other are copied in turns
NEAR_RUN = U(4096)  # if they are at least so long

_words = types.Array(types.uint64, 1, "C", readonly=True)
_sizes = types.Array(types.uint8, 1, "C", readonly=True)
_groups = types.Array(types.int32, 1, "C", readonly=True)
_sums = types.Array(types.uint64, 1, "C")
_int, _u64 = types.int64, types.uint64


@njit(inline="always")
def _copy_small(d, s, n):
    """Copy a row of at most 8 bytes: the elements of a transposed tensor come one by one."""
    if n == U(2):
        store_u16(d, U(0), load_u16(s, U(0)))
    elif n == U(4):
        store_u32(d, U(0), load_u32(s, U(0)))
    elif n == U(8):
        store_u64(d, U(0), load_u64(s, U(0)))
    else:
        for k in range(n):
            store_u8(d, U(k), load_u8(s, U(k)))


@njit(inline="always")
def _stream_row(d, s, n, ahead):
    """Copy a row by whole cache lines past the caches, and its ragged edges through them.

    What lies ``ahead`` bytes on is fetched meanwhile: processors do not guess across pages, and a column of a
    matrix has every row in another one.
    """
    head = (U(64) - d) & U(63)
    if head:
        memcpy(d, s, head)
        d += head
        s += head
        n -= head
    for _ in range(n >> U(8)):
        p = s + ahead
        fetch_line(p)
        fetch_line(p + U(64))
        fetch_line(p + U(128))
        fetch_line(p + U(192))
        stream_line(d, s)
        stream_line(d + U(64), s + U(64))
        stream_line(d + U(128), s + U(128))
        stream_line(d + U(192), s + U(192))
        d += U(256)
        s += U(256)
    for _ in range((n & U(255)) >> U(6)):
        stream_line(d, s)
        d += U(64)
        s += U(64)
    if n & U(63):
        memcpy(d, s, n & U(63))


@njit(inline="always")
def _stream_turn(d, s):
    """Copy COPY_TURN bytes to an aligned address."""
    for _ in range(COPY_TURN >> U(8)):
        stream_line(d, s)
        stream_line(d + U(64), s + U(64))
        stream_line(d + U(128), s + U(128))
        stream_line(d + U(192), s + U(192))
        d += U(256)
        s += U(256)


@njit(inline="always")
def _stream_long(d, s, n):
    """Copy a long row in several places at once."""
    head = (U(64) - d) & U(63)
    if head:
        memcpy(d, s, head)
        d, s, n = d + head, s + head, n - head
    for _ in range(n // (APART * COPIES)):
        for i in range(APART // COPY_TURN):
            at = U(i) * COPY_TURN
            for _ in range(COPIES):
                _stream_turn(d + at, s + at)
                at += APART
        d, s = d + APART * COPIES, s + APART * COPIES
    _stream_row(d, s, n % (APART * COPIES), AHEAD)


@njit(inline="always")
def _copy_row(d, s, n, ahead):
    if n <= U(8):
        _copy_small(d, s, n)
    elif n < STREAM_FROM:
        memcpy(d, s, n)
    elif n < APART * COPIES:
        _stream_row(d, s, n, ahead)
    else:
        _stream_long(d, s, n)


@njit(inline="always")
def _ahead(rows, n, stride):
    """Return how far ahead of a row of n bytes to fetch: the next row, or a bit further on in this one."""
    return stride if rows > U(1) and n <= NEAR_ROW else AHEAD


@njit(inline="always")
def _together(d, n, dd):
    """Return how many rows to copy at a time: 1, 2 or 4.

    Destination rows that lie a multiple of 4 KiB apart would get into each other's way.
    """
    if n < FOUR_FROM or n > NEAR_ROW or ((d | dd | n) & U(63)):
        return U(1)
    if _clash(dd):
        return U(1)
    return U(2) if _clash(dd + dd) or _clash(dd + dd + dd) else U(4)


@njit(inline="always")
def _clash(distance):
    return (distance + U(255)) & U(4095) < U(511)


@njit(inline="always")
def _stream_rows(d, s, n, dd, ss, count):
    """Copy 2 or 4 rows of whole cache lines at once, and fetch as many that come next."""
    ahead = ss * count
    for _ in range(n >> U(6)):
        a, b = d, s
        for _ in range(count):
            fetch_line(b + ahead)
            stream_line(a, b)
            a, b = a + dd, b + ss
        d, s = d + U(64), s + U(64)


@njit
def _copy_rows(d, s, rows, n, dd, ss):
    count = _together(d, n, dd)
    if count > U(1):
        for _ in range(rows // count):
            if count == U(4):
                _stream_rows(d, s, n, dd, ss, U(4))
            else:
                _stream_rows(d, s, n, dd, ss, U(2))
            d, s = d + dd * count, s + ss * count
        rows = rows % count
    ahead = _ahead(rows, n, ss)
    for _ in range(rows):
        _copy_row(d, s, n, ahead)
        d, s = d + dd, s + ss


@njit(inline="always")
def _alike(dst, rows, nbytes, i):
    """Return whether the ABREAST runs from i on are single rows of one middling length, in whole lines."""
    n = nbytes[i]
    if n < NEAR_RUN or n >= APART * COPIES or n & U(63):
        return False
    same = True
    for k in range(ABREAST):
        same &= rows[i + k] == U(1) and nbytes[i + k] == n and dst[i + k] & U(63) == U(0)
    return same


@njit(inline="always")
def _stream_abreast(dst, src, n, i):
    """Copy ABREAST runs of n bytes in turns, as a long run is copied in several places."""
    at = U(0)
    while at < n:
        turn = min(ABREAST_TURN, n - at)
        for k in range(ABREAST):
            d, s = dst[i + k] + at, src[i + k] + at
            for _ in range(turn >> U(6)):
                stream_line(d, s)
                d, s = d + U(64), s + U(64)
        at += turn


@njit(types.void(_words, _words, _words, _words, _words, _words, _int, _int), nogil=True, cache=True)
def copy_runs(dst, src, rows, nbytes, dst_stride, src_stride, start, stop):
    """Do as `syncline.kernels.host.copy_runs` says."""
    i = start
    while i < stop:
        if i + ABREAST <= stop and _alike(dst, rows, nbytes, i):
            _stream_abreast(dst, src, nbytes[i], i)
            i += ABREAST
        else:
            _copy_rows(dst[i], src[i], rows[i], nbytes[i], dst_stride[i], src_stride[i])
            i += 1
    fence()


@njit(inline="always")
def _block_weight(p):
    """Return the odd weight of the block that canonical byte p lies in."""
    x = (p >> U(14)) + U(0x9E3779B97F4A7C15)
    x = (x ^ (x >> U(30))) * U(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U(27))) * U(0x94D049BB133111EB)
    return (x ^ (x >> U(31))) | U(1)


@njit(inline="always")
def _digest_bytes(addr, n, p, keys):
    """Sum over n < 4 bytes that lie within one word, the first at canonical byte p."""
    bits = U(0)
    for k in range(n):
        bits |= U(load_u8(addr, U(k))) << (((p + U(k)) & U(3)) << U(3))
    return bits * U(load_u32(keys, (p >> U(2)) & U(4095)))


@njit(inline="always")
def _digest_words(addr, n, p, keys):
    """Sum over n < 16 whole words, the first at canonical byte p."""
    total = U(0)
    key = keys + (p & U(16380))
    for k in range(n):
        total += U(load_u32(addr, U(k))) * U(load_u32(key, U(k)))
    return total


@njit
def _digest_chunk(addr, n, p, keys, read_ahead):
    """Digest n bytes that lie within one block, the first at canonical byte p."""
    total = U(0)
    block = _block_weight(p)
    head = min(n, (U(4) - p) & U(3))
    if head:
        total += _digest_bytes(addr, head, p, keys)
        addr, p, n = addr + head, p + head, n - head
    lines = n >> U(6)
    if lines:
        total += digest_lines(addr, lines, keys + (p & U(16380)), read_ahead)
        addr, p, n = addr + (lines << U(6)), p + (lines << U(6)), n & U(63)
    if n >= U(4):
        total += _digest_words(addr, n >> U(2), p, keys)
        addr, p, n = addr + (n & U(60)), p + (n & U(60)), n & U(3)
    if n:
        total += _digest_bytes(addr, n, p, keys)
    return total * block


@njit
def _digest_long(addr, n, p, keys):
    """Digest a multiple of APART * READS bytes, the first at a canonical multiple of READ_TURN."""
    total = U(0)
    for _ in range(n // (APART * READS)):
        for i in range(APART // READ_TURN):
            at = U(i) * READ_TURN
            for _ in range(READS):
                key = keys + ((p + at) & U(16380))
                total += digest_lines_here(addr + at, READ_TURN >> U(6), key) * _block_weight(p + at)
                at += APART
        addr, p = addr + APART * READS, p + APART * READS
    return total


@njit
def _digest_row(addr, n, p, keys, next_row):
    total = U(0)
    head = (READ_TURN - p) & (READ_TURN - U(1))
    if n >= head + APART * READS:
        if head:
            total += _digest_chunk(addr, head, p, keys, addr + head)
        long = (n - head) // (APART * READS) * (APART * READS)
        total += _digest_long(addr + head, long, p + head, keys)
        addr, p, n = addr + head + long, p + head + long, n - head - long
    while n:
        m = min(
            n, READ_CHUNK - (p & (READ_CHUNK - U(1)))
        )  # chunks end at canonical multiples: within a block
        ahead = addr + m if m < n else next_row
        total += _digest_chunk(addr, m, p, keys, ahead)
        addr, p, n = addr + m, p + m, n - m
    return total


@njit(
    types.void(_words, _words, _words, _words, _words, _words, _sizes, _groups, _sums, _u64, _int, _int),
    nogil=True,
    cache=True,
)
def digest_runs(addr, rows, elems, stride, pos, pos_stride, itemsize, group, out, keys, start, stop):
    """Do as `syncline.kernels.host.digest_runs` says."""
    for i in range(start, stop):
        if group[i] < 0:
            continue
        size = U(itemsize[i])
        a, p, n = addr[i], pos[i] * size, elems[i] * size
        total = U(0)
        for _ in range(rows[i]):
            total += _digest_row(a, n, p, keys, a + stride[i])
            a += stride[i]
            p += pos_stride[i] * size
        out[group[i]] += total


@njit(inline="always")
def _copy_lines(d, s, n):
    """Copy a short piece through the caches: its ragged edges would cost more than streaming saves."""
    if n <= U(8):
        _copy_small(d, s, n)
        return
    for _ in range(n >> U(6)):
        copy_line(d, s)
        d += U(64)
        s += U(64)
    if n & U(63):
        memcpy(d, s, n & U(63))


@njit
def _copy_digest_row(d, s, n, p, keys, next_s):
    total = U(0)
    while n:
        m = min(n, COPY_CHUNK - (p & (COPY_CHUNK - U(1))))
        ahead = s + m if m < n else next_s
        if m < STREAM_FROM:
            _copy_lines(d, s, m)
        else:
            _stream_row(d, s, m, ahead - s)
        total += _digest_chunk(s, m, p, keys, ahead)
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
            _copy_rows(d, s, rows[i], n, dd, ss)
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
            total += _digest_chunk(d, m * size, p, keys, s + m * src_size if m < n else next_s)
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
