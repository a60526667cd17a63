"""Live parameters in the arena: trainers go on as before, readers map what trainers write."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from syncline.adapters.fsdp import FSDPTrainer
from syncline.errors import AdapterError
from syncline.memory.region import Kind
from tests.adapters.fake_world import fake_rank
from tests.adapters.helpers import read, tiny


def _open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def _fsdp_model(seed=0):
    model = tiny("qwen3_tied", seed=seed)
    mesh = init_device_mesh("cpu", (3,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _mapped(trainer):
    """Read the checkpoint through the descriptors alone, as a reader's process would."""
    binding = trainer.binding()
    regions, maps = trainer.share(), {}
    for key, fd in regions.items():
        assert os.fstat(fd).st_size >= binding.regions[key].nbytes
        with pytest.raises(PermissionError):
            mmap.mmap(fd, binding.regions[key].nbytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        maps[key] = np.frombuffer(mmap.mmap(fd, binding.regions[key].nbytes, prot=mmap.PROT_READ), np.uint8)
    there = {key: view.ctypes.data for key, view in maps.items()}
    found = read(trainer.manifest, binding.relocated(there).addresses())
    assert maps
    return found


def _same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(t, b[name]) for name, t in a.items())


@pytest.mark.parametrize("rank", [0, 2])
def test_an_fsdp_rank_trains_on_in_the_arena(rank):
    with fake_rank(rank, 3):
        plain, model = _fsdp_model(), _fsdp_model()
        trainer, reference = FSDPTrainer(model), FSDPTrainer(plain)
        fingerprint = trainer.manifest.fingerprint
        before = trainer.binding()
        fds = _open_files()
        assert set(trainer.share()) == {0}
        assert _open_files() <= fds + 3  # however many parameters there are
        after = trainer.binding()
        assert after.generation > before.generation
        assert {r.kind for r in after.regions.values()} == {Kind.ARENA}
        assert trainer.manifest.fingerprint == fingerprint == FSDPTrainer(model).manifest.fingerprint
        assert trainer.share() == trainer.share()
        assert trainer.binding() is after
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]
        for _ in range(2):
            for m, optimizer in zip((plain, model), optimizers, strict=True):
                for i, p in enumerate(m.parameters()):
                    p.grad = torch.full_like(p, 0.1 * i)
                optimizer.step()
        assert trainer.binding() is after
        want = read(reference.manifest, reference.binding().addresses())
        assert _same(_mapped(trainer), want)
        # what FSDP gathers from, its flat padded shard, moved along
        for module in model.modules():
            if hasattr(module, "_get_fsdp_state") and (group := module._get_fsdp_state()._fsdp_param_group):
                for record in group.fsdp_params:
                    local = record.sharded_param._local_tensor
                    assert not local.numel() or record._sharded_param_data.data_ptr() == local.data_ptr()


def test_what_left_the_arena_is_brought_back():
    with fake_rank(0, 3):
        model = _fsdp_model()
        trainer = FSDPTrainer(model)
        trainer.share()
        first = trainer.binding()
        want = read(trainer.manifest, first.addresses())
        model._apply(lambda t: t.clone())  # what .to(device) and back does
        second = trainer.binding()
        assert second.generation > first.generation
        assert {r.kind for r in second.regions.values()} == {Kind.ARENA}
        assert _same(_mapped(trainer), want)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        found = _mapped(trainer)
        local = model.model.norm.weight._local_tensor.numpy()
        np.testing.assert_array_equal(found["model.norm.weight"][: len(local)], local)
        assert not np.array_equal(found["model.norm.weight"], want["model.norm.weight"])


def test_data_pointers_changed_by_hand_are_brought_back():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    trainer = FSDPTrainer(model)
    trainer.share()
    first = trainer.binding()
    model[1].weight.data = model[1].weight.data.clone().fill_(5.0)
    second = trainer.binding()
    assert second.generation > first.generation
    assert np.array_equal(first.addresses(), second.addresses())
    assert (_mapped(trainer)["1.weight"] == 5.0).all()


def test_tied_parameters_and_flat_buffers_move_together():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            flat = torch.arange(12.0)
            self.low, self.high = nn.Parameter(flat[:6]), nn.Parameter(flat[6:])
            self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight
            self.flat = flat  # an alias that nobody names

    model = Model()
    trainer = FSDPTrainer(model)
    trainer.share()
    model.flat += 1.0
    assert model.high.tolist() == [7, 8, 9, 10, 11, 12]
    assert model.head.weight is model.embed.weight
    with torch.no_grad():
        model.head.weight.fill_(3.0)
    found = _mapped(trainer)
    assert found["low"].tolist() == [1, 2, 3, 4, 5, 6]
    assert (found["embed.weight"] == 3.0).all()
    assert {r.kind for r in trainer.binding().regions.values()} == {Kind.ARENA, Kind.SHARED}


def test_an_offloaded_parameter_cannot_be_shared():
    model = nn.Linear(3, 4)
    trainer = FSDPTrainer(model)
    assert trainer.manifest
    model.weight.untyped_storage().resize_(0)
    with pytest.raises(AdapterError, match="no memory") as caught:
        trainer.share()
    assert caught.value.tensor == "weight"
