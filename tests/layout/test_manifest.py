from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import LayoutError, ShapeMismatchError
from syncline.layout import Box, Layout, Manifest, Shard, View
from syncline.layout.dtype import code, name_of
from tests.layout.strategies import shard_lists

if TYPE_CHECKING:
    from collections.abc import Iterator

Element = tuple[str, tuple[int, ...], int, int, str]


def key(shard: Shard) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return shard.name, shard.box.offset, shard.box.size


def elements(shard: Shard) -> Iterator[Element]:
    """Every element as (name, global index, storage, storage element, dtype), one by one."""
    for index in np.ndindex(*shard.box.size):
        place = tuple(int(o + i) for o, i in zip(shard.box.offset, index, strict=True))
        yield shard.name, place, shard.view.storage, shard.view.element(index), shard.dtype


def segment_elements(manifest: Manifest) -> Iterator[Element]:
    seg = manifest.segments()
    for row in range(len(seg)):
        ndim = int(manifest.ndim[seg.tensor[row]])
        for index in np.ndindex(*seg.size[row]):
            place = tuple((seg.offset[row] + index)[:ndim].tolist())
            at = int(seg.base[row] + (seg.stride[row] * index).sum())
            yield manifest.names[seg.tensor[row]], place, int(seg.storage[row]), at, name_of(seg.dtype[row])


@given(shard_lists())
def test_shards_come_back_sorted_and_whole(case: tuple[list[Shard], list[int]]) -> None:
    shards, sizes = case
    manifest = Manifest.from_shards(shards, sizes)
    assert list(manifest.shards()) == sorted(shards, key=key)
    assert list(manifest.names) == sorted({s.name for s in shards})
    assert manifest.storage_nbytes.tolist() == sizes
    assert manifest.rows == len(shards)


@given(shard_lists(), st.randoms())
def test_row_order_does_not_matter_and_contents_do(case: tuple[list[Shard], list[int]], rng: object) -> None:
    shards, sizes = case
    manifest = Manifest.from_shards(shards, sizes)
    shuffled = sorted(shards, key=lambda s: rng.random())  # pyright: ignore[reportAttributeAccessIssue]
    again = Manifest.from_shards(shuffled, sizes)
    assert again == manifest
    assert hash(again) == hash(manifest)
    assert Manifest.from_shards(shards, [n + 1 for n in sizes]) != manifest
    if shards:
        assert Manifest.from_shards(shards[1:], sizes) != manifest


@given(shard_lists())
def test_segments_name_the_same_elements(case: tuple[list[Shard], list[int]]) -> None:
    shards, sizes = case
    manifest = Manifest.from_shards(shards, sizes)
    expected = sorted(e for s in shards for e in elements(s))
    assert sorted(segment_elements(manifest)) == expected
    seg = manifest.segments()
    assert seg is manifest.segments()
    assert (np.diff(seg.tensor) >= 0).all()
    assert (np.diff(seg.shard) >= 0).all()
    assert (seg.size > 0).all()
    assert (seg.stride[seg.size == 1] == 0).all()
    same = np.flatnonzero(np.diff(seg.shard) == 0)
    for row in same:
        assert tuple(seg.offset[row]) < tuple(seg.offset[row + 1])


def test_nests_that_are_one_stride_are_one_segment() -> None:
    merged = Shard("a", (12,), "uint8", Box((0,), (12,)), View(0, 0, ((2, 1, 2, 3),), ((6, 99, 3, 1),)))
    interleaved = Shard("b", (12,), "uint8", Box((0,), (12,)), View(0, 0, ((2, 6),), ((20, 1),)))
    seg = Manifest.from_shards([merged, interleaved], [26]).segments()
    assert seg.tensor.tolist() == [0, 1, 1]
    assert seg.size.tolist() == [[12], [6], [6]]
    assert seg.base.tolist() == [0, 0, 20]
    assert seg.offset.tolist() == [[0], [0], [6]]


def test_columns_are_read_only_and_typed() -> None:
    shard = Shard("a", (2, 3), "float32", Box.whole((2, 3)), View.contiguous(0, 0, (2, 3)))
    manifest = Manifest.from_shards([shard], [24])
    assert (manifest.tensor.dtype, manifest.dtype.dtype) == (np.dtype("i4"), np.dtype("u1"))
    assert manifest.box_offset.dtype == manifest.axis_stride.dtype == np.dtype("i8")
    for column in (manifest.tensor, manifest.box_size, manifest.segments().base, manifest.segments().tensor):
        with pytest.raises(ValueError, match="read-only"):
            column[...] = 0
    assert len(manifest.fingerprint) == 16


