"""Bad input: an error of the tree that names tensor, rank, expected and found, before a byte moves."""

from __future__ import annotations

import pytest

from syncline.errors import (
    CoverageError,
    LayoutError,
    NameMismatchError,
    PlanError,
    ShapeMismatchError,
    UndeclaredCastError,
)
from syncline.layout import Box, Layout, Rules, Shard, View
from syncline.layout.transform import Transform, cast_name, register_transform
from syncline.plan import plan
from tests.plan.helpers import Rank, layout, sync

SHAPE = (8, 4)


def boxes(*parts):
    """One rank for every (low, high) row range of w."""
    return layout([Rank().hold("w", SHAPE, Box((low, 0), (high - low, 4))) for low, high in parts])


WHOLE = {"a": boxes((0, 8))}


def test_prefix_that_the_reader_does_not_know():  # B24
    sent = [Rank().hold(f"model.language_model.{n}", (2,)) for n in range(3)]
    wanted = {"a": layout([Rank().hold(f"model.{n}", (2,)) for n in range(3)])}
    with pytest.raises(NameMismatchError) as error:
        plan(layout(sent), wanted)
    assert "received 3, applied 0, missing 3" in error.value.what
    assert "model.language_model.0" in str(error.value)
    assert "model.0" in str(error.value)
    assert error.value.rank == "instance a"


def test_unknown_names_fail_and_extras_are_explicit():  # B25
    writer = Rank()
    for n in range(113):
        writer.hold(f"t{n}", (2,))
    reader = [Rank().hold("t7", (2,))]
    with pytest.raises(NameMismatchError, match="112 sent names that no rank wants"):
        plan(layout([writer]), {"a": layout(reader)})
    with pytest.raises(NameMismatchError, match="received 113, applied 1"):
        plan(layout([writer]), {"a": layout(reader)}, Rules(extras=("t1*",)))
    made = sync([writer], {"a": reader}, Rules(extras=("t*",)))
    assert made.names == ("t7",)


def test_reader_names_that_nobody_sends_are_declared_frozen():  # B25, reversed
    reader = [Rank().hold("w", (2,)).hold("vision.w", (3,))]
    with pytest.raises(NameMismatchError, match=r"1 reader names that nobody sends, e\.g\. vision\.w"):
        plan(layout([Rank().hold("w", (2,))]), {"a": layout(reader)})
    sync([Rank().hold("w", (2,))], {"a": reader}, Rules(frozen=("vision.*",)))


def test_names_are_checked_for_each_instance():
    writer = layout([Rank().hold("v", (2,)).hold("w", (2,))])
    both, one = layout([Rank().hold("v", (2,)), Rank().hold("w", (2,))]), layout([Rank().hold("w", (2,))])
    plan(writer, {"a": both})
    with pytest.raises(NameMismatchError) as error:
        plan(writer, {"a": both, "b": one})
    assert (error.value.rank, error.value.tensor) == ("instance b", "v")


@pytest.mark.parametrize("shape", [(9, 4), (8, 4, 1), (32,)])
def test_another_shape(shape):
    with pytest.raises(ShapeMismatchError) as error:
        plan(boxes((0, 8)), {"a": layout([Rank(), Rank().hold("w", shape)])})
    assert error.value.tensor == "w"
    assert error.value.rank == "instance a, rank 1"
    assert error.value.expected == "(8, 4), as writer 0 says"
    assert error.value.found == str(shape)


def test_writers_that_disagree_about_a_shape():
    writers = [Rank().hold("w", SHAPE), Rank().hold("w", (9, 4))]
    with pytest.raises(ShapeMismatchError) as error:
        plan(layout(writers), WHOLE)
    assert error.value.rank == "writer 1"


def test_narrowing_needs_a_declaration():
    reader = [Rank().hold("w", SHAPE, dtype="bfloat16")]
    with pytest.raises(UndeclaredCastError) as error:
        plan(boxes((0, 8)), {"a": layout(reader)})
    assert (error.value.tensor, error.value.found) == ("w", "bfloat16")
    with pytest.raises(UndeclaredCastError):
        plan(boxes((0, 8)), {"a": layout(reader)}, Rules(casts={"*": "float16"}))
    made = sync([Rank().hold("w", SHAPE)], {"a": reader}, Rules(casts={"w": "bfloat16"}))
    assert made.casts == [("w", "float32", "bfloat16")]


def test_casts_without_meaning_are_refused_even_if_declared():
    reader = {"a": layout([Rank().hold("w", SHAPE, dtype="int32")])}
    with pytest.raises(UndeclaredCastError):
        plan(boxes((0, 8)), reader, Rules(casts="reader"))


