"""Layouts that real jobs have: parallelism of every kind on both sides, fused and interleaved parameters."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from syncline.errors import NameMismatchError
from syncline.layout import Box, Rules, Shard, View
from syncline.plan import plan
from tests.plan.helpers import Rank, layout, sync, tp


def gate_up(shape, parts, part, *, interleaved=False, fused=True):
    """A rank with gate and up cut by rows, fused as [gate_i; up_i], or row by row in turn."""
    rank = Rank()
    box = tp(shape, 0, parts, part)
    rows, columns = box.size
    if not fused:
        return rank.hold("gate", shape, box).hold("up", shape, box)
    number = rank.storage(2 * rows * columns * 4)
    step = 2 * columns if interleaved else columns
    offsets = (0, columns) if interleaved else (0, rows * columns)
    for name, offset in zip(("gate", "up"), offsets, strict=True):
        view = View.simple(number, offset, box.size, (step, 1))
        rank.shards.append(Shard(name, shape, "float32", box, view))
    return rank


@pytest.mark.parametrize("readers", [1, 3, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gate_and_up_fused_across_tp_sizes(readers, interleaved):  # B06
    writers = [gate_up((12, 6), 2, w, interleaved=interleaved) for w in range(2)]
    sync(writers, {"a": [gate_up((12, 6), readers, r, interleaved=not interleaved) for r in range(readers)]})
    sync(writers, {"a": [gate_up((12, 6), readers, r, interleaved=interleaved) for r in range(readers)]})


def test_one_publish_feeds_fused_and_split_readers():  # B07
    writers = [gate_up((12, 6), 2, w, fused=False) for w in range(2)]
    readers = {
        "split": [gate_up((12, 6), 1, 0, fused=False)],
        "fused": [gate_up((12, 6), 2, r) for r in range(2)],
    }
    made = sync(writers, readers)
    assert [made.reader("split", 0).nbytes.sum(), made.reader("fused", 0).nbytes.sum()] == [576, 288]


def test_replicated_kv_heads():  # B03
    shape, heads = (8, 6), 4  # 2 heads of 4 rows
    writers = [Rank().hold("k", shape, tp(shape, 0, 2, w)) for w in range(2)]
    readers = [Rank().hold("k", shape, tp(shape, 0, 2, r // 2)) for r in range(heads)]
    made = sync(writers, {"a": readers})
    for r in range(4):
        hops = made.reader("a", r)
        assert hops.offset.tolist() == [[4 * (r // 2), 0]]
        assert hops.size.tolist() == [[4, 6]]
        assert hops.src.tolist() == [r // 2]


@pytest.mark.parametrize("train_tp", [1, 4])
@pytest.mark.parametrize("context", [1, 8])
def test_every_quarter_is_served(train_tp, context):  # B08
    shape = (16, 6)
    boxes = [tp(shape, 0, train_tp, t) for _ in range(context) for t in range(train_tp)]
    writers = [Rank().hold("qkv", shape, box) for box in boxes]
    made = sync(writers, {"a": [Rank().hold("qkv", shape, tp(shape, 0, 4, r)) for r in range(4)]})
    assert [made.reader("a", r).offset[0, 0] for r in range(4)] == [0, 4, 8, 12]


def experts(names, cut=None, shape=(8, 6)):
    rank = Rank()
    for e in names:
        rank.hold(f"experts.{e}.w", shape, tp(shape, 0, *cut) if cut else None)
    return rank


@pytest.mark.parametrize(("tensor", "expert"), [(4, 1), (4, 2), (4, 4)])
def test_expert_parallel_times_expert_tensor_parallel(tensor, expert):  # B11
    writers = [experts(range(2 * w, 2 * w + 2)) for w in range(4)]
    cut, each = tensor // expert, 8 // expert
    readers = [experts(range(r // cut * each, r // cut * each + each), (cut, r % cut)) for r in range(tensor)]
    made = sync(writers, {"a": readers})
    held = [{made.names[t] for t in made.reader("a", r).tensor} for r in range(tensor)]
    assert [len(names) for names in held] == [each] * tensor
    assert set.union(*held) == {f"experts.{e}.w" for e in range(8)}


def test_each_expert_comes_from_its_owner():  # B12
    writers = [experts(range(4)), experts(range(4, 8))]
    made = sync(writers, {"a": [experts(range(8))]})
    assert np.bincount(made.reader("a", 0).src).tolist() == [4, 4]
    with pytest.raises(NameMismatchError, match=r"4 reader names that nobody sends, e\.g\. experts\.4\.w"):
        plan(layout(writers[:1]), {"a": layout([experts(range(8))])})


def slots(mapping, shape=(4, 3)):
    """A fused tensor of physical expert slots; ``mapping`` names the checkpoint tensor of each."""
    rank = Rank()
    size = shape[0] * shape[1]
    number = rank.storage(len(mapping) * size * 4)
    for slot, name in enumerate(mapping):
        rank.shards.append(
            Shard(name, shape, "float32", Box.whole(shape), View.contiguous(number, slot * size, shape))
        )
    return rank


def test_shared_expert_in_the_last_slot():  # B13
    names = [f"experts.{e}" for e in range(8)]
    writers = [slots(names), slots(["shared"])]
    made = sync(writers, {"a": [slots([*names[4 * r : 4 * r + 4], "shared"]) for r in range(2)]})
    for r in range(2):
        hops = made.reader("a", r)
        last = hops.take(hops.dst_base == 4 * 12)
        assert [made.names[t] for t in last.tensor] == ["shared"]


def test_redundant_experts_are_all_fed():  # B14
    logical = [f"experts.{e}" for e in range(8)]

    def physical(mapping):
        rank = slots(logical)
        for name in mapping:  # a second copy of an expert is another storage under an alias
            rank.hold(f"{name}.replica", (4, 3))
        return rank

    ids = set()
    for copies in ([3, 5], [1, 6]):
        rules = Rules(aliases={f"experts.{e}.replica": f"experts.{e}" for e in copies})
        reader = physical([f"experts.{e}" for e in copies])
        made = sync([slots(logical[:4]), slots(logical[4:])], {"a": [reader]}, rules)
        assert len(made.reader("a", 0)) == 10
        ids.add(made.id)
    assert len(ids) == 2


def layers(numbers, shape=(6, 4), cut=None):
    rank = Rank()
    for n in numbers:
        rank.hold(f"layers.{n}.w", shape, tp(shape, n % 2, *cut) if cut else None)
    return rank


def test_uneven_pipeline_with_virtual_stages():  # B16
    chunks = [[0], [1], [2, 3], [4]]
    writers = [layers(chunks[0] + chunks[2]), layers(chunks[1] + chunks[3])]
    made = sync(writers, {"a": [layers(range(5))]})
    assert made.names == tuple(f"layers.{n}.w" for n in range(5))
    assert sorted(made.reader("a", 0).tensor.tolist()) == list(range(5))


def mesh(tensor, pipe, count=4):
    step = count // pipe
    return [
        layers(range(p * step, p * step + step), cut=(tensor, t)) for p in range(pipe) for t in range(tensor)
    ]


SHAPES = [*itertools.product((1, 2, 4), (1, 2)), (3, 1)]


@pytest.mark.parametrize("train", SHAPES)
@pytest.mark.parametrize("infer", SHAPES)
def test_any_parallelism_to_any_other(train, infer):  # B17
    sync(mesh(*train), {"a": mesh(*infer)})


@pytest.mark.parametrize("rows", [8, 10])
@pytest.mark.parametrize("readers", [1, 2, 4])
def test_strided_sharding_of_fsdp_over_tp(rows, readers):  # B49
    shape = (rows, 3)
    writers = []
    for half, piece in itertools.product(range(2), range(2)):
        part = tp(shape, 0, 2, piece)
        own = tp(part.size, 0, 2, half).shift(part.offset)
        writers.append(Rank().hold("w", shape, own))
    sync(writers, {"a": [Rank().hold("w", shape, tp(shape, 0, readers, r)) for r in range(readers)]})


def test_replicas_give_one_source():  # B50
    reader = {"a": [Rank().hold("w", (6, 4))]}
    replicated = sync([Rank().hold("w", (6, 4)) for _ in range(3)], reader)
    plain = sync([Rank().hold("w", (6, 4))], reader)
    assert len(replicated.reader("a", 0)) == len(plain.reader("a", 0)) == 1
    assert replicated.reader("a", 0).nbytes.sum() == 96
    assert sorted(len(replicated.digest_rows(w)) for w in range(3)) == [1, 1, 1]


def test_replicas_are_all_digested_and_the_choice_is_stable():  # B51
    writers = [Rank().hold("w", (6, 4)) for _ in range(2)]
    readers = {"a": layout([Rank().hold("w", (6, 4))])}
    first, second = plan(layout(writers), readers), plan(layout(writers), readers, Rules(frozen=("unused",)))
    assert first.reader("a", 0).src.tolist() == second.reader("a", 0).src.tolist()
    assert first.digest_rows(0).piece.tolist() == first.digest_rows(1).piece.tolist() == [0]


def test_a_box_across_a_grid_of_sources():  # B53
    shape = (8, 9)
    writers = [
        Rank().hold("w", shape, Box((4 * i, 3 * j), (4, 3))) for i, j in itertools.product(range(2), range(3))
    ]
    made = sync(writers, {"a": [Rank().hold("w", shape, Box((2, 1), (4, 5)))]})
    assert sorted(made.reader("a", 0).src.tolist()) == [0, 1, 3, 4]


def test_data_parallel_readers_with_tensor_parallelism():  # B94
    shape = (8, 6)
    writers = [Rank().hold("w", shape, tp(shape, 0, 2, w)) for w in range(2)]
    readers = [Rank().hold("w", shape, tp(shape, 1, 2, t)) for _ in range(2) for t in range(2)]
    made = sync(writers, {"a": readers})
    sync(writers[::-1], {"a": readers[::-1]})
    for r in range(2):
        assert made.reader("a", r).nbytes.tolist() == made.reader("a", r + 2).nbytes.tolist()


def test_replicas_that_lie_differently_in_memory():
    """One replica is interleaved and has many segments, the other is one block: both may serve."""
    shape = (12, 2)

    def mixed():
        rank = Rank()
        number = rank.storage(2 * 24 * 4)
        for slot, name in enumerate(("q", "k")):
            view = View(number, slot * 6, ((4, 3), (2,)), ((12, 2), (1,)))
            rank.shards.append(Shard(name, shape, "float32", Box.whole(shape), view))
        return rank

    block = Rank().hold("q", shape).hold("k", shape)
    made = sync([block, mixed()], {"a": [Rank().hold("q", shape).hold("k", shape)], "b": [mixed()]})
    assert set(made.writer(0).src.tolist()) == {0}
    assert made.sender_load.min() > 0


def test_tied_and_untied_readers_of_one_tied_writer():  # B19
    rules = Rules(aliases={"lm_head": "embed"})
    shape = (6, 4)

    def tied():
        rank = Rank().hold("embed", shape)
        rank.shards.append(Shard("lm_head", shape, "float32", rank.shards[0].box, rank.shards[0].view))
        return rank

    readers = {
        "tied": [tied()],
        "untied": [Rank().hold("embed", shape).hold("lm_head", shape)],
        "named": [Rank().hold("lm_head", shape)],
    }
    for writer in (Rank().hold("embed", shape), Rank().hold("lm_head", shape), tied()):
        made = sync([writer], readers, rules)
        assert made.names == ("embed",)
        assert [len(made.reader(name, 0)) for name in ("named", "tied", "untied")] == [1, 1, 2]
        assert len(made.digest_rows(0)) == 1


def test_empty_ranks_scalars_and_empty_tensors():
    writers = [Rank().hold("scale", (), dtype="bfloat16").hold("none", (0, 4)), Rank().hold("none", (0, 4))]
    made = sync([*writers, Rank()], {"a": [Rank().hold("scale", ()), Rank().hold("none", (0, 4)), Rank()]})
    assert made.casts == [("scale", "bfloat16", "float32")]
    assert [len(made.reader("a", r)) for r in range(3)] == [1, 0, 0]


def test_instances_of_different_dtypes_have_pieces_of_their_own():
    writers = [Rank().hold("w", (4, 4))]
    readers = {"wide": [Rank().hold("w", (4, 4))], "half": [Rank().hold("w", (4, 4), dtype="bfloat16")]}
    made = sync(writers, readers, Rules(casts={"w": "bfloat16"}))
    assert made.pieces.nbytes.tolist() == [64, 32]
