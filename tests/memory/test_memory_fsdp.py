"""FSDP2 on two gloo ranks: adopted shards train on, bit-equal to an unmoved twin."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from syncline.memory.adopt import Adoption

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.timeout(240)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(31, 65)  # divisible by two in no dimension
        self.down = nn.Linear(65, 31, bias=False)
        self.gain = nn.Parameter(torch.ones(1))  # rank 1 holds nothing of it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x))) * self.gain


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(45, 31)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(31, 45, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> float:
    torch.manual_seed(100 * number + rank)
    ids = torch.randint(0, 45, (8, 5))
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def shards(model: nn.Module) -> list[list[torch.Tensor]]:
    """Every alias of each shard: the DTensor's local tensor and FSDP's flat one behind it."""
    groups: dict[int, list[torch.Tensor]] = {}
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        group = getattr(state, "_fsdp_param_group", None)
        for param in group.fsdp_params if group else ():
            local = param.sharded_param._local_tensor
            groups[id(param)] = [local, param._sharded_param_data]
    return list(groups.values())


def local(parameter: DTensor) -> torch.Tensor:
    return parameter._local_tensor


def worker(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    (model, optimizer), (twin, other) = build(), build()
    for number in range(2):
        assert step(model, optimizer, number, rank) == step(twin, other, number, rank)
    before = {name: local(p).data_ptr() for name, p in model.named_parameters()}
    adoption = Adoption(shards(model))
    assert adoption.shared == {}, "FSDP's shards have no aliases but the two passed and their bases"
    inside = range(adoption.arena.address, adoption.arena.address + adoption.arena.nbytes)
    places = {name: local(p).data_ptr() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        assert local(p).numel() == 0 or (places[name] in inside and places[name] != before[name])
    for number in range(2, 5):
        assert step(model, optimizer, number, rank) == step(twin, other, number, rank)
    for (name, mine), (_, theirs) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(local(mine), local(theirs)), name
        assert local(mine).data_ptr() == places[name]
    assert not adoption.moved()
    assert not adoption.readopt(shards(model))
    full, want = (m.state_dict()["blocks.0.up.weight"].full_tensor() for m in (model, twin))
    assert torch.equal(full, want)
    dist.barrier()
    dist.destroy_process_group()


def test_fsdp2_shards_are_adopted_in_place() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, args=(port,), nprocs=2)
