from __future__ import annotations

import numpy as np
import pytest
import torch

from syncline.errors import LayoutError
from syncline.layout import cast, dtype


def test_table_is_torchs() -> None:
    for name, entry in dtype.BY_NAME.items():
        kind = getattr(torch, name)
        assert str(kind) == f"torch.{name}"
        assert entry.itemsize == kind.itemsize
        assert dtype.name_of(dtype.code(name)) == name
        assert dtype.ITEMSIZE[entry.code] == entry.itemsize
    assert len(dtype.BY_CODE) == len(dtype.BY_NAME)
    assert dtype.ITEMSIZE[0] == 0


def test_codes_of_the_wire_never_change() -> None:
    first = ["float32", "float16", "bfloat16", "float64", "int8", "int16", "int32", "int64", "uint8"]
    assert [dtype.code(name) for name in first] == list(range(1, 10))
    assert (dtype.code("bool"), dtype.code("float8_e4m3fn"), dtype.code("float8_e5m2")) == (13, 14, 15)


def test_unknown_names_and_codes_are_refused() -> None:
    with pytest.raises(LayoutError, match="float33"):
        dtype.dtype("float33")
    with pytest.raises(LayoutError, match="unknown dtype code"):
        dtype.name_of(0)


FLOATS = [n for n, t in dtype.BY_NAME.items() if isinstance(t.values, dtype.Float) and not t.complex]
SMALL = [n for n in FLOATS if dtype.itemsize(n) <= 2]


@pytest.mark.parametrize("src", SMALL)
@pytest.mark.parametrize("dst", FLOATS)
def test_widens_says_what_torch_does_to_every_value(src: str, dst: str) -> None:
    """Exactness by trying: every bit pattern of the 8 and 16 bit floats through torch's cast and back."""
    width = torch.uint8 if dtype.itemsize(src) == 1 else torch.int16
    bits = torch.arange(256 if width == torch.uint8 else 65536, dtype=torch.int32).to(width)
    values = bits.view(getattr(torch, src)).to(torch.float64)
    there = bits.view(getattr(torch, src)).to(torch.float64).to(getattr(torch, dst)).to(torch.float64)
    exact = bool(((there == values) | (there.isnan() & values.isnan())).all())
    assert dtype.widens(src, dst) == exact


def test_widening_stays_within_a_kind() -> None:
    assert dtype.widens("int8", "int16")
    assert dtype.widens("uint8", "int16")
    assert not dtype.widens("uint8", "int8")
    assert not dtype.widens("int8", "uint16")
    assert not dtype.widens("int8", "float32")
    assert not dtype.widens("bool", "uint8")
    assert dtype.widens("bool", "bool")
    assert dtype.widens("complex64", "complex128")
    assert not dtype.widens("float32", "complex64")
    assert dtype.widens("float32", "float64")
    assert not dtype.widens("float64", "float32")


def _torch_raw(values: torch.Tensor) -> np.ndarray:
    if values.dtype in (torch.float16, torch.float32, torch.float64):
        return values.numpy()
    return values.view(torch.uint8 if values.itemsize == 1 else torch.uint16).numpy()


def _bits(raw: np.ndarray) -> np.ndarray:
    return raw.view(f"u{raw.itemsize}")


def _inputs(src: str) -> torch.Tensor:
    kind = getattr(torch, src)
    if kind.itemsize == 1:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(kind)
    if kind.itemsize == 2:
        return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(kind)
    generator = torch.Generator().manual_seed(7)
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(torch.float64)
    # exact values of the narrow types, the midpoints between them, and values just off those midpoints
    middles = (halves[:-1] + halves[1:]) / 2
    off = torch.cat([middles * (1 + 2.0**-24), middles * (1 - 2.0**-24), middles * (1 + 2.0**-50)])
    subnormal = torch.randn(4096, generator=generator, dtype=torch.float64) * 2.0**-140
    wide = torch.randn(20000, generator=generator, dtype=torch.float64)
    wide = torch.cat([wide, wide * 2.0**14, wide * 2.0**-24, wide * 2.0**-15, subnormal])
    return torch.cat([halves, middles, off, wide]).to(kind)


@pytest.mark.parametrize(("src", "dst"), list(cast.pairs()))
def test_reference_casts_are_torchs_bit_for_bit(src: str, dst: str) -> None:
    values = _inputs(src)
    expected = _torch_raw(values.to(getattr(torch, dst)))
    found = cast.reference(src, dst)(_torch_raw(values))
    assert found.dtype == cast.raw_dtype(dst)
    nan = values.to(torch.float64).isnan().numpy()
    np.testing.assert_array_equal(_bits(found)[~nan], _bits(expected)[~nan])
    back = cast._to_float64(found, dst)
    assert np.isnan(back[nan]).all()
