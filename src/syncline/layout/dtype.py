"""Element types: torch's names, a stable one-byte code, the size in bytes, and which casts are exact.

The codes are part of the wire format: a code, once given, is never reused or renumbered. Code 0 is no dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from syncline.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Float:
    """What values a binary floating-point format holds.

    Attributes:
        precision: significand bits, the hidden one included.
        emax: exponent of the largest power of two.
        tiny: exponent of the smallest positive value, subnormal ones included.
        infinite: whether it has infinities.
    """

    precision: int
    emax: int
    tiny: int
    infinite: bool = True


@dataclass(frozen=True, slots=True)
class Integer:
    """Value bits (without the sign bit) and whether there is a sign."""

    bits: int
    signed: bool


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: torch's name, without ``torch.``.
        code: one byte on the wire, 1..255.
        itemsize: bytes of an element.
        values: the set of values, where casts between such sets are defined; None for opaque types.
        complex: whether an element is a pair of ``values``.
    """

    name: str
    code: int
    itemsize: int
    values: Float | Integer | None = None
    complex: bool = False


_F64, _F32 = Float(53, 1023, -1074), Float(24, 127, -149)
_F16, _BF16 = Float(11, 15, -24), Float(8, 127, -133)

_ALL = (
    DType("float32", 1, 4, _F32),
    DType("float16", 2, 2, _F16),
    DType("bfloat16", 3, 2, _BF16),
    DType("float64", 4, 8, _F64),
    DType("int8", 5, 1, Integer(7, signed=True)),
    DType("int16", 6, 2, Integer(15, signed=True)),
    DType("int32", 7, 4, Integer(31, signed=True)),
    DType("int64", 8, 8, Integer(63, signed=True)),
    DType("uint8", 9, 1, Integer(8, signed=False)),
    DType("uint16", 10, 2, Integer(16, signed=False)),
    DType("uint32", 11, 4, Integer(32, signed=False)),
    DType("uint64", 12, 8, Integer(64, signed=False)),
    DType("bool", 13, 1),
    DType("float8_e4m3fn", 14, 1, Float(4, 8, -9, infinite=False)),
    DType("float8_e5m2", 15, 1, Float(3, 15, -16)),
    DType("float8_e4m3fnuz", 16, 1, Float(4, 7, -10, infinite=False)),
    DType("float8_e5m2fnuz", 17, 1, Float(3, 15, -17, infinite=False)),
    DType("float8_e8m0fnu", 18, 1, Float(1, 127, -127, infinite=False)),
    DType("complex64", 19, 8, _F32, complex=True),
    DType("complex128", 20, 16, _F64, complex=True),
    DType("complex32", 21, 4, _F16, complex=True),
    DType("float4_e2m1fn_x2", 22, 1),
)

BY_NAME: dict[str, DType] = {t.name: t for t in _ALL}
BY_CODE: dict[int, DType] = {t.code: t for t in _ALL}

#: itemsize by code, i64[256]; 0 where no dtype has that code.
ITEMSIZE = np.zeros(256, np.int64)
for _t in _ALL:
    ITEMSIZE[_t.code] = _t.itemsize
ITEMSIZE.setflags(write=False)


def dtype(name: str) -> DType:
    """Return the dtype of that name.

    Raises:
        LayoutError: syncline does not know the name.
    """
    found = BY_NAME.get(name)
    if found is None:
        raise LayoutError(
            "unknown dtype",
            expected=f"one of {', '.join(BY_NAME)}",
            found=repr(name),
            hint="names are torch's",
        )
    return found


def code(name: str) -> int:
    """Return the one-byte code of a dtype's name."""
    return dtype(name).code


def name_of(code: int) -> str:
    """Return the name behind a code.

    Raises:
        LayoutError: no dtype has that code.
    """
    found = BY_CODE.get(int(code))
    if found is None:
        raise LayoutError("unknown dtype code", expected=f"1..{len(_ALL)}", found=int(code))
    return found.name


def itemsize(name: str) -> int:
    """Return the bytes of one element."""
    return dtype(name).itemsize


def widens(src: str, dst: str) -> bool:
    """Return whether every value of ``src`` is a value of ``dst`` of the same kind: the cast is exact.

    Only within one kind: an integer that happens to fit into a float is a change of meaning (a quantised
    weight installed as a plain one), and has to be declared. A dtype widens to itself.
    """
    a, b = dtype(src), dtype(dst)
    if a == b:
        return True
    if a.complex != b.complex:
        return False
    if isinstance(a.values, Float) and isinstance(b.values, Float):
        return _float_widens(a.values, b.values)
    if isinstance(a.values, Integer) and isinstance(b.values, Integer):
        return a.values.bits <= b.values.bits and (b.values.signed or not a.values.signed)
    return False


def _float_widens(a: Float, b: Float) -> bool:
    in_range = a.emax <= b.emax and a.tiny >= b.tiny
    return a.precision <= b.precision and in_range and (b.infinite or not a.infinite)
