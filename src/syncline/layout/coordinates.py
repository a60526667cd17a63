"""Coordinates as weights: element numbers in digits that every dtype involved holds exactly, and back.

Elements of all sources are numbered through. A pass fills the sources with one digit of their numbers; what
the targets then hold are digits of the numbers that landed there. Two more passes tell untouched elements
from constants, and check digits tell numbers that were moved from numbers that were computed with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from syncline.layout.dtype import Float, Integer, dtype
from syncline.layout.export import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_RAW = frozenset(
    {torch.float8_e8m0fnu, torch.float4_e2m1fn_x2}
)  # no range of integers: their bytes are digits
_CHUNK = 1 << 22
_MIX = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # odd multipliers of the check digits
_CERTAIN = 1 << 16  # one in so many numbers may pass the check digits by chance


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of the loader: the digit that sources carry, and what targets hold before."""

    kind: str
    place: int
    poison: int


@dataclass(frozen=True, slots=True)
class Code:
    """How element numbers below ``total`` are written.

    Attributes:
        base: digits are below it; every dtype involved holds them exactly.
        total: how many elements there are.
    """

    base: int
    total: int

    @classmethod
    def of(cls, dtypes: Iterable[torch.dtype], total: int) -> Code:
        """Return the code with the largest base that all dtypes can hold."""
        return cls(min((_digits(d) for d in set(dtypes)), default=2), total)

    @property
    def passes(self) -> list[Pass]:
        """The runs that are needed, in order: two marks, the digits, the check digits."""
        places = 1
        while self.base**places < self.total:
            places += 1
        checks = 1
        while self.base**checks < _CERTAIN:
            checks += 1
        return [
            Pass("one", 0, 0),
            Pass("zero", 0, 1),
            *(Pass("digit", k, 0) for k in range(places)),
            *(Pass("check", k, 0) for k in range(checks)),
        ]

    def digit(self, which: Pass, numbers: torch.Tensor) -> torch.Tensor:
        """Return what elements of those numbers carry in a pass; both int64."""
        if which.kind in ("one", "zero"):
            return torch.full_like(numbers, int(which.kind == "one"))
        if which.kind == "digit":
            return numbers // self.base**which.place % self.base
        mixed = (numbers + which.place + 1) * _MIX[which.place % len(_MIX)] % (1 << 61)
        return (mixed >> (13 + which.place)) % self.base


def _digits(kind: torch.dtype) -> int:
    if kind in _RAW:
        return 256
    values = dtype(dtype_name(kind)).values
    if isinstance(values, Float):
        return 1 << min(values.precision, 24)
    return 1 << min(values.bits, 24) if isinstance(values, Integer) else 2


def fill(tensor: torch.Tensor, code: Code, which: Pass, first: int) -> torch.Tensor:
    """Fill a contiguous tensor, or one of any strides, with a pass's digits of numbers from ``first`` on."""
    flat = (
        tensor.detach().view(-1)
        if tensor.is_contiguous()
        else torch.empty(tensor.numel(), dtype=tensor.dtype)
    )
    for low in range(0, flat.numel(), _CHUNK):
        part = flat[low : low + _CHUNK]
        part.copy_(
            encoded(code.digit(which, torch.arange(first + low, first + low + part.numel())), part.dtype)
        )
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def encoded(values: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Return small non-negative integers in a dtype."""
    if kind in _RAW:
        return values.to(torch.uint8).view(kind)
    return values.to(torch.float32).to(kind) if kind.is_floating_point else values.to(kind)


def decoded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the integers that a flat tensor holds, int64; -1 where it holds none."""
    if tensor.dtype in _RAW:
        return tensor.view(torch.uint8).to(torch.int64)
    if not tensor.dtype.is_floating_point:
        return tensor.to(torch.int64)
    values = tensor.to(torch.float32) if tensor.element_size() < 4 else tensor
    whole = (values == values.round()) & (values.abs() < 1 << 30)
    return torch.where(whole, values, -1.0).to(torch.int64)


class Landed:
    """What a range of target elements received, digit by digit.

    Args:
        code: how numbers are written.
        count: number of elements.
    """

    def __init__(self, code: Code, count: int) -> None:
        self._code = code
        self.numbers = torch.zeros(count, dtype=torch.int64)
        self._good = torch.ones(count, dtype=torch.bool)
        self._untouched = torch.ones(count, dtype=torch.bool)

    def see(self, which: Pass, values: Sequence[torch.Tensor]) -> None:
        """Take what the elements hold after a pass: flat tensors, in order."""
        low = 0
        for tensor in values:
            part = slice(low, low + tensor.numel())
            low += tensor.numel()
            found = decoded(tensor)
            if which.kind in ("one", "zero"):
                self._untouched[part] &= found == which.poison
            elif which.kind == "digit":
                self._good[part] &= (found >= 0) & (found < self._code.base)
                self.numbers[part] += found.clamp(0, self._code.base - 1) * self._code.base**which.place
            else:
                self._good[part] &= found == self._code.digit(which, self.numbers[part])

    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (moved, computed), bool: elements that hold a number, and that hold something else.

        The rest was not touched.
        """
        moved = self._good & ~self._untouched & (self.numbers < self._code.total)
        return moved, ~moved & ~self._untouched
