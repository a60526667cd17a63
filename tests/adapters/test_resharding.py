"""Trainer ranks to inference ranks by real layouts and a real plan: installed equals a fresh load."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from syncline.adapters.fsdp import FSDPTrainer
from syncline.adapters.live import LiveTensors
from syncline.adapters.loading import load_model
from syncline.adapters.modules import local_part, walk
from syncline.adapters.transformers_names import declared_aliases, learn_names
from syncline.layout import Layout, Rules
from syncline.plan import plan
from tests.adapters.fake_world import fake_rank
from tests.adapters.helpers import save_tiny


class _Reader:
    """One rank of a tensor-parallel instance, as the Hugging Face adapter sees it."""

    def __init__(self, directory, rank, world):
        with fake_rank(rank, world):
            self.model = load_model(directory, torch.float32, "auto")
            self.tree = walk(self.model)
            self.names = learn_names(self.model, self.tree)
            self.aliases = self.names.aliases | declared_aliases(self.model, self.tree, self.names)
            self.live = LiveTensors(self.tree, self.names, rank)
            self.manifest = self.live.manifest
            self.addresses = self.live.addresses()

    def parts(self):
        return {name: local_part(cell.get()).detach() for name, cell in self.tree.state.items()}


def _trainer(directory, rank, world):
    with fake_rank(rank, world):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        trainer = FSDPTrainer(fully_shard(model, mesh=mesh))
        return trainer, trainer.manifest, trainer.binding().addresses()


def _floats(address, base, sizes, strides):
    pointer = ctypes.cast(int(address) + 4 * int(base), ctypes.POINTER(ctypes.c_float))
    first = np.ctypeslib.as_array(pointer, (1,))
    return np.lib.stride_tricks.as_strided(first, sizes, 4 * strides)


def _execute(hops, sources, destination):
    for i in range(len(hops)):
        size = hops.size[i]
        src = _floats(sources[hops.src[i]][hops.src_storage[i]], hops.src_base[i], size, hops.src_stride[i])
        dst = _floats(destination[hops.dst_storage[i]], hops.dst_base[i], size, hops.dst_stride[i])
        dst[...] = src


@pytest.mark.parametrize(
    ("family", "writers", "readers"),
    [
        ("qwen3_moe", 2, 2),
        ("qwen3_moe", 3, 1),
        ("qwen3_tied", 2, 2),
        ("gpt_oss", 2, 2),
        ("deepseek_v3", 2, 2),
    ],
)
def test_fsdp_ranks_into_tensor_parallel_ranks(family, writers, readers, tmp_path):
    old = save_tiny(family, tmp_path / "old", seed=1)
    new = save_tiny(family, tmp_path / "new", seed=2)
    trainers = [_trainer(new, rank, writers) for rank in range(writers)]
    instance = [_Reader(old, rank, readers) for rank in range(readers)]
    fresh = [_Reader(new, rank, readers) for rank in range(readers)]
    layouts = (
        Layout(tuple(t[1] for t in trainers), ("host",) * writers),
        {"a": Layout(tuple(r.manifest for r in instance), ("host",) * readers)},
    )
    made = plan(*layouts, Rules(aliases=instance[0].aliases))
    for rank, reader in enumerate(instance):
        assert any(not torch.equal(t, fresh[rank].parts()[name]) for name, t in reader.parts().items())
        _execute(made.reader("a", rank), [t[2] for t in trainers], reader.addresses)
        for name, part in reader.parts().items():
            assert torch.equal(part, fresh[rank].parts()[name]), name