def test_callers_array_stays_writable() -> None:
    storage = np.zeros(1, np.int32)
    Manifest.from_columns(
        ["a"],
        [[4]],
        tensor=[0],
        dtype=1,
        box_offset=[[0]],
        box_size=[[4]],
        storage=storage,
        storage_nbytes=[16],
    )
    storage[0] = 1


def test_identical_ranks_share_a_manifest() -> None:
    def build() -> Manifest:
        shard = Shard("a", (4,), "float32", Box.whole((4,)), View.contiguous(0, 0, (4,)))
        return Manifest.from_shards([shard], [16])

    assert build() == build()
    assert len({build(), build()}) == 1


def whole(
    name: str, shape: tuple[int, ...], kind: str = "float32", storage: int = 0, offset: int = 0
) -> Shard:
    return Shard(name, shape, kind, Box.whole(shape), View.contiguous(storage, offset, shape))


@pytest.mark.parametrize(
    ("shards", "sizes", "error", "match"),
    [
        ([whole("w", (4,))], [15], LayoutError, "outside of its storage"),
        ([whole("w", (4,), offset=1)], [16], LayoutError, "outside of its storage"),
        ([whole("w", (4,), offset=-1)], [99], LayoutError, "outside of its storage"),
        ([whole("w", (4,), storage=1)], [16], LayoutError, "storage points nowhere"),
        ([whole("w", (4,), storage=-1)], [16], LayoutError, "storage points nowhere"),
        ([whole("w", (4,)), whole("w", (4,))], [16], LayoutError, "same box twice in one place"),
        ([whole("w", (4,)), whole("w", (2, 2))], [16], ShapeMismatchError, "two global shapes"),
        ([whole("w", (4,), kind="float33")], [16], LayoutError, "unknown dtype"),
        ([whole("", (4,))], [16], LayoutError, "needs a name"),
        ([whole("w", (4,))], [-1], LayoutError, "negative size"),
        ([whole("w", (2**62, 4))], [16], LayoutError, "too large"),
        ([whole("w", (2**70,))], [16], LayoutError, "64 bits"),
        (
            [Shard("w", (4,), "float32", Box((2,), (3,)), View.contiguous(0, 0, (3,)))],
            [16],
            LayoutError,
            "outside of its tensor",
        ),
        (
            [Shard("w", (4,), "float32", Box((-1,), (3,)), View.contiguous(0, 0, (3,)))],
            [16],
            LayoutError,
            "outside of its tensor",
        ),
        (
            [Shard("w", (4, 4), "float32", Box((0,), (3,)), View.contiguous(0, 0, (3,)))],
            [16],
            LayoutError,
            "dimensions of its tensor",
        ),
        (
            [Shard("w", (3,), "float32", Box((0,), (3,)), View.simple(0, 0, (3,), (2**62,)))],
            [16],
            LayoutError,
            "too large to address",
        ),
    ],
)
def test_impossible_layouts_are_refused_by_name(
    shards: list[Shard], sizes: list[int], error: type[LayoutError], match: str
) -> None:
    with pytest.raises(error, match=match) as caught:
        Manifest.from_shards([whole("fine", (1,)), *shards], sizes)
    if caught.value.tensor is not None:
        assert caught.value.tensor == "w"


def test_view_that_is_not_the_box_is_refused() -> None:
    with pytest.raises(LayoutError, match="size of its box") as caught:
        Shard("w", (4,), "float32", Box((0,), (4,)), View.contiguous(0, 0, (3,)))
    assert caught.value.tensor == "w"


def test_several_shapes_scalars_and_nothing_at_all() -> None:
    empty = Manifest.from_shards([], [])
    assert (empty.rows, empty.names, len(empty.segments())) == (0, (), 0)
    scalar, vector = whole("s", ()), whole("v", (1,), offset=1)
    manifest = Manifest.from_shards([scalar, vector], [8])
    assert list(manifest.shards()) == [scalar, vector]
    assert manifest.ndim.tolist() == [0, 1]
    assert manifest.segments().base.tolist() == [0, 1]
    hollow = Shard("h", (4, 4), "float32", Box.whole((0, 4)), View.contiguous(0, 0, (0, 4)))
    rank = Manifest.from_shards([hollow], [0])
    assert rank.names == ("h",)
    assert len(rank.segments()) == 0


