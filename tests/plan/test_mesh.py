"""Trainers that are a mesh: planned by rule, they move what their manifests, written out, would move."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from syncline.errors import LayoutError, ManifestError, PlanError, WireVersionError
from syncline.layout import Box, Layout, Manifest, Rules, Shard, View
from syncline.layout.dtype import ITEMSIZE, code, itemsize
from syncline.layout.mesh import MeshLayout
from syncline.layout.placement import Cut, place
from syncline.plan import lower, plan
from tests.plan.helpers import Rank, layout, sync, tp


def whole_of(tensors):
    """A manifest of whole tensors [(name, shape, dtype, storage)], behind each other in their storages."""
    used, shards = {}, []
    for name, shape, dtype, storage in tensors:
        view = View.contiguous(storage, used.get(storage, 0), shape)
        shards.append(Shard(name, shape, dtype, Box.whole(shape), view))
        used[storage] = used.get(storage, 0) + math.prod(shape)
    kinds = {storage: dtype for _, _, dtype, storage in tensors}
    return Manifest.from_shards(shards, [used[s] * itemsize(kinds[s]) for s in sorted(used)])


@st.composite
def meshes(draw):
    """Some tensors of few shapes over a mesh of one or two dimensions; alone or several in a storage."""
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    shapes = draw(
        st.lists(st.sampled_from([(5,), (4, 3), (7, 2), (1, 6), (2, 3, 2), ()]), min_size=1, max_size=3)
    )
    packed, tensors, cuts = draw(st.booleans()), [], []
    for n in range(draw(st.integers(1, 4))):
        shape = draw(st.sampled_from(shapes))
        dtype = draw(st.sampled_from(["bfloat16", "float32"]))
        tensors.append((f"t{n}", shape, dtype, n))
        cuts.append([draw(st.integers(-1, len(shape) - 1)) for _ in mesh])
    if packed:
        kinds = sorted({dtype for _, _, dtype, _ in tensors})
        tensors = [(name, shape, dtype, kinds.index(dtype)) for name, shape, dtype, _ in tensors]
    return MeshLayout.of(whole_of(tensors), mesh, np.array(cuts).reshape(len(tensors), len(mesh)))


@st.composite
def sides(draw, made):
    """One or two instances that cut every tensor along some dimension."""
    found = {}
    for name in "ab"[: draw(st.integers(1, 2))]:
        found[name] = ranks = [Rank() for _ in range(draw(st.integers(1, 3)))]
        for shard in made.whole.shards():
            dim = draw(st.integers(0, max(len(shard.global_shape) - 1, 0)))
            dtype = draw(st.sampled_from([shard.dtype, "float32"]))
            for r, rank in enumerate(ranks):
                if not shard.global_shape:
                    rank.hold(shard.name, (), dtype=dtype)
                elif (box := tp(shard.global_shape, dim, len(ranks), r)).numel:
                    rank.hold(shard.name, shard.global_shape, box, dtype=dtype)
    return found


def rank_of(manifest):
    return Rank(list(manifest.shards()), manifest.storage_nbytes.tolist())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_ranks_hold_what_the_placements_say(data):
    """Every rank's manifest against the slow rule of placements, element by element of the local tensor."""
    made = data.draw(meshes())
    for rank in range(made.ranks):
        coordinate = np.unravel_index(rank, made.mesh)
        used = {}
        for t, shard in enumerate(made.manifest(rank).shards()):
            cuts = [
                Cut(int(made.cut[t, axis]), parts, int(coordinate[axis]))
                for axis, parts in enumerate(made.mesh)
                if made.cut[t, axis] >= 0
            ]
            placed = place(shard.global_shape, cuts)
            assert [p.box for p in placed] == ([shard.box] if shard.box.numel else [])
            if placed:
                start = used.get(shard.view.storage, 0)
                assert shard.view == View.contiguous(shard.view.storage, start, shard.box.size)
                used[shard.view.storage] = start + shard.box.numel


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_mesh_is_planned_as_its_manifests_would_be(data):
    """Bytes against the oracle; then bundles, written out, are each rank's hops; links agree on both ends."""
    made = data.draw(meshes())
    readers = data.draw(sides(made))
    decoded = MeshLayout.decode(made.encode())
    assert decoded.fingerprint == made.fingerprint
    rules = Rules(casts="reader")
    planned = plan(decoded, {name: layout(ranks) for name, ranks in readers.items()}, rules)
    writers = [rank_of(made.manifest(r)) for r in range(made.ranks)]
    sync(writers, readers, rules, made=planned)
    for name, ranks in readers.items():
        for r in range(len(ranks)):
            some = planned.received_bundles(name, r)
            assert same_rows(planned.hops(some), planned.reader(name, r))
            check_program(planned, some)
    for w in range(made.ranks):
        some = planned.sent_bundles(w)
        assert same_rows(planned.hops(some), planned.writer(w))
        assert some.copies == len(planned.writer(w))


