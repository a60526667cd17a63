"""The compiled kernels against the numpy reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import TransportError
from syncline.kernels import host, reference

SIZE = 1 << 18
ITEMSIZES = (1, 2, 4, 8)


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def noise(seed: int, nbytes: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@st.composite
def runs(draw: st.DrawFn, itemsize: int = 1, reverse: bool = True) -> tuple[int, int, int, int, int, int]:
    """Offsets, rows, elements a row and strides of one run that stays inside SIZE bytes on both sides."""
    elems = draw(st.one_of(st.integers(0, 40), st.integers(0, 6000 // itemsize)))
    rows = draw(st.integers(0, 12))
    width = elems * itemsize
    sides = []
    for _ in range(2):
        stride = width + draw(st.integers(0, 300))
        span = stride * max(rows - 1, 0) + width
        base = draw(st.integers(0, min(300, SIZE - span)))
        if reverse and draw(st.booleans()):
            base, stride = base + stride * max(rows - 1, 0), -stride
        sides += [base, stride]
    return sides[0], sides[2], rows, elems, sides[1], sides[3]


@settings(max_examples=300, deadline=None)
@given(st.lists(runs(), min_size=1, max_size=1), st.integers(0, 9))
def test_copies_like_the_reference_and_nothing_else(table: list, seed: int) -> None:
    src, dst, want = noise(seed), noise(seed + 100), noise(seed + 100)
    d, s, rows, n, dd, ss = (column(*c) for c in zip(*table, strict=True))
    host.copy_runs(d + dst.ctypes.data, s + src.ctypes.data, rows, n, dd, ss)
    reference.copy_runs(d + want.ctypes.data, s + src.ctypes.data, rows, n, dd, ss)
    assert np.array_equal(dst, want)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(ITEMSIZES), st.integers(0, 9))
def test_digests_and_copies_like_the_reference(data: st.DataObject, itemsize: int, seed: int) -> None:
    d, s, rows, elems, dd, ss = (column(v) for v in data.draw(runs(itemsize)))
    border = 16384 // itemsize
    near = st.integers(0, 5).map(lambda k: k * border)
    pos = column(data.draw(st.integers(0, 1 << 40) | near) + data.draw(st.integers(0, 70)))
    step = column(data.draw(st.integers(int(elems[0]), 20000)))
    src, dst, want = noise(seed), noise(seed + 100), noise(seed + 100)
    sizes, group = np.full(1, itemsize, np.uint8), np.zeros(1, np.int32)

    expected = reference.digest_runs(src.ctypes.data + s, rows, elems, ss, pos, step, sizes, group, 1)
    where = (pos, step, sizes, group)
    got = host.digest_runs(src.ctypes.data + s, rows, elems, ss, *where, np.zeros(1, np.uint64))
    assert got == expected

    sides = (dst.ctypes.data + d, src.ctypes.data + s, rows, elems, dd, ss)
    got = host.copy_digest_runs(*sides, *where, np.zeros(1, np.uint64))
    reference.copy_runs(want.ctypes.data + d, src.ctypes.data + s, rows, elems * itemsize, dd, ss)
    assert np.array_equal(dst, want)
    assert got == expected


def test_digest_of_known_bytes_never_changes() -> None:
    """The digest is a wire format: one pinned number, and others from the formula in Python integers."""

    def mix(x: int) -> int:
        mask = (1 << 64) - 1
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    data, first = noise(3, 40001), 16384 * 7 - 1003
    total = 0
    for k, byte in enumerate(data.tolist()):
        word, shift = divmod(first + k, 4)
        key = (mix((word & 4095) ^ 0x53594E434C494E45) >> 32) | 1
        total += (byte << (8 * shift)) * key * (mix(word >> 12) | 1)
    expected = total % 2**64
    assert reference.digest_bytes(data, first) == expected
    one = (column(data.ctypes.data), column(1), column(40001), column(0), column(first), column(0))
    assert int(host.digest_runs(*one, 1, np.zeros(1, np.int32), np.zeros(1, np.uint64))[0]) == expected
    assert reference.digest_bytes(np.arange(256, dtype=np.uint8), 5) == 14918550964426937042


@settings(max_examples=120, deadline=None)
@given(st.data(), st.sampled_from(ITEMSIZES), st.integers(1, 90), st.integers(1, 700))
def test_digest_adds_up_over_any_sharding(
    data: st.DataObject, itemsize: int, height: int, width: int
) -> None:
    tensor = noise(height + width, height * width * itemsize)
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=4))}) for n in (height, width)]
    boxes = [
        (a, b, c, d)
        for a, b in zip(cuts[0], cuts[0][1:], strict=False)
        for c, d in zip(cuts[1], cuts[1][1:], strict=False)
    ]
    top, bottom, left, right = (np.array(c, np.int64) for c in zip(*boxes, strict=True))
    corner = top * width + left
    strides = (np.full(len(boxes), width * itemsize), np.full(len(boxes), width))
    table = (
        tensor.ctypes.data + corner * itemsize,
        bottom - top,
        right - left,
        strides[0],
        corner,
        strides[1],
    )
    groups = np.arange(len(boxes), dtype=np.int32)
    parts = host.digest_runs(*table, itemsize, groups, np.zeros(len(boxes), np.uint64))
    assert reference.combine(parts) == reference.digest_bytes(tensor, 0)


@pytest.mark.parametrize("itemsize", ITEMSIZES)
def test_digest_sees_flips_zeroings_and_swaps(itemsize: int) -> None:
    rng = np.random.default_rng(itemsize)
    count = 30000
    tensor = noise(itemsize, count * itemsize)
    elems = tensor.reshape(count, itemsize)
    one = (column(tensor.ctypes.data), column(1), column(count), column(0), column(12345), column(0))

    def digest() -> int:
        return int(host.digest_runs(*one, itemsize, np.zeros(1, np.int32), np.zeros(1, np.uint64))[0])

    clean, missed = digest(), 0
    for trial in range(600):
        i, j = rng.integers(0, count, 2)
        before = elems[[i, j]].copy()
        if trial % 3 == 0:
            elems[i, rng.integers(itemsize)] ^= np.uint8(1 << rng.integers(8))
        elif trial % 3 == 1:
            elems[i] = 0
        else:
            elems[[i, j]] = elems[[j, i]]
        changed = not np.array_equal(before, elems[[i, j]])
        missed += changed and digest() == clean
        elems[[i, j]] = before
    assert missed == 0
    assert digest() == clean


def test_swap_of_neighbours_is_seen_wherever_they_lie_in_a_word() -> None:
    tensor = np.arange(1, 4097, dtype=np.uint16)
    clean = reference.digest_elements(tensor, 3)
    for i in range(64):
        swapped = tensor.copy()
        swapped[[i, i + 1]] = swapped[[i + 1, i]]
        assert reference.digest_elements(swapped, 3) != clean


def test_groups_accumulate_and_negative_groups_are_skipped() -> None:
    src, dst = noise(1), np.zeros(SIZE, np.uint8)
    k = np.arange(6, dtype=np.int64) * 4096
    rows, elems, zero = np.ones(6, np.int64), np.full(6, 1024, np.int64), np.zeros(6, np.int64)
    group = np.array([0, 1, -1, 1, 0, -1], np.int32)
    table = (dst.ctypes.data + k, src.ctypes.data + k, rows, elems, zero, zero, k // 4, zero)
    out = host.copy_digest_runs(*table, 4, group, np.zeros(2, np.uint64))
    assert np.array_equal(dst[: 6 * 4096], src[: 6 * 4096])
    for g in range(2):
        want = sum(
            reference.digest_bytes(src[i * 4096 : (i + 1) * 4096], i * 4096)
            for i in np.flatnonzero(group == g)
        )
        assert int(out[g]) == want % 2**64


def test_slices_of_a_table_do_their_part_only() -> None:
    src, dst = noise(1), np.zeros(SIZE, np.uint8)
    k = np.arange(8, dtype=np.int64) * 1000
    table = (dst.ctypes.data + k, src.ctypes.data + k, np.ones(8, np.int64), np.full(8, 1000), 0 * k, 0 * k)
    host.copy_runs(*table, 2, 5)
    want = np.zeros(SIZE, np.uint8)
    want[2000:5000] = src[2000:5000]
    assert np.array_equal(dst, want)


def test_columns_may_be_unsigned_and_strided_views() -> None:
    src, dst = noise(1), np.zeros(SIZE, np.uint8)
    mixed = np.array([[dst.ctypes.data, 7], [src.ctypes.data, 7]], np.uint64)
    host.copy_runs(mixed[0, ::2], mixed[1, ::2], column(1), np.array([5000], np.uint64), column(0), column(0))
    assert np.array_equal(dst[:5000], src[:5000])
    assert not dst[5000:].any()


@pytest.mark.parametrize(
    "change",
    [
        {"rows": column(1, 1)},
        {"rows": np.ones(1, np.int32)},
        {"rows": np.ones(1)},
        {"rows": [1]},
        {"start": 1, "stop": 0},
        {"stop": 2},
        {"start": -1},
    ],
)
def test_refuses_tables_that_cannot_be_right(change: dict) -> None:
    src, dst = noise(1), np.zeros(SIZE, np.uint8)
    good = {
        "dst": column(dst.ctypes.data),
        "src": column(src.ctypes.data),
        "rows": column(1),
        "nbytes": column(64),
        "dst_stride": column(0),
        "src_stride": column(0),
    }
    with pytest.raises(TransportError):
        host.copy_runs(**(good | change))
    assert not dst.any()


def test_refuses_a_group_without_an_accumulator() -> None:
    src = noise(1)
    one = (column(src.ctypes.data), column(1), column(8), column(0), column(0), column(0))
    with pytest.raises(TransportError, match="accumulator"):
        host.digest_runs(*one, 1, np.ones(1, np.int32), np.zeros(1, np.uint64))


def test_first_difference_names_run_row_and_byte() -> None:
    src = noise(1)
    dst = src.copy()
    base = column(0, 50000)
    table = (
        dst.ctypes.data + base,
        src.ctypes.data + base,
        column(7, 9),
        column(999, 1001),
        column(1200, 1300),
        column(1200, 1300),
    )
    assert host.first_difference(*table) is None
    dst[50000 + 4 * 1300 + 555] ^= 1
    dst[50000 + 8 * 1300] ^= 1
    dst[1100] ^= 1  # between two rows: not compared
    assert host.first_difference(*table) == (1, 4, 555)
    assert host.first_difference(*table, 0, 1) is None


def test_torch_agrees_that_a_strided_copy_is_a_table() -> None:
    source = torch.arange(64 * 300, dtype=torch.float32).reshape(64, 300)
    target = torch.zeros(100, 64)
    # source[10:40, 20:84].T into target[5:69, 3:33], element by element along the strided side
    view, into = source[10:40, 20:84].t(), target[5:69, 3:33]
    k = np.arange(64, dtype=np.int64)
    table = (
        into.data_ptr() + k * into.stride(0) * 4,
        view.data_ptr() + k * view.stride(0) * 4,
        np.full(64, 30),
        np.full(64, 4),
        np.full(64, into.stride(1) * 4),
        np.full(64, view.stride(1) * 4),
    )
    host.copy_runs(*table)
    assert torch.equal(into, view)
    assert target.count_nonzero() == view.count_nonzero()