def test_from_columns_is_from_shards() -> None:
    shards = [whole("b", (2, 3), offset=4), whole("a", (4,)), whole("s", ())]
    by_columns = Manifest.from_columns(
        ["b", "unused", "a", "s"],
        [[2, 3], [9, 9], [4, 1], [1, 1]],
        ndim=[2, 2, 1, 0],
        tensor=[0, 2, 3],
        dtype=code("float32"),
        box_offset=np.zeros((3, 2)),
        box_size=[[2, 3], [4, 1], [1, 1]],
        storage=[0, 0, 0],
        view_offset=[4, 0, 0],
        storage_nbytes=[40],
    )
    assert by_columns == Manifest.from_shards(shards, [40])
    assert list(by_columns.shards()) == sorted(shards, key=key)
    with pytest.raises(LayoutError, match="tensor points nowhere"):
        Manifest.from_columns(
            ["a"],
            [[4]],
            tensor=[1],
            dtype=1,
            box_offset=[[0]],
            box_size=[[4]],
            storage=[0],
            storage_nbytes=[16],
        )
    with pytest.raises(LayoutError, match="twice"):
        Manifest.from_columns(
            ["a", "a"],
            [[4], [4]],
            tensor=[0, 1],
            dtype=1,
            box_offset=[[0], [0]],
            box_size=[[4], [4]],
            storage=[0, 0],
            storage_nbytes=[16],
        )


def test_sizes_past_2_to_the_31_survive_everything() -> None:
    """B100: 70,000 x 70,000 bfloat16 (9.8e9 bytes), three writers to four readers, by metadata only."""
    shape = (70_000, 70_000)

    def ranks(parts: int) -> list[Manifest]:
        step = -(-shape[0] // parts)
        sizes = [min(step, shape[0] - i * step) for i in range(parts)]
        return [
            Manifest.from_shards(
                [
                    Shard(
                        "w",
                        shape,
                        "bfloat16",
                        Box((i * step, 0), (n, shape[1])),
                        View.contiguous(0, 0, (n, shape[1])),
                    )
                ],
                [n * shape[1] * 2],
            )
            for i, n in enumerate(sizes)
        ]

    for side in (ranks(1), ranks(3), ranks(4)):
        decoded = [Manifest.decode(m.encode()) for m in side]
        assert decoded == side
        assert sum(int(m.segments().size.prod(axis=1).sum()) for m in decoded) == 4_900_000_000
        assert sum(int(m.storage_nbytes.sum()) for m in decoded) == 9_800_000_000
    last = ranks(4)[-1].segments()
    assert last.offset[0].tolist() == [52_500, 0]
    assert last.base.dtype == np.int64


def test_layouts_are_told_apart_by_manifests_order_and_hosts() -> None:
    one = Manifest.from_shards([whole("a", (4,))], [16])
    two = Manifest.from_shards([whole("a", (4,))], [32])
    assert Layout((one, two)).hosts == ("", "")
    prints = {
        Layout((one, two)).fingerprint,
        Layout((two, one)).fingerprint,
        Layout((one, two), ("x", "y")).fingerprint,
        Layout((one, two), ("xy", "")).fingerprint,
        Layout((one,)).fingerprint,
    }
    assert len(prints) == 5
    assert Layout((one, two)).fingerprint == Layout((one, two), ("", "")).fingerprint
    with pytest.raises(LayoutError, match="host for every rank"):
        Layout((one, two), ("x",))


def test_twenty_thousand_tensors_are_quick() -> None:
    shape, box = (2048, 7168), (512, 7168)
    shards = [
        Shard(
            f"layers.{i // 1000}.experts.{i // 4 % 250}.w",
            shape,
            "bfloat16",
            Box((i % 4 * 512, 0), box),
            View.contiguous(i, 0, box),
        )
        for i in range(20_000)
    ]
    sizes = [512 * 7168 * 2] * len(shards)
    start = time.process_time()
    manifest = Manifest.from_shards(shards, sizes)
    frame = manifest.encode()
    encoded = time.process_time()
    decoded = Manifest.decode(frame)
    assert len(decoded.segments()) == 20_000
    done = time.process_time()
    assert decoded == manifest
    assert encoded - start < 2.0
    assert done - encoded < 0.2
    assert len(frame) < 1 << 20
