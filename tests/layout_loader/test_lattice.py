"""Lattices against brute force: what two views of one storage share, and what they do not."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import LayoutError
from syncline.layout.lattice import Map, disjoint, split


def pairs(m: Map) -> list[tuple[int, int]]:
    return [
        (m.a + sum(i * x.a for i, x in zip(at, m.axes, strict=True)),
         m.b + sum(i * x.b for i, x in zip(at, m.axes, strict=True)))
        for at in itertools.product(*(range(x.n) for x in m.axes))
    ]  # fmt: skip


@st.composite
def views(draw, base: torch.Tensor) -> torch.Tensor:
    """A view of a contiguous tensor by a random chain of torch's own view operations."""
    view = base
    for _ in range(draw(st.integers(0, 4))):
        if view.ndim == 0 or view.numel() == 0:
            break
        dim = draw(st.integers(0, view.ndim - 1))
        n = view.shape[dim]
        kind = draw(
            st.sampled_from(["narrow", "step", "select", "permute", "unflatten", "flatten", "diagonal"])
        )
        if kind == "narrow":
            low = draw(st.integers(0, n - 1))
            view = view.narrow(dim, low, draw(st.integers(1, n - low)))
        elif kind == "step":
            index = [slice(None)] * view.ndim
            index[dim] = slice(draw(st.integers(0, n - 1)), None, draw(st.integers(1, 4)))
            view = view[tuple(index)]
        elif kind == "select" and view.ndim > 1:
            view = view.select(dim, draw(st.integers(0, n - 1)))
        elif kind == "permute":
            view = view.permute(draw(st.permutations(range(view.ndim))))
        elif kind == "unflatten":
            divisors = [d for d in range(1, n + 1) if n % d == 0]
            view = view.unflatten(dim, (draw(st.sampled_from(divisors)), -1))
        elif kind == "flatten" and view.is_contiguous():
            view = view.flatten()
        elif kind == "diagonal" and view.ndim > 1:
            view = view.diagonal(draw(st.integers(0, 1)))
    return view


SHAPES = [(24,), (6, 4), (4, 6), (3, 5), (2, 3, 4), (4, 3, 2), (2, 2, 3, 2), (5, 7), (1, 12), (12, 1, 2)]


@st.composite
def two_views(draw):
    shape = draw(st.sampled_from(SHAPES))
    base = torch.arange(torch.Size(shape).numel()).reshape(shape)
    other = draw(st.sampled_from([s for s in SHAPES if torch.Size(s).numel() == base.numel()]))
    return draw(views(base)), draw(views(base.reshape(other)))


def lattice(view: torch.Tensor, start: int) -> Map:
    return Map.between(
        view.shape, (view.storage_offset(), view.stride()), (start, torch.empty(view.shape).stride())
    )


@settings(max_examples=600, deadline=None)
@given(two_views())
def test_split_is_exact(both):
    view, by = (lattice(v, start) for v, start in zip(both, (1000, 5000), strict=True))
    if not by.nested():
        return
    hits, misses = split(view, by)
    place = dict(pairs(by))
    expected_hits = sorted((b, place[a]) for a, b in pairs(view) if a in place)
    assert sorted(p for m in hits for p in pairs(m)) == expected_hits
    assert sorted(p for m in misses for p in pairs(m)) == sorted(p for p in pairs(view) if p[0] not in place)
    if disjoint(view, by):
        assert not hits


@given(two_views())
@settings(max_examples=100, deadline=None)
def test_views_of_tensors_are_nested_unless_they_overlap(both):
    for view in both:
        m = lattice(view, 0)
        if m.nested():
            assert len({a for a, _ in pairs(m)}) == m.numel


def test_repeated_sources_keep_their_repetition():
    row = torch.arange(6).expand(4, 6)
    hits, misses = split(lattice(row, 100), Map.of(0, 0, [(6, 1, 1)]))
    assert not misses
    assert sorted(p for m in hits for p in pairs(m)) == sorted((100 + i, i % 6) for i in range(24))


def test_overlapping_windows_are_enumerated():
    windows = torch.arange(12).unfold(0, 4, 2)
    hits, misses = split(lattice(windows, 0), Map.of(3, 0, [(5, 1, 1)]))
    assert sorted(p for m in hits for p in pairs(m)) == sorted(
        (i, int(v) - 3) for i, v in enumerate(windows.flatten()) if 3 <= v < 8
    )
    assert sum(m.numel for m in misses) + sum(m.numel for m in hits) == windows.numel()


def test_neighbours_merge_and_sides_exchange():
    m = Map.of(0, 7, [(3, 8, 8), (8, 1, 1), (1, 99, 99)])
    assert m == Map(0, 7, ((24, 1, 1),))
    turned = Map.of(0, 0, [(3, 1, 4), (4, 3, 1)])
    assert sorted(pairs(turned.flipped())) == sorted((b, a) for a, b in pairs(turned))


def test_unrelated_strides_end_in_an_error(monkeypatch):
    monkeypatch.setattr("syncline.layout.lattice.LIMIT", 50)
    with pytest.raises(LayoutError, match="too little in common"):
        split(Map.of(0, 0, [(1000, 7, 1)]), Map.of(0, 0, [(1000, 11, 1)]))
