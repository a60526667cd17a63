"""DTensor layouts against real local contents: stamped coordinates, cut by torch itself, on every rank of a
mesh.

torch's fake process group lets one process be any rank; ``src_data_rank=None`` and FSDP2's own sharding cut
locally, so that local tensors have their true contents without communication.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardOn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from syncline.errors import LayoutError
from syncline.layout import Box, Manifest, Shard, View
from syncline.layout.dtensor import Storages, boxes_of_dtensor, local_of, manifest_of, shards_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Held = Counter[tuple[int, ...]]


@contextlib.contextmanager
def rank_of(mesh_shape: Sequence[int], rank: int) -> Iterator[DeviceMesh]:
    """Be one rank of a mesh; DTensor's cache would answer with another rank's mesh, which compares equal."""
    _clear_sharding_prop_cache()
    names = ("dp", "tp", "x")[: len(mesh_shape)]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(mesh_shape))
    try:
        yield init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def stamped(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Every element is its own flat index: misplaced rows show at once."""
    return torch.arange(math.prod(shape), dtype=dtype).reshape(tuple(shape))


def read(shard: Shard, storages: list[torch.UntypedStorage], dtype: torch.dtype) -> torch.Tensor:
    """The shard's elements, one by one through its view, from its storage."""
    flat = torch.empty(0, dtype=dtype).set_(storages[shard.view.storage])
    values = [flat[shard.view.element(i)].item() for i in np.ndindex(*shard.box.size)]
    return torch.tensor(values, dtype=dtype).reshape(shard.box.size)


def slice_of(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))]


def check(shards: list[Shard], storages: list[torch.UntypedStorage], full: torch.Tensor) -> Held:
    """Compare every box with the same box of the full tensor; return how often each index is held."""
    held: Held = Counter()
    for shard in shards:
        assert shard.global_shape == tuple(full.shape)
        assert torch.equal(read(shard, storages, full.dtype), slice_of(full, shard.box))
        held.update(
            tuple(int(o + i) for o, i in zip(shard.box.offset, index, strict=True))
            for index in np.ndindex(*shard.box.size)
        )
    return held


def check_mesh(
    mesh_shape: Sequence[int], shape: Sequence[int], make: Callable[[torch.Tensor, DeviceMesh], torch.Tensor]
) -> list[list[Box]]:
    """Be every rank in turn: contents right on each, every element held by the same number of ranks."""
    full = stamped(shape)
    held: Held = Counter()
    boxes: list[list[Box]] = []
    for rank in range(math.prod(mesh_shape)):
        with rank_of(mesh_shape, rank) as mesh:
            tensor = make(full, mesh)
            storages = Storages()
            shards = shards_of("w", tensor, storages)
            assert shards, "an empty rank still names its tensor"
            mine = check(shards, storages.listed, full)
            assert max(mine.values(), default=1) == 1
            assert sum(mine.values()) == local_of(tensor).numel()
            held += mine
            boxes.append([s.box for s in shards if s.box.numel])
            Manifest.from_shards(shards, [s.nbytes() for s in storages.listed])
    assert set(held) == set(np.ndindex(*shape))
    assert len(set(held.values())) <= 1
    return boxes


def split(placements: Sequence[Placement]) -> Callable[[torch.Tensor, DeviceMesh], torch.Tensor]:
    return lambda full, mesh: distribute_tensor(full.clone(), mesh, list(placements), src_data_rank=None)


placements = st.one_of(
    st.just(Replicate()),
    st.integers(0, 1).map(ShardOn),
    st.builds(lambda d, f: _StridedShard(d, split_factor=f), st.integers(0, 1), st.integers(2, 3)),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.tuples(st.integers(0, 9), st.integers(0, 5)), placements)
def test_one_dimensional_meshes(n: int, shape: tuple[int, int], placement: Placement) -> None:
    check_mesh((n,), shape, split([placement]))


plain = st.one_of(st.just(Replicate()), st.integers(0, 1).map(ShardOn))


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 9), st.integers(0, 5)),
    st.tuples(plain, plain),
)
def test_two_dimensional_meshes(
    mesh: tuple[int, int], shape: tuple[int, int], pair: tuple[Placement, Placement]
) -> None:
    check_mesh(mesh, shape, split(pair))


@pytest.mark.parametrize("rows", [8, 10, 9, 5, 1])
def test_strided_placements_cut_by_torch(rows: int) -> None:
    boxes = check_mesh((2, 2), (rows, 3), split([_StridedShard(0, split_factor=2), ShardOn(0)]))
    if rows == 8:
        assert [b[0].offset[0] for b in boxes] == [0, 4, 2, 6]
    check_mesh((2,), (rows, 3), split([_StridedShard(0, split_factor=2)]))


def test_a_lone_strided_shard_is_several_boxes() -> None:
    boxes = check_mesh((2,), (8, 3), split([_StridedShard(0, split_factor=2)]))
    assert boxes[0] == [Box((0, 0), (2, 3)), Box((4, 0), (2, 3))]
    assert boxes[1] == [Box((2, 0), (2, 3)), Box((6, 0), (2, 3))]