def same_rows(one, other):
    return rows_of(one) == rows_of(other)


def rows_of(hops):
    plain = [f.name for f in fields(hops) if not f.name.startswith("piece")]
    table = np.column_stack([np.asarray(getattr(hops, name)) for name in plain])
    pieces = [
        tuple(hops.piece[a:b].tolist()) for a, b in zip(hops.piece_ptr, hops.piece_ptr[1:], strict=False)
    ]
    return sorted(zip(map(tuple, table.tolist()), pieces, strict=True))


def check_program(planned, some):
    """A bundle's descriptors, moved to where its tensors begin, are the descriptors of its hops."""
    runs = some.runs()
    hops = planned.hops(some)
    full = lower(hops.size, [hops.source_stream(), hops.destination_stream()])
    ends = np.cumsum(some.count)
    for b in range(len(some)):
        mine = np.nonzero(runs.hop == b)[0]
        for h in range(int(ends[b] - some.count[b]), int(ends[b])):
            theirs = np.nonzero(full.hop == h)[0]
            src = (hops.src_base[h] - some.src_base[b]) * ITEMSIZE[hops.src_dtype[h]]
            dst = (hops.dst_base[h] - some.dst_base[b]) * ITEMSIZE[hops.dst_dtype[h]]
            for at, shift in enumerate((src, dst)):
                np.testing.assert_array_equal(runs.base[at][mine] + shift, full.base[at][theirs])
                np.testing.assert_array_equal(runs.stride[at][mine], full.stride[at][theirs])
            np.testing.assert_array_equal(runs.rows[mine], full.rows[theirs])
            np.testing.assert_array_equal(runs.row_elems[mine], full.row_elems[theirs])


def experts(count, shape, offset, size):
    """A manifest of many tensors alike, each in a storage of its own."""
    names = [f"layers.{n // 64}.experts.{n % 64}.w" for n in range(count)]
    return Manifest.from_columns(
        names,
        np.tile(shape, (count, 1)),
        tensor=np.arange(count),
        dtype=code("bfloat16"),
        box_offset=np.tile(offset, (count, 1)),
        box_size=np.tile(size, (count, 1)),
        storage=np.arange(count),
        storage_nbytes=np.full(count, 2 * math.prod(size)),
    )


def test_programs_do_not_grow_with_the_number_of_tensors():
    """256 row shards against 16 column cuts: hundreds of thousands of copies, a descriptor a peer."""
    shape, count = (512, 64), 2_000
    made = MeshLayout.of(experts(count, shape, (0, 0), shape), (256,), np.zeros(count))
    reader = Layout(tuple(experts(count, shape, (0, 4 * r), (512, 4)) for r in range(16)))
    planned = plan(made, {"a": reader, "b": reader})
    some = planned.received_bundles("a", 3)
    assert some.copies == 256 * count
    assert len(some) == len(some.runs()) == 256
    assert int((some.count * some.nbytes).sum()) == 2 * count * 512 * 4
    assert len(planned.sent_bundles(7)) == 2 * 16
    assert len(made.encode()) < 20_000
    link = planned.hops(some.take(some.src == 9))
    np.testing.assert_array_equal(link.tensor, np.arange(count))
    assert set(link.src.tolist()) == {9}


