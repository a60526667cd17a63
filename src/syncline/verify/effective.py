"""Level ``effective``: every live tensor, bit for bit, against a fresh load of the same checkpoint.

A digest proves that bytes travelled; it cannot prove that they stand where the engine's kernels expect them.
Only the engine's own loader, run on the version's checkpoint, can. The comparison is pure: it takes two
mappings of tensors and says where they differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from syncline.errors import EffectiveMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_CHUNK = 1 << 20  # elements compared at once: bounds the extra memory to a few tens of MiB
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """How one live tensor differs from its fresh counterpart.

    Attributes:
        name: the engine's name of the tensor.
        mismatches: elements whose bits differ.
        numel: elements compared.
        first: index of the first differing element.
        max_abs: largest absolute difference of the values; NaN where one side is NaN.
        max_ulp: largest distance in units in the last place; for integer dtypes the absolute difference.
    """

    name: str
    mismatches: int
    numel: int
    first: tuple[int, ...]
    max_abs: float
    max_ulp: int

    def __str__(self) -> str:
        where = ", ".join(map(str, self.first))
        return (
            f"{self.name}: {self.mismatches} of {self.numel} elements differ, first at [{where}], "
            f"max abs {self.max_abs:.3g}, max ulp {self.max_ulp}"
        )


@dataclass(frozen=True, slots=True)
class EffectiveReport:
    """The outcome of one comparison: tensors compared, elements compared, and what differs."""

    tensors: int
    elements: int
    diffs: tuple[TensorDiff, ...]

    def raise_on_difference(self, who: str) -> None:
        """Raise `EffectiveMismatchError` naming the first differing tensors; ``who`` names the live side."""
        if not self.diffs:
            return
        sample = "\n    ".join(map(str, self.diffs[:5]))
        raise EffectiveMismatchError(
            f"{len(self.diffs)} of {self.tensors} live tensors differ from a fresh load of the checkpoint",
            expected="equal bits in every tensor",
            found=f"\n    {sample}",
            rank=who,
            tensor=self.diffs[0].name,
            hint="the layout or a post-load step of the engine is wrong: digests alone cannot show this",
        )


def compare(live: Mapping[str, torch.Tensor], fresh: Mapping[str, torch.Tensor]) -> EffectiveReport:
    """Compare two mappings of CPU tensors bit for bit.

    Raises:
        EffectiveMismatchError: names, shapes or dtypes differ, so that the bits cannot be compared.
    """
    if live.keys() != fresh.keys():
        raise EffectiveMismatchError(
            "the live model and the fresh one hold different tensors",
            expected=sorted(fresh.keys() - live.keys())[:5],
            found=sorted(live.keys() - fresh.keys())[:5],
        )
    diffs = tuple(diff for name in live if (diff := _compare_one(name, live[name], fresh[name])) is not None)
    return EffectiveReport(len(live), sum(t.numel() for t in live.values()), diffs)


def _compare_one(name: str, live: torch.Tensor, fresh: torch.Tensor) -> TensorDiff | None:
    if live.shape != fresh.shape or live.dtype != fresh.dtype:
        raise EffectiveMismatchError(
            "a live tensor has another shape or dtype than the fresh one",
            expected=f"{tuple(fresh.shape)} {fresh.dtype}",
            found=f"{tuple(live.shape)} {live.dtype}",
            tensor=name,
        )
    mismatches, first, max_abs, max_ulp = 0, -1, 0.0, 0
    for start, a, b in _chunks(live, fresh):
        wrong = (_bits(a) != _bits(b)).nonzero().flatten()
        if wrong.numel() == 0:
            continue
        if first < 0:
            first = start + int(wrong[0])
        mismatches += wrong.numel()
        chunk_abs, chunk_ulp = _distance(a[wrong], b[wrong])
        max_abs, max_ulp = _larger(max_abs, chunk_abs), max(max_ulp, chunk_ulp)
    if mismatches == 0:
        return None
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), live.shape)) if live.dim() else ()
    return TensorDiff(name, mismatches, live.numel(), index, max_abs, max_ulp)


def _chunks(live: torch.Tensor, fresh: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (flat start, live, fresh), `_CHUNK` elements at most; only what is not contiguous is copied."""
    a, b = live.detach().reshape(-1), fresh.detach().reshape(-1)
    for start in range(0, a.numel(), _CHUNK):
        yield start, a[start : start + _CHUNK], b[start : start + _CHUNK]


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(_BITS[x.element_size()])


def _larger(a: float, b: float) -> float:
    return b if math.isnan(b) or b > a else a


def _distance(a: torch.Tensor, b: torch.Tensor) -> tuple[float, int]:
    max_abs = float((a.double() - b.double()).abs().max())
    return max_abs, int((_ordered(a) - _ordered(b)).abs().max())


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Map floats to int64 such that neighbours differ by one: sign-magnitude to two's complement."""
    bits = _bits(x).to(torch.int64)
    if not x.dtype.is_floating_point:
        return bits
    width = 8 * x.element_size()
    magnitude = bits & ((1 << (width - 1)) - 1)
    negative = (bits >> (width - 1)) & 1
    return torch.where(negative.bool(), -magnitude, magnitude)
