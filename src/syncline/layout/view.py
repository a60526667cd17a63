"""Nested views: where the elements of a box lie in one storage.

Each dimension of the box has a nest: a list of (extent, stride) axes, outermost first, whose extents multiply
to the size of the dimension. An index of the dimension is written in mixed radix over the extents. One axis a
dimension is an ordinary strided view; two make, for example, the q rows of an interleaved QKV one view.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncline.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Nest = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """An affine, nested map from indices of a box to elements of a storage.

    Attributes:
        storage: number of the storage within its manifest.
        offset: storage element of the box's first element. Elements are of the shard's dtype.
        shape: one nest of extents a dimension, outermost first.
        stride: strides of the same structure, in elements; 0 repeats (expanded sources), negative runs back.

    Raises:
        LayoutError: shape and stride differ in structure, a nest is empty, or an extent is negative.
    """

    storage: int
    offset: int
    shape: tuple[Nest, ...]
    stride: tuple[Nest, ...]

    def __post_init__(self) -> None:
        same = len(self.shape) == len(self.stride)
        if not same or any(len(e) != len(s) or not e for e, s in zip(self.shape, self.stride, strict=True)):
            raise LayoutError(
                "a view needs one stride for every extent, and an axis in every dimension",
                expected=f"strides like {self.shape}",
                found=self.stride,
            )
        if any(e < 0 for nest in self.shape for e in nest):
            raise LayoutError("a view cannot have a negative extent", found=self.shape)

    @classmethod
    def simple(cls, storage: int, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> View:
        """Return an ordinary strided view, one axis a dimension (torch's size, stride and storage offset)."""
        return cls(storage, offset, tuple((n,) for n in sizes), tuple((s,) for s in strides))

    @classmethod
    def contiguous(cls, storage: int, offset: int, sizes: Sequence[int]) -> View:
        """Return the row-major view of these sizes."""
        return cls.simple(storage, offset, sizes, row_major(sizes))

    @property
    def ndim(self) -> int:
        """Number of box dimensions."""
        return len(self.shape)

    @property
    def size(self) -> tuple[int, ...]:
        """Elements in every dimension of the box."""
        return tuple(math.prod(nest) for nest in self.shape)

    @property
    def numel(self) -> int:
        """Elements of the box; with stride 0 more than elements of the storage."""
        return math.prod(self.size)

    def element(self, index: Sequence[int]) -> int:
        """Return the storage element of one index of the box (relative to the box's corner)."""
        place = self.offset
        for i, extents, strides in zip(index, self.shape, self.stride, strict=True):
            rest = i
            for extent, stride in zip(reversed(extents), reversed(strides), strict=True):
                rest, digit = divmod(rest, extent)
                place += digit * stride
            if rest:
                raise LayoutError(
                    "index outside of the view", expected=f"below {self.size}", found=tuple(index)
                )
        return place

    def bounds(self) -> tuple[int, int]:
        """Return the lowest storage element touched and the first one behind the highest; (0, 0) if empty."""
        if self.numel == 0:
            return 0, 0
        low = high = self.offset
        for extent, stride in self.axes():
            reach = (extent - 1) * stride
            low, high = low + min(reach, 0), high + max(reach, 0)
        return low, high + 1

    def axes(self) -> Iterator[tuple[int, int]]:
        """Yield all (extent, stride) pairs, outermost dimension and axis first."""
        for extents, strides in zip(self.shape, self.stride, strict=True):
            yield from zip(extents, strides, strict=True)

    def restrict(self, low: Sequence[int], size: Sequence[int]) -> View | None:
        """Return the view of the sub-box at ``low`` of that ``size``, or None where no single nest does.

        One nest suffices when, in every dimension, the range either consists of whole inner nests or lies
        within one of them; `cut` handles the others by several views.
        """
        pieces = list(itertools.islice(self.cut(low, size), 2))
        return pieces[0][2] if len(pieces) == 1 else None

    def cut(
        self, low: Sequence[int], size: Sequence[int]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], View]]:
        """Yield (low, size, view) of the fewest simple cuts of a sub-box along its nests, in row-major order.

        Args:
            low: corner of the sub-box, relative to this view's box.
            size: its size; an empty one yields a single empty view.

        Raises:
            LayoutError: the sub-box is not inside this view's box.
        """
        for lo, n, extent in zip(low, size, self.size, strict=True):
            if lo < 0 or n < 0 or lo + n > extent:
                raise LayoutError(
                    "sub-box outside of the view",
                    expected=f"inside {self.size}",
                    found=f"{tuple(low)} + {tuple(size)}",
                )
        ways = [
            list(_cut_nest(extents, strides, lo, n))
            for extents, strides, lo, n in zip(self.shape, self.stride, low, size, strict=True)
        ]
        for parts in itertools.product(*ways):
            offset = self.offset + sum(p.offset for p in parts)
            view = View(
                self.storage, offset, tuple(p.extents for p in parts), tuple(p.strides for p in parts)
            )
            yield tuple(p.low for p in parts), view.size, view


@dataclass(frozen=True, slots=True)
class _Part:
    low: int
    offset: int
    extents: Nest
    strides: Nest


def _cut_nest(extents: Nest, strides: Nest, low: int, size: int) -> Iterator[_Part]:
    """Yield the parts of the range [low, low + size) of one dimension's nest, in order."""
    if size == 0:
        yield _Part(low, 0, (0,), (strides[-1],))
        return
    if len(extents) == 1:
        yield _Part(low, low * strides[0], (size,), strides)
        return
    inner = math.prod(extents[1:])
    start, end = low, low + size
    while start < end:
        outer, within = divmod(start, inner)
        whole = (end - start) // inner if within == 0 else 0
        if whole:
            yield _Part(start, outer * strides[0], (whole, *extents[1:]), strides)
            start += whole * inner
            continue
        n = min(end - start, inner - within)
        for part in _cut_nest(extents[1:], strides[1:], within, n):
            base = outer * strides[0] + part.offset
            yield _Part(outer * inner + part.low, base, part.extents, part.strides)
        start += n


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of these sizes."""
    strides = [1] * len(sizes)
    for d in range(len(sizes) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(sizes[d + 1], 1)
    return tuple(strides)
