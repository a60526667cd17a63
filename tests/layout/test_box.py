from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import LayoutError
from syncline.layout import Box


def points(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + n) for o, n in zip(box.offset, box.size, strict=True))))


@st.composite
def boxes(draw: st.DrawFn, ndim: int) -> Box:
    offset = draw(st.tuples(*[st.integers(-3, 4)] * ndim))
    return Box(offset, draw(st.tuples(*[st.integers(0, 4)] * ndim)))


pairs = st.integers(0, 3).flatmap(lambda n: st.tuples(boxes(n), boxes(n)))


@given(pairs)
def test_algebra_is_that_of_point_sets(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = a.intersect(b)
    assert (points(common) if common else set()) == points(a) & points(b)
    assert common is None or common.numel > 0
    assert a.overlaps(b) == bool(points(a) & points(b))
    assert a.contains(b) == (points(b) <= points(a))
    assert a.numel == len(points(a))


@given(pairs)
def test_subtract_leaves_disjoint_boxes_of_exactly_the_rest(pair: tuple[Box, Box]) -> None:
    a, b = pair
    rest = a.subtract(b)
    assert len(rest) <= max(2 * a.ndim, 1)
    assert all(part.numel > 0 for part in rest)
    assert sum(part.numel for part in rest) == len(points(a) - points(b))
    assert set().union(*map(points, rest)) == points(a) - points(b)


@given(pairs)
def test_shift_and_relative_to_are_inverse(pair: tuple[Box, Box]) -> None:
    a, b = pair
    assert a.relative_to(b).shift(b.offset) == a
    assert points(a.shift([1] * a.ndim)) == {tuple(i + 1 for i in p) for p in points(a)}


@given(st.data())
def test_split_partitions_in_order(data: st.DataObject) -> None:
    box = data.draw(boxes(2))
    dim = data.draw(st.integers(0, 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, box.size[dim]), max_size=3)))
    sizes = [b - a for a, b in itertools.pairwise([0, *cuts, box.size[dim]])]
    parts = box.split(dim, sizes)
    assert [p.size[dim] for p in parts] == sizes
    assert set().union(*map(points, parts)) == points(box)
    assert sum(p.numel for p in parts) == box.numel
    assert all(a.end[dim] == b.offset[dim] for a, b in itertools.pairwise(parts))


def test_scalar_box_has_one_element() -> None:
    scalar = Box.whole(())
    assert scalar.numel == 1
    assert scalar.intersect(scalar) == scalar
    assert scalar.subtract(scalar) == []
    assert scalar.contains(scalar)


def test_sizes_past_32_bits_are_exact() -> None:
    whole = Box.whole((70_000, 70_000))
    assert whole.numel == 4_900_000_000 > 2**32
    parts = whole.split(0, [23_334, 23_333, 23_333])
    assert sum(p.numel for p in parts) == math.prod((70_000, 70_000))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Box((0,), (1, 2)),
        lambda: Box((0,), (-1,)),
        lambda: Box((0,), (1,)).intersect(Box((0, 0), (1, 1))),
        lambda: Box((0,), (4,)).split(0, [1, 2]),
    ],
)
def test_nonsense_is_refused(make: object) -> None:
    with pytest.raises(LayoutError):
        make()  # pyright: ignore[reportCallIssue]
