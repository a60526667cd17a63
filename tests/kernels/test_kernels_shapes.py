"""Shapes that the kernels treat specially: long runs, aligned rows of a column cut, runs of one length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.kernels import host, reference

SIZE = 3 << 20
SRC = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
LONG = st.sampled_from([128 << 10, 256 << 10, 384 << 10, 1 << 20]).flatmap(
    lambda n: st.integers(n - 70, n + 5000)
)


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def aligned(nbytes: int = SIZE) -> np.ndarray:
    """Return zeros whose first byte is at a multiple of 64."""
    raw = np.zeros(nbytes + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + nbytes]


def check_copy(*table: np.ndarray) -> None:
    """Copy by the kernel and by the reference, into memory of their own; ``table`` is in offsets."""
    d, s, rows, n, dd, ss = table
    got, want = aligned(), aligned()
    host.copy_runs(d + got.ctypes.data, s + SRC.ctypes.data, rows, n, dd, ss)
    reference.copy_runs(d + want.ctypes.data, s + SRC.ctypes.data, rows, n, dd, ss)
    assert np.array_equal(got, want)


@settings(max_examples=40, deadline=None)
@given(LONG, st.integers(0, 130), st.integers(0, 130))
def test_long_runs_are_copied_in_several_places(n: int, d: int, s: int) -> None:
    check_copy(column(d), column(s), column(1), column(n), column(0), column(0))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([64, 256, 768, 960, 1024, 2048, 4096, 5632, 16384, 32768, 33024]),
    st.integers(0, 19),
    st.sampled_from([0, 64, 128, 2048, 8192]),
    st.integers(0, 200),
    st.sampled_from([0, 1, 64]),
)
def test_rows_of_a_column_cut_are_copied_together(n: int, rows: int, gap: int, skip: int, odd: int) -> None:
    rows = min(rows, (SIZE - 4096) // (n + gap), (SIZE - 4096) // (2 * n + odd))
    check_copy(column(64), column(skip), column(rows), column(n), column(n + gap), column(2 * n + odd))
    upside_down = 64 + (n + gap) * max(rows - 1, 0)
    check_copy(column(upside_down), column(skip), column(rows), column(n), column(-n - gap), column(n))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([4032, 4096, 4160, 24576, 65536, 131072]),
    st.integers(1, 13),
    st.permutations(range(13)),
    st.sampled_from([0, 8, 64]),
    st.integers(0, 12),
)
def test_runs_of_one_length_are_copied_abreast(
    n: int, count: int, order: list[int], gap: int, other: int
) -> None:
    count = min(count, SIZE // (n + gap))
    place = np.array([one for one in order if one < count], np.int64)
    lengths = np.full(count, n, np.int64)
    if other < count:
        lengths[other] = n - 64  # one that is not like its neighbours
    rows, none = np.ones(count, np.int64), np.zeros(count, np.int64)
    check_copy(np.arange(count) * (n + gap), place * n, rows, lengths, none, none)
    check_copy(np.arange(count) * (n + gap), place * n, rows * (other != 3), lengths, none, none)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@settings(max_examples=25, deadline=None)
@given(LONG, st.integers(0, 70), st.integers(0, 40000))
def test_long_runs_are_digested_in_several_places(itemsize: int, n: int, s: int, position: int) -> None:
    elems = n // itemsize
    where = (
        column(SRC.ctypes.data + s),
        column(1),
        column(elems),
        column(0),
        column(position),
        column(0),
        np.full(1, itemsize, np.uint8),
        np.zeros(1, np.int32),
    )
    want = reference.digest_runs(*where, 1)
    assert host.digest_runs(*where, np.zeros(1, np.uint64)) == want
    got = aligned()
    sides = (column(got.ctypes.data), column(SRC.ctypes.data + s), column(1), column(elems), column(0))
    total = host.copy_digest_runs(*sides, column(0), *where[4:], np.zeros(1, np.uint64))
    assert total == want
    assert np.array_equal(got[: elems * itemsize], SRC[s : s + elems * itemsize])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([128, 256, 768, 2048, 5632, 100]), min_size=1, max_size=4),
    st.integers(0, 70),
    st.sampled_from([0, 128, 2048, 10]),
    st.sampled_from([0, 256, 250]),
    st.sampled_from([0, 1, 128, 40000]),
    st.booleans(),
)
def test_columns_side_by_side_are_digested_row_by_row(
    widths: list[int], rows: int, pad: int, gap: int, position: int, hidden: bool
) -> None:
    """``widths`` in elements of 2 bytes; ``pad`` bytes behind a row, ``gap`` elements canonically."""
    pitch = 2 * sum(widths) + pad
    rows = min(rows, (SIZE - 64) // pitch)
    at = np.cumsum([0, *widths[:-1]])
    count = len(widths)
    group = np.arange(count, dtype=np.int32)
    if hidden:
        group[count // 2] = -1
    where = (
        SRC.ctypes.data + 3 + 2 * at,
        np.full(count, rows),
        np.array(widths),
        np.full(count, pitch),
        position + at,
        np.full(count, sum(widths) + gap),
        np.full(count, 2, np.uint8),
        group,
    )
    want = reference.digest_runs(*where, count)
    assert np.array_equal(host.digest_runs(*where, np.zeros(count, np.uint64)), want)
    upside_down = (where[0] + pitch * max(rows - 1, 0), where[1], where[2], -where[3], *where[4:])
    want = reference.digest_runs(*upside_down, count)
    assert np.array_equal(host.digest_runs(*upside_down, np.zeros(count, np.uint64)), want)
