"""Placements by pure arithmetic, against torch.chunk on lists of indices."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import LayoutError
from syncline.layout.placement import Cut, Placed, place

parts = st.integers(1, 5)
sizes = st.integers(0, 40)


def chunk(indices: torch.Tensor, n: int, i: int) -> torch.Tensor:
    chunks = torch.chunk(indices, n)
    return chunks[i] if i < len(chunks) else indices[:0]


def listed(placed: list[Placed]) -> list[int]:
    """The global indices of a 1-D local tensor, in local order; checks that the local boxes tile it."""
    rows: list[int] = []
    for p in sorted(placed, key=lambda p: p.local.offset):
        assert p.local.offset == (len(rows),)
        assert p.local.size == p.box.size
        rows += range(p.box.offset[0], p.box.end[0])
    return rows


@given(sizes, parts)
def test_a_shard_is_a_chunk(size: int, n: int) -> None:
    for i in range(n):
        assert listed(place((size,), [Cut(0, n, i)])) == chunk(torch.arange(size), n, i).tolist()


@given(sizes, parts, parts)
def test_two_shards_of_one_dimension_nest(size: int, n: int, m: int) -> None:
    for i, j in itertools.product(range(n), range(m)):
        expected = chunk(chunk(torch.arange(size), n, i), m, j).tolist()
        assert listed(place((size,), [Cut(0, n, i), Cut(0, m, j)])) == expected


@given(sizes, parts, st.integers(2, 4))
def test_a_lone_strided_shard_takes_a_chunk_of_every_piece(size: int, n: int, factor: int) -> None:
    """Packed experts: gate and up in one dimension, each cut by TP."""
    pieces = [chunk(torch.arange(size), factor, k) for k in range(factor)]
    for i in range(n):
        expected = torch.cat([chunk(piece, n, i) for piece in pieces]).tolist()
        assert listed(place((size,), [Cut(0, n, i, factor)])) == expected


@given(sizes, parts, st.integers(2, 5))
def test_fsdp_cuts_what_tp_left(size: int, dp: int, tp: int) -> None:
    """B49: FSDP2 over TP on one dimension, at any size, even where torch's left-to-right rule differs."""
    for d, t in itertools.product(range(dp), range(tp)):
        expected = chunk(chunk(torch.arange(size), tp, t), dp, d).tolist()
        cuts = [Cut(0, dp, d, tp), Cut(0, tp, t)]
        assert listed(place((size,), cuts)) == expected
        assert listed(place((size,), cuts, (len(expected),))) == expected


@given(sizes, parts, st.integers(2, 4))
def test_fsdp_over_packed_tp(size: int, dp: int, tp: int) -> None:
    """A fused dense gate|up of two packed halves, cut by TP, then by FSDP on the same dimension."""
    halves = [chunk(torch.arange(size), 2, k) for k in range(2)]
    for d, t in itertools.product(range(dp), range(tp)):
        local = torch.cat([chunk(half, tp, t) for half in halves])
        expected = chunk(local, dp, d).tolist()
        cuts = [Cut(0, dp, d, tp), Cut(0, tp, t, 2)]
        assert listed(place((size,), cuts, (len(expected),))) == expected


@given(st.integers(0, 16), st.tuples(parts, parts, parts))
def test_three_mesh_dimensions_nest_inside_out(size: int, mesh: tuple[int, int, int]) -> None:
    a, b, c = mesh
    rows: list[int] = []
    for i, j, k in itertools.product(range(a), range(b), range(c)):
        expected = chunk(chunk(chunk(torch.arange(size), c, k), b, j), a, i).tolist()
        found = listed(place((size,), [Cut(0, a, i, b * c), Cut(0, b, j, c), Cut(0, c, k)]))
        if c > 1 and b > 1:
            assert found == expected
        rows += found
    if c > 1 and b > 1:
        assert sorted(rows) == list(range(size))


def test_sizes_tell_the_two_readings_apart() -> None:
    """7 rows over (3, 2): FSDP leaves row 6 on (2, 1); torch's own split puts it on (2, 0)."""

    def cuts(t: int) -> list[Cut]:
        return [Cut(0, 3, 2, 2), Cut(0, 2, t)]

    assert [listed(place((7,), cuts(t))) for t in (0, 1)] == [[], [6]]
    assert [listed(place((7,), cuts(t), (n,))) for t, n in ((0, 0), (1, 1))] == [[], [6]]
    assert [listed(place((7,), cuts(t), (n,))) for t, n in ((0, 1), (1, 0))] == [[6], []]
    with pytest.raises(LayoutError, match="dimension 0 is not what its placements say") as caught:
        place((7,), cuts(0), (5,), "w")
    assert caught.value.tensor == "w"


def test_rows_of_b49() -> None:
    def rows(size: int) -> dict[tuple[int, int], list[int]]:
        ranks = itertools.product(range(2), range(2))
        return {(d, t): listed(place((size,), [Cut(0, 2, d, 2), Cut(0, 2, t)])) for d, t in ranks}

    assert rows(8) == {(0, 0): [0, 1], (0, 1): [4, 5], (1, 0): [2, 3], (1, 1): [6, 7]}
    assert rows(10) == {(0, 0): [0, 1, 2], (0, 1): [5, 6, 7], (1, 0): [3, 4], (1, 1): [8, 9]}


def test_dimensions_multiply() -> None:
    placed = place((8, 6, 5), [Cut(0, 2, 1, 2), Cut(1, 3, 1, 2)], (4, 2, 5))
    assert [(p.box.offset, p.box.size, p.local.offset) for p in placed] == [
        ((2, 1, 0), (2, 1, 5), (0, 0, 0)),
        ((2, 4, 0), (2, 1, 5), (0, 1, 0)),
        ((6, 1, 0), (2, 1, 5), (2, 0, 0)),
        ((6, 4, 0), (2, 1, 5), (2, 1, 0)),
    ]
    assert [p.box.numel for p in place((), [])] == [1]
    assert place((0, 3), []) == []
