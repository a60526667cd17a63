"""From flat maps to boxes: a map becomes boxes of a tensor, each with nested strides on the other side."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from syncline.errors import LayoutError
from syncline.layout.box import Box
from syncline.layout.lattice import Axis, Map, split
from syncline.layout.view import View, row_major

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LIMIT = 1 << 16  # boxes of one piece: beyond it a manifest of single elements helps nobody


def lattice(sizes: Sequence[int], offset: int, strides: Sequence[int]) -> Map:
    """Return the map from a view's elements to their row-major numbers, one axis a dimension, none merged."""
    axes = (Axis(n, s, b) for n, s, b in zip(sizes, strides, row_major(sizes), strict=True) if n != 1)
    return Map(offset, 0, tuple(sorted(axes, key=lambda axis: -axis.a)))


Known = dict[tuple[int, tuple[Axis, ...], tuple[int, ...]], list[tuple[Box, View]]]


def boxes(m: Map, shape: tuple[int, ...], known: Known | None = None) -> Iterator[tuple[Box, View]]:
    """Yield the boxes of a row-major tensor on side b, each with the view of side a (storage 0).

    Args:
        m: elements of any storage (side a) and of the tensor (side b); repetitions of side b are told apart.
        shape: the tensor's shape.
        known: what was found for other maps, which may differ from this one in where side a begins, as those
            of many experts do; kept up.

    Raises:
        LayoutError: the elements are so scattered over the tensor that more than `LIMIT` boxes came out.
    """
    known = {} if known is None else known
    key = (m.b, m.axes, shape)
    found = known.get(key)
    if found is None:
        found = known[key] = list(_boxes(Map(0, m.b, m.axes), shape))
    for box, view in found:
        yield box, View(0, m.a + view.offset, view.shape, view.stride)


def _boxes(m: Map, shape: tuple[int, ...]) -> Iterator[tuple[Box, View]]:
    if (whole := _rows(m, shape)) is not None:
        yield whole
        return
    still = [axis for axis in m.axes if axis.b == 0]
    moving = [axis for axis in m.axes if axis.b]
    by = lattice(shape, 0, row_major(shape))
    count = 0
    for steps in itertools.product(*(range(axis.n) for axis in still)):
        a = m.a + sum(i * axis.a for i, axis in zip(steps, still, strict=True))
        view = Map.of(m.b, a, ((n, b, step) for n, step, b in moving))
        for hit in split(view, by, merge=False)[0]:
            for box in _dense(hit, shape):
                count += 1
                if count > LIMIT:
                    raise LayoutError("a tensor is cut into too many boxes", expected=f"at most {LIMIT}")
                yield box


def _rows(m: Map, shape: Sequence[int]) -> tuple[Box, View] | None:
    """Return whole rows that are contiguous on both sides: what nearly every loader does."""
    if len(m.axes) != 1 or m.axes[0][1:] != (1, 1) or not shape:
        return None
    inner = math.prod(shape[1:])
    low, odd = divmod(m.b, inner)
    n, rest = divmod(m.axes[0].n, inner)
    if odd or rest:
        return None
    size = (n, *shape[1:])
    return Box((low, *[0] * (len(shape) - 1)), size), View.contiguous(0, m.a, size)


def _dense(m: Map, shape: Sequence[int]) -> Iterator[tuple[Box, View]]:
    """Yield the boxes of a map (side a: any storage, side b: the tensor), each axis within one dimension."""
    strides = row_major(shape)
    nests: list[list[Axis]] = [[] for _ in shape]
    loose: list[Axis] = []
    for axis in sorted(m.axes, key=lambda x: x.b):
        dim = next(d for d, s in enumerate(strides) if shape[d] > 1 and s <= axis.b)
        reach = math.prod(x.n for x in nests[dim]) * strides[dim]
        if axis.b == reach:  # continues the run of this dimension
            nests[dim].insert(0, axis)
        else:
            loose.append(axis)
    size = tuple(math.prod(x.n for x in nest) for nest in nests)
    extents = tuple(tuple(x.n for x in nest) or (1,) for nest in nests)
    steps = tuple(tuple(x.a for x in nest) or (1,) for nest in nests)
    for at in itertools.product(*(range(axis.n) for axis in loose)):
        a = m.a + sum(i * axis.a for i, axis in zip(at, loose, strict=True))
        rest = m.b + sum(i * axis.b for i, axis in zip(at, loose, strict=True))
        low = []
        for stride in strides:
            place, rest = divmod(rest, stride)
            low.append(place)
        yield Box(tuple(low), size), View(0, a, extents, steps)
