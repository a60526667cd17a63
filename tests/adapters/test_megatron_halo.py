"""Blocks of scales that borders of shards cut: every cut must give what quantising the whole tensor gives."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.adapters.megatron import BlockFP8, halo
from syncline.adapters.megatron.owners import Claim, Claims, check
from syncline.errors import AdapterError
from syncline.kernels.fp8 import BLOCK, largest, quantise
from syncline.layout.box import Box

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncline.adapters.megatron.halo import Halo, Key


def where(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))


def bits(shape: tuple[int, ...], seed: int, *, broken: bool = False) -> NDArray[np.uint16]:
    """Return bfloat16 bits of very different magnitudes; broken ones with an infinity and a NaN."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-40, 40, shape[-1]))
    values = values.astype(np.float32)
    found = (values.view(np.uint32) >> 16).astype(np.uint16)
    if broken:
        flat = found.reshape(-1)
        flat[rng.integers(0, flat.size, 2)] = [0x7F80, 0xFFC1]
    return found


def reference(weight: NDArray[np.uint16], **how: bool) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantise a whole tensor, matrix by matrix."""
    matrices = weight.reshape(-1, *weight.shape[-2:])
    payload, scale = zip(*(quantise(matrix, **how) for matrix in matrices), strict=True)
    return (
        np.stack(payload).reshape(weight.shape),
        np.stack(scale).reshape(halo.blocks_of(weight.shape)),
    )


@dataclass
class World:
    """A tensor cut over ranks: which boxes each holds."""

    shape: tuple[int, ...]
    held: list[list[Box]]

    def claims(self) -> list[Claims]:
        return [
            Claims(rank, 0, 0, (Claim("w", self.shape, tuple((b.offset, b.size) for b in boxes), "dense"),))
            for rank, boxes in enumerate(self.held)
        ]


def exchanged(plans: list[Halo], values: list[dict[Key, NDArray[np.uint32]]]) -> int:
    """Carry every message of a round; return how many words there were."""
    mail = {
        (rank, other): halo.message(lane.sends, values[rank])
        for rank, plan in enumerate(plans)
        for other, lane in plan.lanes.items()
        if lane.sends
    }
    for rank, plan in enumerate(plans):
        for other, lane in plan.lanes.items():
            if lane.receives:
                halo.compare(lane.receives, values[rank], mail.pop((other, rank)))
        halo.merge(plan, values[rank])
    assert not mail  # nobody tells what nobody hears
    return sum(sum(s.blocks.numel for s in lane.sends) for p in plans for lane in p.lanes.values())


def quantised(
    world: World, weight: NDArray[np.uint16], **how: bool
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantise a tensor box by box, as its holders do; every block's scale must be published by one box."""
    claims = world.claims()
    check(claims, ["w"])
    plans = [halo.plan(claims, lambda name: name == "w", rank) for rank in range(len(claims))]
    parts = [{("w", box): part(weight[where(box)], box) for box in boxes} for boxes in world.held]
    exchanged(plans, parts)
    payload = np.full(weight.shape, 0xEE, np.uint8)
    scale = np.full(halo.blocks_of(weight.shape), -1, np.float32)
    owners: dict[tuple[int, ...], Box] = {}
    for plan, boxes, values in zip(plans, world.held, parts, strict=True):
        for box in boxes:
            mine, blocks = weight[where(box)], halo.touched(box)
            given = values["w", box] if ("w", box) in plan.shares else None
            got, factors = box_quantised(mine, box, given, **how)
            payload[where(box)] = got
            for free in plan.publishes["w", box]:
                scale[where(free)] = factors[where(free.relative_to(blocks))]
                for index in itertools.product(
                    *(range(a, b) for a, b in zip(free.offset, free.end, strict=True))
                ):
                    assert owners.setdefault(index, box) == box
    assert len(owners) == scale.size
    return payload, scale


def phase(box: Box) -> tuple[int, int]:
    down, right = box.offset[-2:]
    return down % BLOCK, right % BLOCK


def part(weight: NDArray[np.uint16], box: Box) -> NDArray[np.uint32]:
    matrices = weight.reshape(-1, *weight.shape[-2:])
    return np.stack([largest(one, phase(box)) for one in matrices]).reshape(halo.touched(box).size)


