"""How rows are copied: inner functions of `syncline.kernels.native`, compiled into its entry points."""

# pyright: reportMissingParameterType=false, reportCallIssue=false
# (numba infers these types where they are called, and passes intrinsics their first argument itself)

from __future__ import annotations

import numpy as np
from numba import njit

from syncline.kernels.native_ir import (
    copy_line,
    fetch_line,
    load_u8,
    load_u16,
    load_u32,
    load_u64,
    memcpy,
    store_u8,
    store_u16,
    store_u32,
    store_u64,
    stream_line,
)

U = np.uint64
# Shorter rows go through the caches: their ragged edges would cost more than streaming saves.
STREAM_FROM = U(256)
FOUR_FROM = U(1024)  # shorter rows are copied one by one, while the row that comes FAR rows later is fetched
FAR = U(8)
# Rows up to this length are copied four at a time, or with the next one fetched meanwhile.
NEAR_ROW = U(32768)
AHEAD = U(512)  # how far ahead of itself the copy of a longer row fetches
# A core follows several streams of addresses better than one: long runs are copied in several places that lie
# APART bytes apart, COPY_TURN bytes at each in turn; runs of one length that follow each other, abreast.
APART = U(65536)
COPIES, COPY_TURN = U(2), U(1024)
ABREAST, ABREAST_TURN, NEAR_RUN = 4, U(512), U(4096)


@njit(inline="always")
def copy_small(d, s, n):
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
def stream_row(d, s, n, ahead):
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
def stream_turn(d, s):
    """Copy COPY_TURN bytes to an aligned address."""
    for _ in range(COPY_TURN >> U(8)):
        stream_line(d, s)
        stream_line(d + U(64), s + U(64))
        stream_line(d + U(128), s + U(128))
        stream_line(d + U(192), s + U(192))
        d += U(256)
        s += U(256)


@njit(inline="always")
def stream_long(d, s, n):
    """Copy a long row in several places at once."""
    head = (U(64) - d) & U(63)
    if head:
        memcpy(d, s, head)
        d, s, n = d + head, s + head, n - head
    for _ in range(n // (APART * COPIES)):
        for i in range(APART // COPY_TURN):
            at = U(i) * COPY_TURN
            for _ in range(COPIES):
                stream_turn(d + at, s + at)
                at += APART
        d, s = d + APART * COPIES, s + APART * COPIES
    stream_row(d, s, n % (APART * COPIES), AHEAD)


@njit(inline="always")
def copy_row(d, s, n, ahead):
    """Copy a row as suits its length; what lies ``ahead`` bytes on may be fetched meanwhile."""
    if n <= U(8):
        copy_small(d, s, n)
    elif n < STREAM_FROM:
        memcpy(d, s, n)
    elif n < APART * COPIES:
        stream_row(d, s, n, ahead)
    else:
        stream_long(d, s, n)


@njit(inline="always")
def fetch_distance(rows, n, stride):
    """Return how far ahead of a row of n bytes to fetch: the next row, or a bit further on in this one."""
    return stride if rows > U(1) and n <= NEAR_ROW else AHEAD


@njit(inline="always")
def together(d, n, dd):
    """Return how many rows to copy at a time: 1, 2 or 4.

    Destination rows that lie a multiple of 4 KiB apart would get into each other's way.
    """
    if n < FOUR_FROM or n > NEAR_ROW or ((d | dd | n) & U(63)):
        return U(1)
    if clash(dd):
        return U(1)
    return U(2) if clash(dd + dd) or clash(dd + dd + dd) else U(4)


@njit(inline="always")
def clash(distance):
    """Return whether addresses so far apart agree in their last 12 bits, nearly."""
    return (distance + U(255)) & U(4095) < U(511)


@njit(inline="always")
def stream_rows(d, s, n, dd, ss, count):
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
def copy_rows(d, s, rows, n, dd, ss):
    """Copy one run: rows of n bytes at strides dd and ss."""
    count = together(d, n, dd)
    if count > U(1):
        for _ in range(rows // count):
            if count == U(4):
                stream_rows(d, s, n, dd, ss, U(4))
            else:
                stream_rows(d, s, n, dd, ss, U(2))
            d, s = d + dd * count, s + ss * count
        rows = rows % count
    near = fetch_distance(rows, n, ss)
    for _ in range(rows):
        copy_row(d, s, n, near)
        d, s = d + dd, s + ss


@njit(inline="always")
def short_lines(d, rows, n, dd):
    """Return whether rows are short, in whole lines, and many enough for `stream_short`."""
    return STREAM_FROM <= n < FOUR_FROM and rows >= FAR and (d | dd | n) & U(63) == U(0)


@njit
def stream_short(d, s, rows, n, dd, ss, after):
    """Copy rows for which `short_lines` holds; ``after`` is where the next run's rows begin."""
    for r in range(rows):
        left = rows - U(r)
        far = s + FAR * ss if left > FAR else after + (FAR - left) * ss
        for k in range(n >> U(6)):
            fetch_line(far + (U(k) << U(6)))
        for k in range(n >> U(6)):
            stream_line(d + (U(k) << U(6)), s + (U(k) << U(6)))
        d, s = d + dd, s + ss


@njit(inline="always")
def alike(dst, rows, nbytes, i):
    """Return whether the ABREAST runs from i on are single rows of one middling length, in whole lines."""
    n = nbytes[i]
    if n < NEAR_RUN or n >= APART * COPIES or n & U(63):
        return False
    same = True
    for k in range(ABREAST):
        same &= rows[i + k] == U(1) and nbytes[i + k] == n and dst[i + k] & U(63) == U(0)
    return same


@njit(inline="always")
def stream_abreast(dst, src, n, i):
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


@njit(inline="always")
def copy_lines(d, s, n):
    """Copy a short piece through the caches: its ragged edges would cost more than streaming saves."""
    if n <= U(8):
        copy_small(d, s, n)
        return
    for _ in range(n >> U(6)):
        copy_line(d, s)
        d += U(64)
        s += U(64)
    if n & U(63):
        memcpy(d, s, n & U(63))
