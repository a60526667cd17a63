"""Casts between floating-point dtypes on raw elements: the numpy references that kernels are compared with.

numpy has no bfloat16 and no float8, so elements are handled as raw integers of the same width. Narrowing
rounds to nearest, ties to even, subnormal values included, and float64 becomes a 16-bit float by way of
float32, all as torch does it. A NaN narrowed to bfloat16 becomes 0x7FC0, whatever its payload was (torch
itself gives 0x7FC0 or 0xFFFF): compare NaN by being NaN.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from syncline.layout.dtype import dtype, widens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from numpy.typing import NDArray

    Raw = NDArray[Any]

_NATIVE = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
_COMMON = ("float64", "float32", "float16", "bfloat16")
_NARROW = ("float8_e4m3fn", "float8_e5m2")


def raw_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of raw elements: the float where numpy has it, else an unsigned integer."""
    kind = _NATIVE.get(name)
    return np.dtype(kind) if kind is not None else np.dtype(f"u{dtype(name).itemsize}")


def pairs() -> Iterator[tuple[str, str]]:
    """Yield the (src, dst) casts that exist: among the common floats, and from float8 to wider ones."""
    yield from itertools.permutations(_COMMON, 2)
    for src, dst in itertools.product(_NARROW, _COMMON):
        if widens(src, dst):
            yield src, dst


def reference(src: str, dst: str) -> Callable[[Raw], Raw]:
    """Return the function from raw elements of ``src`` to raw elements of ``dst``, of any shape."""

    def run(values: Raw) -> Raw:
        with np.errstate(over="ignore", invalid="ignore"):
            return _from_float64(_to_float64(values, src), dst)

    return run


def _to_float64(values: Raw, src: str) -> NDArray[np.float64]:
    """Return the exact values; every float dtype of at most 8 bytes fits into float64."""
    if src in _NATIVE:
        return values.astype(np.float64)
    if src == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return _table(src)[values]


def _table(src: str) -> NDArray[np.float64]:
    """Return the 256 values of a float8 dtype by its bits."""
    mantissa_bits, bias = {"float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15)}[src]
    bits = np.arange(256)
    exponent, mantissa = (bits & 0x7F) >> mantissa_bits, bits & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    value = np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    if src == "float8_e5m2":
        value[(bits & 0x7F) == 0x7C] = np.inf
        value[(bits & 0x7F) > 0x7C] = np.nan
    else:
        value[(bits & 0x7F) == 0x7F] = np.nan
    return np.where(bits >= 0x80, -value, value)


def _from_float64(values: NDArray[np.float64], dst: str) -> Raw:
    if dst == "float64":
        return values
    single = values.astype(np.float32)
    if dst != "bfloat16":
        return single.astype(_NATIVE[dst])
    bits = single.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
