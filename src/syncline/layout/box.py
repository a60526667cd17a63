"""Boxes: hyper-rectangles of a tensor, given by offset and size, with exact integer algebra."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncline.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Box:
    """The elements ``offset[d] <= index[d] < offset[d] + size[d]`` of a tensor.

    Attributes:
        offset: first index in every dimension, in elements; may be negative (a box relative to another one).
        size: number of indices in every dimension; a zero anywhere makes the box empty.

    A box of no dimensions holds the one element of a scalar.

    Raises:
        LayoutError: offset and size differ in length, or a size is negative.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.size):
            raise LayoutError(
                "a box needs one size for every offset",
                expected=f"{len(self.offset)} sizes",
                found=self.size,
            )
        if self.size and min(self.size) < 0:
            raise LayoutError("a box cannot have a negative size", expected="sizes >= 0", found=self.size)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of all elements of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.size)

    @property
    def numel(self) -> int:
        """Number of elements: 1 for a box of no dimensions."""
        return math.prod(self.size)

    @property
    def end(self) -> tuple[int, ...]:
        """First index behind the box in every dimension."""
        return tuple(o + n for o, n in zip(self.offset, self.size, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the common elements, or None where there are none."""
        self._same_ndim(other)
        low = tuple(map(max, self.offset, other.offset))
        size = tuple(min(a, b) - o for a, b, o in zip(self.end, other.end, low, strict=True))
        return Box(low, size) if all(n > 0 for n in size) else None

    def overlaps(self, other: Box) -> bool:
        """Return whether the two boxes have an element in common."""
        return self.intersect(other) is not None

    def contains(self, other: Box) -> bool:
        """Return whether every element of ``other`` lies in this box; an empty box lies in every box."""
        self._same_ndim(other)
        if other.numel == 0:
            return True
        lows = all(a <= b for a, b in zip(self.offset, other.offset, strict=True))
        return lows and all(a >= b for a, b in zip(self.end, other.end, strict=True))

    def shift(self, by: Sequence[int]) -> Box:
        """Return the box moved by ``by`` elements in every dimension."""
        return Box(tuple(o + d for o, d in zip(self.offset, by, strict=True)), self.size)

    def relative_to(self, other: Box) -> Box:
        """Return this box in coordinates that start at the corner of ``other``."""
        self._same_ndim(other)
        return self.shift([-o for o in other.offset])

    def subtract(self, other: Box) -> list[Box]:
        """Return disjoint boxes whose union is this box without ``other``: at most two a dimension."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.numel else []
        rest: list[Box] = []
        offset, size = list(self.offset), list(self.size)
        for d in range(self.ndim):
            for low, high in ((offset[d], common.offset[d]), (common.end[d], offset[d] + size[d])):
                if high > low:
                    rest.append(
                        Box((*offset[:d], low, *offset[d + 1 :]), (*size[:d], high - low, *size[d + 1 :]))
                    )
            offset[d], size[d] = common.offset[d], common.size[d]
        return rest

    def split(self, dim: int, sizes: Sequence[int]) -> list[Box]:
        """Cut the box along one dimension into neighbours of the given sizes, in order.

        Raises:
            LayoutError: the sizes do not add up to the size of that dimension.
        """
        if sum(sizes) != self.size[dim]:
            raise LayoutError(
                f"the parts of dimension {dim} do not add up",
                expected=self.size[dim],
                found=f"{list(sizes)} = {sum(sizes)}",
            )
        parts: list[Box] = []
        low = self.offset[dim]
        for n in sizes:
            offset = (*self.offset[:dim], low, *self.offset[dim + 1 :])
            parts.append(Box(offset, (*self.size[:dim], n, *self.size[dim + 1 :])))
            low += n
        return parts

    def _same_ndim(self, other: Box) -> None:
        if self.ndim != other.ndim:
            raise LayoutError(
                "boxes of different numbers of dimensions have no relation",
                expected=f"{self.ndim} dimensions: {self}",
                found=f"{other.ndim} dimensions: {other}",
            )