def test_a_cast_may_be_declared_by_either_name_of_a_tied_tensor():
    writer = layout([Rank().hold("embed", SHAPE)])
    reader = {"a": layout([Rank().hold("embed", SHAPE).hold("head", SHAPE, dtype="bfloat16")])}
    aliases = {"head": "embed"}
    assert plan(writer, reader, Rules(casts={"head": "bfloat16"}, aliases=aliases)).casts
    both = {
        "a": layout([Rank().hold("head", SHAPE, dtype="bfloat16").hold("other", SHAPE, dtype="bfloat16")])
    }
    with pytest.raises(UndeclaredCastError, match="other"):
        plan(writer, both, Rules(casts={"head": "bfloat16"}, aliases={**aliases, "other": "embed"}))


def test_a_readers_own_cast_transform_declares_it():
    reader = Rank().hold("w", SHAPE, dtype="bfloat16")
    shard = reader.shards[0]
    chain = (cast_name("float32", "bfloat16"),)
    reader.shards = [Shard("w", SHAPE, "bfloat16", shard.box, shard.view, chain)]
    sync([Rank().hold("w", SHAPE)], {"a": [reader]})


def with_transform(name, dtype="float32"):
    rank = Rank().hold("w", SHAPE, dtype=dtype)
    rank.shards = [Shard("w", SHAPE, dtype, rank.shards[0].box, rank.shards[0].view, (name,))]
    return layout([rank])


def test_transforms_that_cannot_be_applied_are_refused_by_name():
    with pytest.raises(LayoutError, match="unknown transform") as unknown:
        plan(boxes((0, 8)), {"a": with_transform("nobody:knows")})
    assert unknown.value.tensor == "w"
    with pytest.raises(LayoutError, match="unknown transform"):
        plan(with_transform("nobody:knows"), WHOLE)
    register_transform(Transform("test:offset", "float32", "float32", True, lambda x: x))
    with pytest.raises(PlanError, match="needs a transform") as known:
        plan(boxes((0, 8)), {"a": with_transform("test:offset")})
    assert known.value.tensor == "w"
    with pytest.raises(PlanError, match="needs a transform"):
        plan(with_transform("test:offset"), WHOLE)


def test_writers_of_one_tensor_in_two_dtypes():
    writers = [Rank().hold("w", SHAPE), Rank().hold("w", SHAPE, dtype="bfloat16")]
    with pytest.raises(LayoutError, match="two dtypes") as error:
        plan(layout(writers), WHOLE)
    assert (error.value.tensor, error.value.rank, error.value.found) == ("w", "writer 1", "bfloat16")


def test_a_gap_is_named_with_its_rows():  # B52
    with pytest.raises(CoverageError) as error:
        plan(boxes((0, 3), (4, 8)), {"a": boxes((0, 2), (2, 8))})
    assert error.value.tensor == "w"
    assert error.value.rank == "instance a, rank 1"
    assert error.value.found == "none for [3:4, 0:4]"
    plan(boxes((0, 3), (4, 8)), {"a": boxes((0, 3), (5, 8))})


def test_nobody_holds_an_element():
    empty = layout([Rank().hold("w", SHAPE, Box((0, 0), (0, 4)))])
    with pytest.raises(CoverageError, match="32 of 32"):
        plan(empty, WHOLE)


@pytest.mark.parametrize("parts", [((0, 5), (4, 8)), ((0, 8), (0, 4)), ((0, 4), (4, 8), (3, 5))])
def test_writers_that_overlap_without_being_replicas(parts):  # B52
    with pytest.raises(CoverageError, match="overlap") as error:
        plan(boxes(*parts), WHOLE)
    assert error.value.tensor == "w"
    assert "writer 0" in str(error.value.rank) or "writer 1" in str(error.value.rank)
    assert "both with [" in str(error.value.found)


def test_nested_shards_that_overlap_on_a_segment_boundary():
    """Each segment of the interleaved views is the same or apart, and the shards still overlap."""
    ranks = []
    for low in (0, 2):
        rank = Rank()
        number = rank.storage(6 * 2 * 4 * 4)
        view = View(number, 0, ((3, 2), (4,)), ((16, 4), (1,)))
        rank.shards.append(Shard("w", SHAPE, "float32", Box((low, 0), (6, 4)), view))
        ranks.append(rank)
    with pytest.raises(CoverageError) as error:
        plan(layout(ranks), WHOLE)
    assert error.value.found == "[0:6, 0:4] and [2:8, 0:4], both with [2:6, 0:4]"


