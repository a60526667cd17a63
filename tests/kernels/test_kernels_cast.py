"""Casts against torch's ``.to`` and against the reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import TransportError
from syncline.kernels import generic, host, reference

BITS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}
SPECIAL = np.array(
    [
        *(
            0x00000000,
            0x80000000,
            0x00000001,
            0x807FFFFF,
            0x00800000,
            0x7F7FFFFF,
            0xFF7FFFFF,
            0x7F800000,
            0xFF800000,
        ),
        *(0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF812345, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FA00000),  # NaNs
        *(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7F8000, 0x7F7F7FFF),  # ties of bfloat16
        *(
            0x3F801000,
            0x3F803000,
            0x3F801001,
            0x477FE000,
            0x477FF000,
            0x477FEFFF,
            0x47800000,
        ),  # ties of float16
        *(
            0x33000000,
            0x33000001,
            0x33800000,
            0x38800000,
            0x387FC000,
            0x387FE000,
            0x32FFFFFF,
        ),  # its denormals
    ],
    np.uint32,
)


def as_torch(bits: np.ndarray, dtype: str) -> torch.Tensor:
    signed = np.ascontiguousarray(bits).view(np.dtype(f"i{bits.itemsize}"))
    return torch.from_numpy(signed).view(getattr(torch, dtype))


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    array = tensor.contiguous().view(kind).numpy()
    return array.view(np.dtype(f"u{tensor.itemsize}"))


def cast(bits: np.ndarray, src: str, dst: str, pos: int = 0) -> tuple[np.ndarray, int, int]:
    """Return the cast bits, the digest of the installed bytes, and that through a cast without writing."""
    out = np.zeros(len(bits), np.dtype(f"u{getattr(torch, dst).itemsize}"))
    one = [np.array([v], np.int64) for v in (out.ctypes.data, bits.ctypes.data, 1, len(bits), 0, 0, pos, 0)]
    group = np.zeros(1, np.int32)
    installed = host.cast_digest_runs(*one, dst, src, group, np.zeros(1, np.uint64))
    virtual = host.cast_digest_runs(None, *one[1:4], None, *one[5:], dst, src, group, np.zeros(1, np.uint64))
    return out, int(installed[0]), int(virtual[0])


@pytest.mark.parametrize(("src", "dst"), list(host.CASTS))
@pytest.mark.parametrize("count", [1, 7, 16, 33, 5000])
def test_special_values_like_torch(src: str, dst: str, count: int) -> None:
    if src == "float32":
        rng = np.random.default_rng(count)
        bits = np.resize(np.concatenate([SPECIAL, rng.integers(0, 1 << 32, 5000, dtype=np.uint32)]), count)
    else:
        bits = np.arange(65536, dtype=np.uint16)
    got, installed, virtual = cast(bits, src, dst, pos=4095)
    # torch converts a single float16 by another routine than many, which loses a NaN's payload: ask for many.
    want = bits_of(as_torch(np.resize(bits, 65536), src).to(getattr(torch, dst)))[: len(bits)]
    assert np.array_equal(got, want)
    assert np.array_equal(got, reference.cast(bits, src, dst))
    assert installed == virtual == reference.digest_elements(got, 4095)


@pytest.mark.parametrize("dst", ["bfloat16", "float16"])
def test_every_upper_half_with_every_kind_of_lower_half_like_torch(dst: str) -> None:
    upper = np.arange(65536, dtype=np.uint32) << np.uint32(16)
    lower = np.array(
        [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32
    )
    bits = (upper[:, None] | lower).reshape(-1)
    got, _, _ = cast(bits, "float32", dst)
    assert np.array_equal(got, bits_of(as_torch(bits, "float32").to(getattr(torch, dst))))
    assert np.array_equal(got, reference.cast(bits, "float32", dst))


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(list(host.CASTS)),
    st.integers(0, 9),
    st.integers(0, 3000),
    st.integers(0, 1 << 33),
    st.integers(0, 50),
)
def test_strided_casts_at_odd_addresses(
    pair: tuple[str, str], rows: int, elems: int, pos: int, gap: int
) -> None:
    src, dst = pair
    size = [np.dtype(BITS[d]).itemsize for d in pair]
    source = np.random.default_rng(elems).integers(0, 256, (elems + gap) * 9 * size[0] + 1, dtype=np.uint8)
    target = np.zeros((elems + gap) * 9 * size[1] + 1, np.uint8)
    strides = [(elems + gap) * s for s in size]
    values = (
        target.ctypes.data + 1,
        source.ctypes.data + 1,
        rows,
        elems,
        strides[1],
        strides[0],
        pos,
        elems + 3,
    )
    one = [np.array([v], np.int64) for v in values]
    got = host.cast_digest_runs(*one, dst, src, np.zeros(1, np.int32), np.zeros(1, np.uint64))
    want, digests = np.zeros_like(target), 0
    for r in range(rows):
        start, end = 1 + r * strides[0], 1 + r * strides[1]
        bits = reference.cast(source[start : start + elems * size[0]].copy().view(BITS[src]), src, dst)
        want[end : end + elems * size[1]] = bits.view(np.uint8)
        digests += reference.digest_elements(bits, pos + r * (elems + 3))
    assert np.array_equal(target, want)
    assert int(got[0]) == digests % 2**64


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("float64", "bfloat16"),
        ("bfloat16", "float64"),
        ("int64", "float32"),
        ("float32", "float8_e4m3fn"),
        ("bfloat16", "float16"),
        ("bool", "int32"),
        ("float32", "float32"),
    ],
)
def test_other_pairs_go_through_torch(src: str, dst: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generic, "_BLOCK", 512)  # several blocks a row
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 100
    bits = bits_of(values.to(getattr(torch, src)))
    got, installed, virtual = cast(bits, src, dst, pos=77)
    tensor = torch.from_numpy(bits.view(np.dtype(f"i{bits.itemsize}"))).view(getattr(torch, src))
    assert np.array_equal(got, bits_of(tensor.to(getattr(torch, dst))))
    assert installed == virtual == reference.digest_elements(got, 77)


def test_cast_runs_writes_without_a_digest() -> None:
    bits = SPECIAL.copy()
    out = np.zeros(len(bits), np.uint16)
    one = [np.array([v], np.int64) for v in (out.ctypes.data, bits.ctypes.data, 1, len(bits), 0, 0)]
    host.cast_runs(*one, "bfloat16", "float32")
    assert np.array_equal(out, reference.cast(bits, "float32", "bfloat16"))


def test_refuses_a_dtype_that_does_not_exist() -> None:
    with pytest.raises(TransportError, match="dtype"):
        generic.torch_dtype("float7")
