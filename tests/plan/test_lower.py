"""The run compiler: as few and long runs as the streams allow, and never another element."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from syncline.errors import PlanError
from syncline.plan import Stream, lower
from tests.plan.helpers import run_rows


def column(*values):
    return np.array(values, np.int64)


def rows(*values):
    return np.array(values, np.int64).reshape(len(values), -1)


def copy(extents, src, dst, item=2):
    streams = [Stream(column(0), rows([n * item for n in s]), item) for s in (src, dst)]
    return lower(rows(extents), streams)


def shape_of(runs):
    return list(zip(runs.rows.tolist(), runs.row_elems.tolist(), strict=True))


def test_equal_layouts_are_one_run_even_with_positions():
    source, target = Stream(column(0), rows((40, 10, 2)), 2), Stream(column(64), rows((80, 20, 4)), 4)
    runs = lower(rows((3, 4, 5)), [source, target, Stream(column(0), rows((20, 5, 1)), 1)])
    assert shape_of(runs) == [(1, 60)]
    assert [b.tolist() for b in runs.base] == [[0], [64], [0]]
    assert [s.tolist() for s in runs.stride] == [[0], [0], [0]]


def test_a_column_cut_is_one_descriptor_of_rows():
    runs = copy((4096, 128), (512, 1), (128, 1))
    assert shape_of(runs) == [(4096, 128)]
    assert [s.tolist() for s in runs.stride] == [[1024], [256]]


def test_a_row_cut_is_one_run():
    assert shape_of(copy((16, 128), (128, 1), (128, 1))) == [(1, 2048)]


def test_equally_transposed_tensors_are_one_run():
    assert shape_of(copy((6, 7), (1, 6), (1, 6))) == [(1, 42)]


def test_a_transpose_has_rows_of_one_element():
    assert shape_of(copy((3, 4), (4, 1), (1, 3))) == [(4, 1)] * 3


def test_the_longest_dimension_becomes_the_rows_and_others_are_written_out():
    runs = copy((2, 100, 3, 8), (24000, 80, 8, 1), (24000, 240, 16, 1))
    assert shape_of(runs) == [(100, 8)] * 6
    assert runs.base[0].tolist() == [0, 16, 32, 48000, 48016, 48032]


def test_an_expanded_source_repeats():
    assert shape_of(copy((5, 4), (0, 1), (4, 1))) == [(5, 4)]
    assert shape_of(copy((5,), (0,), (1,))) == [(5, 1)]
    assert shape_of(copy((5, 4), (1, 0), (4, 1))) == [(5, 1)] * 4


def test_scalars_and_empty_hops():
    runs = lower(rows((1, 1), (0, 4), (2, 2)), [Stream(column(8, 0, 16), np.zeros((3, 2), np.int64), 4)])
    assert runs.hop.tolist() == [0, 2]
    assert shape_of(runs) == [(1, 1), (4, 1)]
    nothing = Stream(np.zeros(0, np.int64), np.zeros((0, 2), np.int64))
    assert len(lower(np.zeros((0, 2), np.int64), [nothing])) == 0


def test_neighbouring_hops_merge_only_where_every_stream_goes_on():
    bases = column(0, 8, 16, 32, 40), column(100, 108, 116, 124, 132)
    streams = [Stream(b, rows(*[(4,)] * 5), 4) for b in bases]
    extents = rows(*[(2,)] * 5)
    assert len(lower(extents, streams)) == 5
    merged = lower(extents, streams, merge=column(0, 0, 0, 0, 0))
    assert shape_of(merged) == [(1, 6), (1, 4)]
    assert merged.hop.tolist() == [0, 3]
    assert shape_of(lower(extents, streams, merge=column(0, 1, 1, 2, 2))) == [(1, 2), (1, 4), (1, 4)]
    backwards = [Stream(s.base[::-1], s.stride, 4) for s in streams]
    merged = lower(extents, backwards, merge=column(0, 0, 0, 0, 0))
    assert shape_of(merged) == [(1, 6), (1, 4)]
    assert merged.hop.tolist() == [4, 1]


def test_mixed_item_sizes_in_one_call():
    item = column(2, 4)
    data = Stream.of_bytes(column(0, 5), rows((4, 1), (4, 1)), item)
    positions = Stream.of_positions(rows((0, 0), (1, 2)), rows((3, 4), (2, 4)))
    runs = lower(rows((3, 4), (1, 2)), [data, positions])
    assert shape_of(runs) == [(1, 12), (1, 2)]
    assert [b.tolist() for b in runs.base] == [[0, 20], [0, 6]]


def test_streams_must_fit_the_hops():
    with pytest.raises(PlanError, match="at least one stream"):
        lower(rows((2, 2)), [])
    with pytest.raises(PlanError, match="does not fit"):
        lower(rows((2, 2)), [Stream(column(0, 1), rows((2, 1)))])


@st.composite
def hops(draw):
    dims, count = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    extents = [draw(st.lists(st.integers(0, 4), min_size=dims, max_size=dims)) for _ in range(count)]
    streams = []
    for _ in range(draw(st.integers(1, 3))):
        stride = []
        for extent in extents:
            order, step, own = draw(st.permutations(range(dims))), 1, [0] * dims
            for d in order:
                own[d] = step
                step = step * max(extent[d], 1) + draw(st.sampled_from([0, 0, 0, 1, 5]))
            if draw(st.integers(0, 4)) == 0:
                own[draw(st.integers(0, dims - 1))] *= draw(st.sampled_from([0, -1]))
            stride.append(own)
        bases = draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
        streams.append(Stream(column(*bases), rows(*stride)))
    return extents, streams


@settings(max_examples=300, deadline=None)
@given(hops())
def test_runs_are_exactly_the_elements_of_the_hops(case):
    extents, streams = case
    runs = lower(rows(*extents), streams)
    found = [[] for _ in extents]
    for hop, starts, n in run_rows(runs):
        found[hop] += [tuple(s + i for s in starts) for i in range(n)]
    for hop, extent in enumerate(extents):
        wanted = [
            tuple(int(s.base[hop] + np.dot(index, s.stride[hop])) for s in streams)
            for index in itertools.product(*map(range, extent))
        ]
        assert sorted(found[hop]) == sorted(wanted)
        assert len(wanted) == math.prod(extent)
