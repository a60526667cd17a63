"""Random meshes, cuts, nested views, replicas and dtypes against the oracle, bit for bit."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from syncline.errors import CoverageError
from syncline.layout import Box, Rules, Shard, View
from syncline.layout.dtype import itemsize
from syncline.plan import plan
from tests.plan.helpers import Rank, element_bytes, indices, layout, sync

SOURCES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "uint8")
READERS = {
    "float32": ("float32", "bfloat16", "float64", "float16"),
    "bfloat16": ("bfloat16", "float32"),
    "float16": ("float16", "float32", "bfloat16"),
    "float8_e4m3fn": ("float8_e4m3fn", "bfloat16"),
    "int64": ("int64",),
    "uint8": ("uint8",),
}


@st.composite
def cut(draw, shape):
    """A grid over a tensor: some cuts, possibly uneven, in every dimension."""
    parts = []
    for extent in shape:
        inner = draw(st.lists(st.integers(1, max(extent - 1, 1)), max_size=2)) if extent > 1 else []
        edges = sorted({0, extent, *inner})
        parts.append(list(itertools.pairwise(edges)) if extent else [(0, 0)])
    return [
        Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*parts)
    ]


def factors(n):
    return [(a, n // a) for a in range(2, n) if n % a == 0]


@st.composite
def nested(draw, box, storage, slots):
    """Views of ``slots`` boxes of one size that share a storage: nests, any memory order, padding."""
    nests = []
    for n in box.size:
        splits = factors(n)
        nests.append(draw(st.sampled_from([(n,), *splits])) if splits else (n,))
    axes = [(d, k) for d, nest in enumerate(nests) for k in range(len(nest))]
    order = draw(st.permutations([*axes, "slot"]))
    strides = {}
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        extent = slots if axis == "slot" else nests[axis[0]][axis[1]]
        step *= max(extent, 1)
        if draw(st.integers(0, 5)) == 0:
            step += draw(st.integers(1, 3))  # padding
    stride = tuple(tuple(strides[d, k] for k in range(len(nest))) for d, nest in enumerate(nests))
    return step, [View(storage, slot * strides["slot"], tuple(nests), stride) for slot in range(slots)]


@st.composite
def place(draw, rank, held):
    """Give a rank the boxes [(name, shape, box, dtype)]; equal ones sometimes interleave in one storage."""
    rest = list(held)
    while rest:
        first = rest.pop(0)
        group = [first]
        mates = [h for h in rest if h[2].size == first[2].size and h[3] == first[3]]
        if mates and draw(st.booleans()):
            group.append(mates[0])
            rest.remove(mates[0])
        number = rank.storage(0)
        elements, views = draw(nested(first[2], number, len(group)))
        rank.sizes[number] = elements * itemsize(first[3])
        for (name, shape, box, dtype), view in zip(group, views, strict=True):
            rank.shards.append(Shard(name, shape, dtype, box, view))


@st.composite
def worlds(draw):
    tensors = {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), max_size=4)))
        while math.prod(shape) > 200:
            shape = shape[:-1]
        if draw(st.integers(0, 15)) == 0:
            shape = (*shape, 0)
        tensors[f"t{number}"] = (shape, draw(st.sampled_from(SOURCES)))
    writers = [Rank() for _ in range(draw(st.integers(1, 4)))]
    held = [[] for _ in writers]
    for name, (shape, dtype) in tensors.items():
        for box in draw(cut(shape)):
            owners = draw(st.sets(st.integers(0, len(writers) - 1), min_size=1))
            for w in sorted(owners):
                held[w].append((name, shape, box, dtype))
    for rank, boxes in zip(writers, held, strict=True):
        draw(place(rank, boxes))
    readers = {}
    for instance in ("a", "b")[: draw(st.integers(1, 2))]:
        ranks = [Rank() for _ in range(draw(st.integers(1, 3)))]
        kept = [[] for _ in ranks]
        for name, (shape, dtype) in tensors.items():
            kind = draw(st.sampled_from(READERS[dtype]))
            boxes = draw(cut(shape))
            for number, box in enumerate(boxes):
                owners = draw(st.sets(st.integers(0, len(ranks) - 1), min_size=1 if number == 0 else 0))
                for r in sorted(owners):
                    kept[r].append((name, shape, box, kind))
        for rank, boxes in zip(ranks, kept, strict=True):
            draw(place(rank, boxes))
        readers[instance] = ranks
    return writers, readers


def boxes_of(hops):
    rows = np.column_stack([hops.tensor, hops.offset, hops.size, hops.dst_storage, hops.dst_base])
    return sorted(map(tuple, rows.tolist()))


@st.composite
def crowded(draw):
    """Views of a few tensors in one small storage, that may share bytes."""
    dims = draw(st.integers(1, 3))
    shards = []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 4), min_size=dims, max_size=dims)))
        stride = draw(
            st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 48]), min_size=dims, max_size=dims)
        )
        view = View.simple(0, draw(st.integers(0, 40)), shape, stride)
        dtype = draw(st.sampled_from(["uint8", "float16", "float16", "float32"]))
        shards.append(Shard(f"t{number}", shape, dtype, Box.whole(shape), view))
    return shards


@settings(max_examples=200, deadline=None)
@given(crowded())
def test_shared_destination_bytes_are_found_exactly(shards):
    """Against all bytes of all elements, counted one by one."""
    seen = Counter()
    for s in shards:
        for index in indices(s.box.size):
            place = element_bytes(s, index)
            seen.update(range(place.start, place.stop))
    reader = Rank(list(shards), [1 << 12])
    writer = Rank()
    for s in shards:
        writer.hold(s.name, s.global_shape, dtype=s.dtype)
    if max(seen.values()) > 1:
        with pytest.raises(CoverageError, match="written twice"):
            plan(layout([writer]), {"a": layout([reader])})
    else:
        plan(layout([writer]), {"a": layout([reader])})


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(worlds(), st.integers(0, 2**32 - 1))
def test_random_layouts_agree_with_the_oracle(world, seed):
    writers, readers = world
    sync(writers, readers, Rules(casts="reader"), seed)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(worlds(), st.randoms(use_true_random=False))
def test_rank_order_changes_nothing_but_numbers(world, random):
    """Permuted ranks and instances move the same boxes in the same pieces, and install the same."""
    writers, readers = world
    shuffled = list(writers)
    random.shuffle(shuffled)
    rules = Rules(casts="reader")
    sides = {name: layout(ranks) for name, ranks in readers.items()}
    one = plan(layout(writers), sides, rules)
    other = plan(layout(shuffled), dict(reversed(sides.items())), rules)
    assert one.sender_load.sum() == other.sender_load.sum()
    assert one.piece_count == other.piece_count
    np.testing.assert_array_equal(one.pieces.offset, other.pieces.offset)
    for name, ranks in readers.items():
        for r in range(len(ranks)):
            a, b = one.reader(name, r), other.reader(name, r)
            assert boxes_of(a) == boxes_of(b)
    sync(shuffled, readers, rules)
