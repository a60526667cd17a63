"""Classes of tensors: planning one of each class for all must be the same as planning every tensor."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from syncline.errors import PlanError
from syncline.layout import Box, Layout, Rules
from syncline.plan import plan
from syncline.plan.classes import Classes
from syncline.plan.plan import Plan
from tests.plan.helpers import Rank, check_links, layout, sync, tp


@st.composite
def fleets(draw):
    """Tensors of few shapes, each cut and held in one of few ways, so that many are alike."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=2))
    count, ranks, instances = (draw(st.integers(1, n)) for n in (7, 4, 3))
    ways = draw(st.lists(st.sets(st.integers(0, ranks - 1), min_size=1), min_size=1, max_size=2))
    writers = [Rank() for _ in range(ranks)]
    kinds = []
    for n in range(count):
        shape, way, dim = draw(st.sampled_from(shapes)), draw(st.sampled_from(ways)), draw(st.integers(0, 1))
        kinds.append((f"t{n}", shape, dim))
        for part in range(2):
            box = tp(shape, dim, 2, part)
            if not box.numel:
                continue
            for rank in sorted(way) if draw(st.booleans()) else sorted(way)[:1]:
                writers[rank].hold(f"t{n}", shape, box)
    width = draw(st.integers(1, 3))
    sides = {}
    for name in "abc"[:instances]:
        sides[name] = [Rank() for _ in range(width)]
        for tensor, shape, dim in kinds:
            across = draw(st.sampled_from([dim, 1 - dim]))
            for r, rank in enumerate(sides[name]):
                box = tp(shape, across, width, r)
                if box.numel:
                    rank.hold(tensor, shape, box)
    return writers, sides


def rows(hops):
    columns = [hops.tensor, hops.offset, hops.size, hops.dst_storage, hops.dst_base, hops.nbytes]
    return sorted(map(tuple, np.column_stack(columns).tolist()))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(fleets())
def test_classes_plan_what_single_tensors_would(fleet):
    """The same boxes, pieces and bytes, whether tensors share a class or not; all bytes arrive."""
    writers, sides = fleet
    sync(writers, sides)
    layouts = {name: layout(ranks) for name, ranks in sides.items()}
    together = Plan(layout(writers), layouts, Rules())
    with pytest.MonkeyPatch.context() as patch:
        alone = classmethod(lambda _, key: by_key(np.arange(len(key), dtype=np.uint64)))
        by_key = Classes.by_key
        patch.setattr(Classes, "by_key", alone)
        apart = Plan(layout(writers), layouts, Rules())
    assert together.classes <= apart.classes == len(together.names)
    assert together.sender_load.sum() == apart.sender_load.sum()
    assert together.sender_bound == apart.sender_bound
    assert together.piece_count == apart.piece_count
    for column in ("tensor", "offset", "size", "dtype", "nbytes"):
        np.testing.assert_array_equal(getattr(together.pieces, column), getattr(apart.pieces, column))
    for name, ranks in sides.items():
        for rank in range(len(ranks)):
            one, other = together.reader(name, rank), apart.reader(name, rank)
            assert rows(one) == rows(other)
            assert together.hop_count(name, rank) == len(one)
            sent = np.bincount(one.src, one.nbytes, minlength=len(writers)).astype(np.int64)
            np.testing.assert_array_equal(together.link_bytes(name, rank), sent)
    check_links(apart)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(fleets())
def test_all_ranks_together_are_the_plan(fleet):
    """What writers send, over all writers, is what readers receive, over all readers; every element once."""
    writers, sides = fleet
    made = plan(layout(writers), {name: layout(ranks) for name, ranks in sides.items()})
    names = (
        "src",
        "dst",
        "instance",
        "tensor",
        "src_storage",
        "src_base",
        "dst_storage",
        "dst_base",
        "nbytes",
    )

    def listed(hops):
        return list(zip(*(getattr(hops, n).tolist() for n in names), strict=True))

    sent = [row for w in range(made.writers) for row in listed(made.writer(w))]
    received = [
        row for n in made.instances for r in range(made.ranks(n)) for row in listed(made.reader(n, r))
    ]
    assert sorted(sent) == sorted(received)
    assert len(set(sent)) == len(sent)
    wanted = sum(s.nbytes for ranks in sides.values() for rank in ranks for s in rank.shards)
    assert sum(row[-1] for row in sent) == wanted == int(made.sender_load.sum())


def test_tensors_that_are_alike_are_one_class():
    writers, readers = [Rank(), Rank()], [Rank(), Rank()]
    for n in range(50):
        for w in writers:
            w.hold(f"t{n:02d}", (8, 4))
        for r, rank in enumerate(readers):
            rank.hold(f"t{n:02d}", (8, 4), tp((8, 4), 0, 2, r))
    made = plan(layout(writers), {"a": layout(readers)})
    assert made.classes == 1
    assert made.sender_load.tolist() == [25 * 128] * 2
    assert made.piece_count == 100
    writers[0].hold("u", (8, 4), Box((0, 0), (4, 4)))
    writers[1].hold("u", (8, 4), Box((4, 0), (4, 4)))
    for r, rank in enumerate(readers):
        rank.hold("u", (8, 4), tp((8, 4), 0, 2, r))
    assert plan(layout(writers), {"a": layout(readers)}).classes == 2


@pytest.mark.parametrize("side", ["writer", "reader"])
def test_a_collision_of_hashes_is_found(side, monkeypatch):
    """Were two tensors taken for one class that are not alike, no rank would get a wrong program."""
    shape = (8, 4)
    whole, other = Rank().hold("a", shape).hold("b", shape), Rank().hold("a", shape)
    other.hold("b", shape, tp(shape, 0, 2, 0)).hold("b", shape, tp(shape, 0, 2, 1))
    writers, readers = ([other], [whole]) if side == "writer" else ([whole], [other])
    by_key = Classes.by_key
    monkeypatch.setattr(Classes, "by_key", classmethod(lambda _, key: by_key(np.zeros_like(key))))
    made = Plan(layout(writers), {"r": layout(readers)}, Rules())
    with pytest.raises(PlanError, match="not cut like its class"):
        made.reader("r", 0)
    with pytest.raises(PlanError, match="not cut like its class"):
        made.writer(0)


def test_the_order_of_boxes_in_memory_does_not_count():
    shape = (8, 4)
    first, second = (tp(shape, 0, 2, n) for n in range(2))
    writer = Rank().hold("a", shape, first).hold("a", shape, second).hold("b", shape, second)
    writer.hold("b", shape, first)
    made = plan(layout([writer]), {"r": Layout((Rank().hold("a", shape).hold("b", shape).manifest(),))})
    assert made.classes == 1
    hops = made.reader("r", 0)
    assert hops.src_storage.tolist() == [0, 1, 3, 2]
    sync([writer], {"r": [Rank().hold("a", shape).hold("b", shape)]})