def test_packed_experts_are_one_parameter_of_two_boxes_an_expert_dimension() -> None:
    """Fused (experts, 2 x intermediate, hidden): gate and up are cut apart by TP, experts by FSDP."""
    boxes = check_mesh((2, 2), (4, 12, 3), split([ShardOn(0), _StridedShard(1, split_factor=2)]))
    assert boxes[1] == [Box((0, 3, 0), (2, 3, 3)), Box((0, 9, 0), (2, 3, 3))]
    check_mesh((3,), (2, 12, 3), split([_StridedShard(1, split_factor=2)]))
    check_mesh((4,), (2, 10, 3), split([_StridedShard(1, split_factor=2)]))


class Holder(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def fsdp(dim: int = 0, tp: Placement | None = None) -> Callable[[torch.Tensor, DeviceMesh], torch.Tensor]:
    """What FSDP2 makes of a parameter, over TP on the inner mesh dimension if there is one."""

    def make(full: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        weight = full.clone()
        outer = mesh
        if tp is not None:
            weight = distribute_tensor(weight, mesh["tp"], [tp], src_data_rank=None)
            outer = mesh["dp"]
        module = Holder(weight)
        fully_shard(module, mesh=outer, shard_placement_fn=lambda _: ShardOn(dim))
        return module.weight

    return make


@pytest.mark.parametrize("rows", [8, 10, 7, 5, 2, 1])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_fsdp2_uneven_and_empty(rows: int, n: int) -> None:
    check_mesh((n,), (rows, 3), fsdp())


def test_fsdp2_on_another_dimension() -> None:
    boxes = check_mesh((2,), (3, 8), fsdp(dim=1))
    assert boxes[1] == [Box((0, 4), (3, 4))]


@pytest.mark.parametrize("rows", [8, 10, 9, 7, 5, 3, 1])
@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (2, 3), (4, 2)])
def test_fsdp2_over_tp_on_the_same_dimension(rows: int, mesh: tuple[int, int]) -> None:
    """B49. Rows 8 and uneven 10 among them; (3, 2) with 7 rows is where torch's own rule names other rows."""
    boxes = check_mesh(mesh, (rows, 3), fsdp(tp=ShardOn(0)))
    if (rows, mesh) == (10, (2, 2)):
        assert [[(b.offset[0], b.size[0]) for b in rank] for rank in boxes] == [
            [(0, 3)],
            [(5, 3)],
            [(3, 2)],
            [(8, 2)],
        ]


@pytest.mark.parametrize("rows", [8, 12, 10])
def test_fsdp2_over_packed_tp_on_the_same_dimension(rows: int) -> None:
    check_mesh((2, 2), (rows, 3), fsdp(tp=_StridedShard(0, split_factor=2)))


def test_fsdp2_over_row_wise_tp() -> None:
    check_mesh((2, 2), (5, 6), fsdp(tp=ShardOn(1)))


def test_a_replicated_dtensor_is_a_plain_tensor() -> None:
    """B50: one layout for Replicate over three ranks, a mesh of one device, and no DTensor at all."""
    full = stamped((4, 3))
    expected, _ = manifest_of({"w": full.clone()})
    for rank in range(3):
        with rank_of((3,), rank) as mesh:
            assert manifest_of({"w": split([Replicate()])(full, mesh)})[0] == expected
    with rank_of((1,), 0) as mesh:
        for placement in (ShardOn(0), Replicate(), Partial()):
            alone = DTensor.from_local(full.clone(), mesh, [placement], run_check=False)
            assert manifest_of({"w": alone})[0] == expected


def test_non_contiguous_locals() -> None:
    """B46: the local tensor of a DTensor may itself be transposed, or a column slice of a wider buffer."""
    full = stamped((8, 6))
    for rank in range(2):
        with rank_of((2,), rank) as mesh:
            part = full[rank * 4 : rank * 4 + 4]
            wide = torch.full((4, 10), -1.0)
            wide[:, 2:8] = part
            for local in (part.t().contiguous().t(), wide[:, 2:8]):
                assert not local.is_contiguous()
                tensor = DTensor.from_local(local, mesh, [ShardOn(0)], run_check=False)
                storages = Storages()
                held = check(shards_of("w", tensor, storages), storages.listed, full)
                assert len(held) == 24
                strided = DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=2)], run_check=False)
                places = boxes_of_dtensor(strided)
                assert [p.box.offset[0] for p in places] == [rank * 2, 4 + rank * 2]


