"""Real FSDP2 training steps (gloo, one process) in the arena: bit-equal to training outside it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, debug

from syncline.adapters.fsdp import FSDPTrainer
from syncline.memory.region import Kind
from tests.adapters.helpers import read, tiny


@pytest.fixture
def world_of_one(tmp_path):
    debug._clear_sharding_prop_cache()
    torch._C._clear_DTensor_sharding_propagator_cache()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _step(model, optimizer, number):
    torch.manual_seed(number)
    ids = torch.randint(3, 90, (2, 12))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe"])
def test_training_in_the_arena_is_training(family, reshard):
    mesh = init_device_mesh("cpu", (1,))
    models = []
    for _ in range(2):
        model = tiny(family)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        models.append(fully_shard(model, mesh=mesh, reshard_after_forward=reshard))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    trainer, plain = FSDPTrainer(models[0], optimizers[0]), FSDPTrainer(models[1], optimizers[1])
    closed = []
    trainer.on_mutation(closed.append)
    trainer.share()  # before the first forward pass, which initialises FSDP lazily
    bound, seen = trainer.binding(), []
    for number in range(3):
        losses = [_step(*pair, number) for pair in zip(models, optimizers, strict=True)]
        assert losses[0] == losses[1]
        trainer.quiesce()
        assert trainer.binding() is bound
        seen.append(copy.deepcopy(read(trainer.manifest, bound.addresses())))
        want = read(plain.manifest, plain.binding().addresses())
        assert all((seen[-1][name] == tensor).all() for name, tensor in want.items())
    assert closed == ["optimizer.step"] * 3
    assert any((seen[0][name] != seen[1][name]).any() for name in seen[0])
    assert {r.kind for r in bound.regions.values()} == {Kind.ARENA}
    assert all(isinstance(p, DTensor) for p in optimizers[0].param_groups[0]["params"])
