from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from syncline.errors import LayoutError
from syncline.layout import View
from syncline.layout.view import row_major


@st.composite
def views(draw: st.DrawFn) -> View:
    nests = draw(
        st.lists(
            st.lists(st.tuples(st.integers(0, 3), st.integers(-4, 7)), min_size=1, max_size=3), max_size=3
        )
    )
    shape = tuple(tuple(e for e, _ in nest) for nest in nests)
    stride = tuple(tuple(s for _, s in nest) for nest in nests)
    return View(draw(st.integers(0, 3)), draw(st.integers(0, 9)), shape, stride)


def elements(view: View) -> np.ndarray:
    """The storage elements of the view as an array of its box's shape, by numpy's own strided views."""
    low = 200
    storage = np.arange(2 * low) - low
    flat = list(view.axes())
    strides = [s * storage.itemsize for _, s in flat]
    window = as_strided(storage[low + view.offset :], [e for e, _ in flat], strides)
    return np.ascontiguousarray(window).reshape(view.size)


@given(views())
def test_elements_are_those_of_numpys_strided_views(view: View) -> None:
    expected = elements(view)
    assert view.numel == expected.size
    assert view.ndim == expected.ndim
    for index in np.ndindex(*view.size):
        assert view.element(index) == expected[index]
    low, high = view.bounds()
    if expected.size:
        assert (low, high) == (expected.min(), expected.max() + 1)
    else:
        assert (low, high) == (0, 0)


@given(views(), st.data())
def test_cut_covers_a_sub_box_with_simple_views(view: View, data: st.DataObject) -> None:
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in view.size]
    low, size = [a for a, _ in bounds], [b - a for a, b in bounds]
    expected = elements(view)
    seen = np.zeros(view.size, int)
    parts = list(view.cut(low, size))
    for at, extent, part in parts:
        place = tuple(slice(a, a + n) for a, n in zip(at, extent, strict=True))
        np.testing.assert_array_equal(elements(part), expected[place])
        seen[place] += 1
    inside = np.zeros(view.size, int)
    inside[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))] = 1
    np.testing.assert_array_equal(seen, inside)
    only = view.restrict(low, size)
    assert (only is not None) == (len(parts) == 1)
    if only is not None:
        assert only.size == tuple(size)


def test_rows_of_an_interleaved_qkv_are_one_view() -> None:
    """Per group of 4 heads [q q k v], head size 3, hidden 5: all q rows of 2 groups are one nested view."""
    groups, heads, head, hidden = 2, 4, 3, 5
    storage = np.arange(groups * heads * head * hidden).reshape(groups, heads, head, hidden)
    row, group = hidden, heads * head * hidden
    q = View(0, 0, ((groups, 2 * head), (hidden,)), ((group, row), (1,)))
    np.testing.assert_array_equal(elements(q), storage[:, :2].reshape(-1, hidden))
    second = q.restrict((2 * head, 0), (2 * head, hidden))
    assert second == View(0, group, ((1, 2 * head), (hidden,)), ((group, row), (1,)))
    assert q.restrict((head, 0), (2 * head, hidden)) is None
    assert [view.size for _, _, view in q.cut((head, 0), (2 * head, hidden))] == [(head, hidden)] * 2


def test_simple_and_contiguous() -> None:
    assert View.contiguous(1, 7, (2, 3, 4)) == View.simple(1, 7, (2, 3, 4), (12, 4, 1))
    assert row_major(()) == ()
    assert View.contiguous(0, 5, ()).element(()) == 5
    assert View.contiguous(0, 5, ()).bounds() == (5, 6)


def test_elements_past_2_to_the_31() -> None:
    view = View.contiguous(0, 0, (70_000, 70_000))
    assert view.element((69_999, 69_999)) == 70_000**2 - 1
    assert view.bounds() == (0, 4_900_000_000)


def test_bad_views_and_indices_are_refused() -> None:
    with pytest.raises(LayoutError, match="one stride for every extent"):
        View(0, 0, ((2, 3),), ((1,),))
    with pytest.raises(LayoutError, match="one stride for every extent"):
        View(0, 0, ((),), ((),))
    with pytest.raises(LayoutError, match="negative extent"):
        View(0, 0, ((-1,),), ((1,),))
    view = View.contiguous(0, 0, (2, 3))
    with pytest.raises(LayoutError, match="outside"):
        view.element((2, 0))
    with pytest.raises(LayoutError, match="outside"):
        list(view.cut((0, 1), (1, 3)))


def test_nests_multiply_to_the_size() -> None:
    view = View(0, 0, ((2, 3), (4,)), ((100, 10), (1,)))
    assert view.size == (6, 4)
    order = [view.element((i, 0)) for i in range(6)]
    assert order == [a * 100 + b * 10 for a, b in itertools.product(range(2), range(3))]
    assert view.numel == math.prod(view.size)