def test_a_box_outside_of_its_tensor():  # B52
    with pytest.raises(LayoutError, match="outside of its tensor"):
        boxes((0, 4), (4, 9))


def reader_of(*shards, nbytes=4096):
    rank = Rank()
    rank.storage(nbytes)
    rank.shards = [Shard(name, SHAPE, "float32", Box.whole(SHAPE), view) for name, view in shards]
    return {"a": layout([rank])}


def simple(offset, *strides):
    return View.simple(0, offset, SHAPE, strides)


def test_destination_of_stride_zero():
    with pytest.raises(CoverageError, match="stride 0") as error:
        plan(boxes((0, 8)), reader_of(("w", simple(0, 0, 1))))
    assert error.value.tensor == "w"


def test_sources_may_be_expanded():
    writer = Rank()
    writer.storage(4)
    writer.shards = [Shard("w", (5,), "float32", Box.whole((5,)), View.simple(0, 0, (5,), (0,)))]
    made = plan(layout([writer]), {"a": layout([Rank().hold("w", (5,))])})
    assert made.reader("a", 0).src_stride.tolist() == [[0]]


TWO = layout([Rank().hold("v", SHAPE).hold("w", SHAPE)])


@pytest.mark.parametrize(
    "views",
    [
        (simple(0, 4, 1), simple(0, 4, 1)),  # the same memory under two names
        (simple(0, 4, 1), simple(31, 4, 1)),  # the last element
        (simple(0, 8, 1), simple(7, 8, 1)),  # interleaved columns that meet
        (simple(0, 8, 1), simple(4, 4, 1)),  # no common radix
        (simple(0, 8, 2), simple(2, 8, 2)),
        (simple(0, 1, 8), simple(4, 1, 8)),  # transposed
    ],
)
def test_a_destination_byte_with_two_sources(views):
    with pytest.raises(CoverageError, match="written twice") as error:
        plan(TWO, reader_of(("v", views[0]), ("w", views[1])))
    assert "storage 0" in str(error.value.found)
    assert error.value.rank == "instance a, rank 0"


@pytest.mark.parametrize(
    "views",
    [
        (simple(0, 4, 1), simple(32, 4, 1)),
        (simple(0, 8, 1), simple(4, 8, 1)),
        (simple(0, 8, 2), simple(1, 8, 2)),
        (simple(0, 1, 16), simple(8, 1, 16)),
        (simple(0, 12, 1), simple(5, 12, 2)),  # no common radix, and yet apart
        (simple(0, 4, 1), simple(32, 1, 9)),
    ],
)
def test_destinations_that_interleave_without_meeting(views):
    plan(TWO, reader_of(("v", views[0]), ("w", views[1])))


def test_a_view_that_meets_itself():
    with pytest.raises(CoverageError, match="written twice"):
        plan(boxes((0, 8)), reader_of(("w", simple(0, 3, 1))))
    plan(boxes((0, 8)), reader_of(("w", simple(0, 2, 17))))
    plan(boxes((0, 8)), reader_of(("w", View.simple(0, 0, SHAPE, (5, 41)))))


def test_dtypes_share_bytes_not_elements():
    rank = Rank()
    rank.storage(256)
    rank.shards = [
        Shard("v", SHAPE, "float32", Box.whole(SHAPE), View.contiguous(0, 0, SHAPE)),
        Shard("w", SHAPE, "bfloat16", Box.whole(SHAPE), View.contiguous(0, 63, SHAPE)),
    ]
    rules = Rules(casts="reader")
    with pytest.raises(CoverageError, match="written twice"):
        plan(TWO, {"a": layout([rank])}, rules)
    rank.shards[1] = Shard("w", SHAPE, "bfloat16", Box.whole(SHAPE), View.contiguous(0, 64, SHAPE))
    plan(TWO, {"a": layout([rank])}, rules)


def test_sides_without_ranks_and_ranks_out_of_range():
    with pytest.raises(PlanError, match="at least one reader"):
        plan(boxes((0, 8)), {})
    with pytest.raises(PlanError, match="without ranks"):
        plan(Layout(()), WHOLE)
    with pytest.raises(PlanError, match="without ranks"):
        plan(boxes((0, 8)), {"a": Layout(())})
    made = plan(boxes((0, 8)), WHOLE)
    for call in (lambda: made.reader("b", 0), lambda: made.reader("a", 1), lambda: made.writer(1)):
        with pytest.raises(PlanError, match="no such"):
            call()
    with pytest.raises(PlanError, match="no such"):
        made.digest_rows(-1)