def test_plain_tensors_of_any_strides() -> None:
    """B46: transposed, a column slice, expanded with stride 0; nothing is copied to make them contiguous."""
    base = stamped((8, 10))
    tensors = {
        "transposed": stamped((6, 8)).t(),
        "columns": base[:, 2:5],
        "every other row": base[::2],
        "expanded": stamped((3,)).expand(4, 3),
        "one for all": torch.tensor(7.0).expand(2, 2),
    }
    manifest, storages = manifest_of(tensors)
    by_name = {s.name: s for s in manifest.shards()}
    for name, tensor in tensors.items():
        check([by_name[name]], storages, tensor)
        assert by_name[name].view == View.simple(
            by_name[name].view.storage, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
    assert by_name["expanded"].view.stride == ((0,), (1,))
    assert by_name["columns"].view.storage == by_name["every other row"].view.storage


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(3.5), torch.tensor(2.5, dtype=torch.bfloat16), torch.tensor(2**40), torch.tensor([4.0])],
    ids=str,
)
def test_zero_dimensional_tensors(tensor: torch.Tensor) -> None:
    """B47."""
    manifest, storages = manifest_of({"s": tensor})
    (shard,) = Manifest.decode(manifest.encode()).shards()
    assert shard.box == Box.whole(tuple(tensor.shape))
    assert shard.box.numel == 1
    assert torch.equal(read(shard, storages, tensor.dtype), tensor)
    assert len(manifest.segments()) == 1
    with rank_of((2,), 1) as mesh:
        replica = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
        assert manifest_of({"s": replica})[0] == manifest


def test_tied_tensors_and_views_share_one_storage() -> None:
    """B22: two names on one storage and a view of a third: the bytes are there once, every name is right."""
    tied, buffer = stamped((6, 4)), stamped((10, 4))
    tensors = {
        "embed": nn.Parameter(tied),
        "lm_head": nn.Parameter(tied),
        "part": buffer[3:7],
        "whole": buffer,
        "other": stamped((6, 4)),
    }
    manifest, storages = manifest_of(tensors)
    assert len(storages) == 3
    assert manifest.storage_nbytes.tolist() == [96, 160, 96]
    assert int(manifest.storage_nbytes.sum()) == sum(s.nbytes() for s in storages)
    shards = {s.name: s for s in manifest.shards()}
    assert shards["embed"].view == shards["lm_head"].view
    assert shards["part"].view == View.contiguous(1, 12, (4, 4))
    for name, tensor in tensors.items():
        check([shards[name]], storages, tensor.detach())


def test_tied_parameters_under_fsdp2_share_one_storage() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

    for rank in range(2):
        with rank_of((2,), rank) as mesh:
            module = Tied()
            fully_shard(module, mesh=mesh)
            state = module.state_dict()
            assert set(state) == {"embed.weight", "head.weight"}
            manifest, storages = manifest_of(state)
            assert len(storages) == 1
            first, second = manifest.shards()
            assert (first.box, first.view) == (second.box, second.view)


def test_empty_storages_and_meta_tensors_are_told_apart() -> None:
    with torch.device("meta"):
        tensors = {"a": torch.empty(4, 2), "b": torch.empty(4, 2), "c": torch.empty(0, 2)}
    tensors["d"] = torch.empty(0, 2)
    manifest, storages = manifest_of(tensors)
    assert len(storages) == 4
    assert manifest.names == ("a", "b", "c", "d")
    assert manifest.segments().tensor.tolist() == [0, 1]


def test_ranks_outside_of_a_mesh_hold_nothing() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    try:
        mesh = DeviceMesh("cpu", [0, 1])
        tensor = distribute_tensor(stamped((4, 2)), mesh, [ShardOn(0)], src_data_rank=None)
        manifest, storages = manifest_of({"w": tensor})
        assert (manifest.rows, storages) == (0, [])
    finally:
        dist.destroy_process_group()


def test_partial_dtensors_are_refused_by_name() -> None:
    with rank_of((2,), 0) as mesh:
        pending = DTensor.from_local(stamped((4, 2)), mesh, [Partial()], run_check=False)
        with pytest.raises(LayoutError, match="Partial") as caught:
            manifest_of({"w": pending})
        assert caught.value.tensor == "w"


def test_local_tensors_that_contradict_their_placements_are_refused() -> None:
    with rank_of((2,), 1) as mesh:
        wrong = DTensor.from_local(
            stamped((3, 2)), mesh, [ShardOn(0)], run_check=False, shape=torch.Size((8, 2)), stride=(2, 1)
        )
        with pytest.raises(LayoutError, match="not what its placements say") as caught:
            manifest_of({"w": wrong})
        assert (caught.value.tensor, caught.value.expected, caught.value.found) == ("w", "4", "3")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.eye(3).to_sparse(), "layout"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantised"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "conjugated"),
        (lambda: torch.empty(2, dtype=torch.bits8), "dtype"),
    ],
)
def test_tensors_that_are_not_their_storage_are_refused(make: Callable[[], torch.Tensor], why: str) -> None:
    with pytest.raises(LayoutError, match=why) as caught:
        manifest_of({"w": make()})
    assert caught.value.tensor == "w"


def test_a_larger_mesh_tiles_an_uneven_matrix() -> None:
    check_mesh((8, 4), (103, 2), fsdp(tp=ShardOn(0)))


def test_two_mesh_dimensions_on_one_tensor_dimension_cut_from_the_outside() -> None:
    boxes = check_mesh((2, 3), (7, 2), split([ShardOn(0), ShardOn(0)]))
    rows = [(b.offset[0], b.size[0]) for rank in boxes for b in rank]
    assert rows == [(0, 2), (2, 2), (4, 1), (5, 1), (6, 1)]