def test_replicas_of_a_mesh_share_the_work():
    shape, count = (64, 8), 500
    made = MeshLayout.of(experts(count, shape, (0, 0), shape), (4, 8), [[-1, 0]] * count)
    reader = Layout((experts(count, shape, (0, 0), shape),))
    planned = plan(made, {"a": reader})
    assert planned.sender_load.max() <= 1.02 * planned.sender_load.mean()
    assert sum(planned.sent_bundles(w).copies for w in range(32)) == 8 * count
    received = planned.received_bundles("a", 0)
    assert received.copies == 8 * count
    assert len(received) < 64


def test_tensors_that_a_reader_lays_out_otherwise_are_no_bundle():
    shape = (4, 4)
    made = MeshLayout.of(whole_of([("a", shape, "float32", 0), ("b", shape, "float32", 1)]), (2,), [0, 0])
    turned = Rank().hold("a", shape)
    turned.shards.append(
        Shard("b", shape, "float32", Box.whole(shape), View.simple(turned.storage(64), 0, shape, (1, 4)))
    )
    planned = plan(made, {"x": layout([turned])})
    assert planned.classes == 2
    assert planned.received_bundles("x", 0).dst_stride.tolist() != [[4, 1]] * 4
    sync([rank_of(made.manifest(r)) for r in range(2)], {"x": [turned]}, made=planned)


def test_bundles_need_a_mesh():
    one = layout([Rank().hold("w", (4,))])
    with pytest.raises(PlanError, match="different ways"):
        plan(one, {"a": one}).received_bundles("a", 0)


def test_what_no_rule_can_say_is_refused():
    good = whole_of([("a", (4, 2), "float32", 0)])
    half = Manifest.from_shards(
        [Shard("a", (4, 2), "float32", Box((0, 0), (2, 2)), View.contiguous(0, 0, (2, 2)))], [16]
    )
    turned = Manifest.from_shards(
        [Shard("a", (4, 2), "float32", Box.whole((4, 2)), View.simple(0, 0, (4, 2), (1, 4)))], [32]
    )
    empty = whole_of([("a", (0, 2), "float32", 0)])
    mixed = whole_of([("a", (4,), "float32", 0), ("b", (8,), "float32", 1)])
    mixed = Manifest.from_columns(
        mixed.names, [[4], [8]], tensor=[0, 1], dtype=[code("float32"), code("bfloat16")],
        box_offset=[[0], [0]], box_size=[[4], [8]], storage=[0, 0], view_offset=[0, 8], storage_nbytes=[32],
    )  # fmt: skip
    for whole, cut in ((half, [0]), (turned, [0]), (empty, [0]), (good, [2]), (good, [-2]), (mixed, [0, 0])):
        with pytest.raises(LayoutError):
            MeshLayout.of(whole, (2,), cut)
    with pytest.raises(LayoutError, match="do not fit"):
        MeshLayout.of(good, (2,), [0], hosts=("h",))
    with pytest.raises(LayoutError, match="do not fit"):
        MeshLayout(good, (2, 2), np.zeros((1, 1)))


def test_damaged_frames_are_refused():
    data = MeshLayout.of(whole_of([("a", (4, 2), "float32", 0)]), (2,), [0]).encode()
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 0x41
        with pytest.raises((ManifestError, WireVersionError)):
            MeshLayout.decode(broken)
        with pytest.raises(ManifestError):
            MeshLayout.decode(data[:at])
    with pytest.raises(ManifestError, match="another kind"):
        Manifest.decode(data)


def test_every_part_of_a_mesh_counts():
    whole = whole_of([("a", (4, 4), "float32", 0)])
    first = MeshLayout.of(whole, (2, 2), [[0, 1]])
    others = [
        MeshLayout.of(whole, (2, 2), [[1, 0]]),
        MeshLayout.of(whole, (4, 1), [[0, 1]]),
        replace(first, hosts=tuple("abcd")),
        MeshLayout.of(whole_of([("b", (4, 4), "float32", 0)]), (2, 2), [[0, 1]]),
    ]
    assert len({first.fingerprint, *(m.fingerprint for m in others)}) == 5