def box_quantised(
    weight: NDArray[np.uint16], box: Box, given: NDArray[np.uint32] | None, **how: bool
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    matrices = weight.reshape(-1, *weight.shape[-2:])
    size = halo.touched(box).size
    known = [None] * len(matrices) if given is None else list(given.reshape(-1, *size[-2:]))
    made = [quantise(m, at=phase(box), magnitudes=g, **how) for m, g in zip(matrices, known, strict=True)]
    return np.stack([p for p, _ in made]).reshape(weight.shape), np.stack([s for _, s in made]).reshape(size)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Draw a tensor of two or three dimensions, cut along any of them again and again, and replicated."""
    lead = draw(st.lists(st.integers(1, 3), max_size=1))
    shape = (*lead, *(draw(st.integers(1, 400)) for _ in range(2)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        index = draw(st.integers(0, len(boxes) - 1))
        dim = draw(st.integers(0, len(shape) - 1))
        n = boxes[index].size[dim]
        if n > 1:
            at = draw(st.integers(1, n - 1))
            boxes[index : index + 1] = boxes[index].split(dim, [at, n - at])
    ranks = draw(st.integers(1, 4))
    held: list[list[Box]] = [[] for _ in range(ranks)]
    for box in boxes:
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            held[rank].append(box)
    return World(shape, held)


@settings(deadline=None, max_examples=60)
@given(world=worlds(), seed=st.integers(0, 1 << 30), broken=st.booleans(), power_of_two=st.booleans())
def test_any_cut_gives_what_the_whole_tensor_gives(
    world: World, seed: int, broken: bool, power_of_two: bool
) -> None:
    weight = bits(world.shape, seed, broken=broken)
    payload, scale = quantised(world, weight, power_of_two=power_of_two)
    want_payload, want_scale = reference(weight, power_of_two=power_of_two)
    assert np.array_equal(payload, want_payload)
    assert np.array_equal(scale.view(np.uint32), want_scale.view(np.uint32))


def rows(n: int, cuts: list[int]) -> list[Box]:
    return [Box((a, 0), (b - a, 256)) for a, b in itertools.pairwise([0, *cuts, n])]


def test_borders_of_blocks_are_nobodys_business() -> None:
    world = World((512, 256), [[box] for box in rows(512, [128, 384])])
    for rank in range(3):
        plan = halo.plan(world.claims(), lambda _: True, rank)
        assert not plan.shares
        assert not plan.lanes
        assert list(plan.publishes.values()) == [(halo.touched(world.held[rank][0]),)]


def test_only_the_blocks_at_a_border_are_spoken_of() -> None:
    world = World((1000, 256), [[box] for box in rows(1000, [500])])
    plans = [halo.plan(world.claims(), lambda _: True, rank) for rank in range(2)]
    assert [sum(s.blocks.numel for s in plan.lanes[1 - rank].sends) for rank, plan in enumerate(plans)] == [
        2,
        2,
    ]
    assert plans[0].publishes["w", Box((0, 0), (500, 256))] == (Box((0, 0), (4, 2)),)
    assert plans[1].publishes["w", Box((500, 0), (500, 256))] == (Box((4, 0), (4, 2)),)


def test_replicas_ask_a_neighbour_of_their_own() -> None:
    """Two data-parallel replicas of two tensor-parallel halves: each replica stays within itself."""
    top, bottom = rows(200, [100])
    world = World((200, 256), [[top], [bottom], [top], [bottom]])
    plans = [halo.plan(world.claims(), lambda _: True, rank) for rank in range(4)]
    assert [sorted(plan.lanes) for plan in plans] == [[1], [0], [3], [2]]


def test_a_box_inside_one_block_may_publish_no_scale() -> None:
    world = World((120, 256), [[box] for box in rows(120, [40, 80])])
    plans = [halo.plan(world.claims(), lambda _: True, rank) for rank in range(3)]
    assert [next(iter(plan.publishes.values())) for plan in plans] == [(Box((0, 0), (1, 2)),), (), ()]


def test_without_the_exchange_a_cut_block_would_be_wrong() -> None:
    """What the halo is for: a part alone has another scale."""
    weight = bits((200, 256), 5)
    weight[150] = 0x4700  # larger than anything above the border
    alone, _ = quantise(weight[:100])
    assert not np.array_equal(alone, reference(weight)[0][:100])


def test_ranks_that_quantise_differently_are_told() -> None:
    world = World((200, 256), [[box] for box in rows(200, [100])])
    first, second = world.claims()
    other = Claims(second.rank, 0, 0, second.claims, quantised=repr(BlockFP8(("w",), halo="exchange")))
    with pytest.raises(AdapterError, match="quantise differently") as caught:
        check([first, other], ["w"])
    assert caught.value.rank == "writer 1"


def test_an_unknown_way_with_cut_blocks_is_refused() -> None:
    with pytest.raises(AdapterError, match="unknown way"):
        BlockFP8(("w",), halo="round")  # pyright: ignore[reportArgumentType]
