"""The trainer adapter: names, what each rank holds, bindings that follow moves, mutation points."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers.core_model_loading import ConversionOps, WeightConverter

from syncline.adapters.fsdp import FSDPTrainer
from syncline.errors import AdapterError
from syncline.store.adapter import TrainerAdapter
from tests.adapters.fake_world import fake_rank
from tests.adapters.helpers import read, tiny


def _checkpoint(model, directory):
    model.save_pretrained(directory)
    return {name: tensor.numpy() for name, tensor in load_file(directory / "model.safetensors").items()}


def _fsdp(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _tp(model, mesh):
    styles = {f"self_attn.{x}_proj": ColwiseParallel() for x in "qkv"} | {
        "self_attn.o_proj": RowwiseParallel()
    }
    styles |= {
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, styles, src_data_rank=None)
    return model


def _gathered(make, world):
    """Read every rank's memory through its own manifest into one checkpoint; count who wrote each element."""
    full = {}
    for rank in range(world):
        with fake_rank(rank, world):
            trainer = FSDPTrainer(make())
            assert (trainer.rank, trainer.world) == (rank, world)
            read(trainer.manifest, trainer.binding().addresses(), full)
    return full


def _assert_equal(found, want):
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("world", [2, 3])
def test_fsdp_ranks_hold_the_checkpoint(family, world, tmp_path):
    want = _checkpoint(tiny(family), tmp_path)
    _assert_equal(_gathered(lambda: _fsdp(tiny(family), init_device_mesh("cpu", (world,))), world), want)


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2), (3, 2)])
def test_fsdp_over_tensor_parallel_holds_the_checkpoint(dp, tp, tmp_path):
    want = _checkpoint(tiny("llama"), tmp_path)

    def make():
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        model = _tp(tiny("llama"), mesh["tp"])
        return model if dp == 1 else _fsdp(model, mesh["dp"])

    _assert_equal(_gathered(make, dp * tp), want)


def test_wrappers_leave_no_trace_in_names():
    plain = FSDPTrainer(tiny("qwen3_moe"))
    wrapped = tiny("qwen3_moe")
    for i, layer in enumerate(wrapped.model.layers):
        wrapped.model.layers[i] = checkpoint_wrapper(torch.compile(layer))
    trainer = FSDPTrainer(torch.compile(wrapped))
    assert trainer.manifest.fingerprint == plain.manifest.fingerprint
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in trainer.manifest.names


class _Holder(nn.Module):
    """Buffers of both kinds, a tied pair, two views of a flat buffer, and a module named `module`."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(3, 4)
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        flat = torch.arange(12.0)
        self.low, self.high = nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[6:].view(2, 3))
        self.register_buffer("bias_correction", torch.ones(4))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_persistent_buffers_travel_tied_tensors_once_and_shared_bytes_once():
    model = _Holder()
    trainer = FSDPTrainer(model)
    manifest = trainer.manifest
    assert manifest.names == (
        "bias_correction",
        "count",
        "embed.weight",
        "high",
        "low",
        "module.bias",
        "module.weight",
    )
    assert trainer.aliases == {"head.weight": "embed.weight"}
    assert int(manifest.storage_nbytes.sum()) == 4 * (4 + 15 + 12 + 4 + 12) + 8
    found = read(manifest, trainer.binding().addresses())
    assert found["count"] == 7
    np.testing.assert_array_equal(found["high"], model.high.detach().numpy())


def test_an_untied_head_is_published_whatever_the_configuration_says():
    model = tiny("qwen3_tied")
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    assert model.config.tie_word_embeddings
    trainer = FSDPTrainer(model)
    found = read(trainer.manifest, trainer.binding().addresses())
    np.testing.assert_array_equal(found["lm_head.weight"], model.lm_head.weight.detach().numpy())
    assert trainer.aliases == {}


def test_a_binding_follows_moves_and_is_the_same_object_otherwise():
    model = _Holder()
    trainer = FSDPTrainer(model)
    first = trainer.binding()
    assert trainer.binding() is first
    with torch.no_grad():
        model.module.weight.data = model.module.weight.data.clone().fill_(3.0)
    second = trainer.binding()
    assert second.generation > first.generation
    assert second.fingerprint == first.fingerprint
    assert (second.addresses() != first.addresses()).sum() == 1
    assert (read(trainer.manifest, second.addresses())["module.weight"] == 3.0).all()
    model.embed.weight.data = model.embed.weight.data.clone()  # tied: one object, both names follow
    assert trainer.binding().generation > second.generation


def test_everything_moved_at_once_is_one_new_binding():
    model = nn.ModuleList([nn.Linear(3, 2) for _ in range(5)])
    trainer = FSDPTrainer(model)
    fingerprint, before = trainer.manifest.fingerprint, trainer.binding()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    at = 0
    for p in model.parameters():
        p.data = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    flat += 1.0
    after = trainer.binding()
    assert not after.same_places(before)
    assert trainer.manifest.fingerprint == fingerprint == FSDPTrainer(model).manifest.fingerprint
    np.testing.assert_array_equal(
        read(trainer.manifest, after.addresses())["3.weight"], model[3].weight.detach().numpy()
    )


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda m: setattr(m.module.weight, "data", m.module.weight.data.bfloat16()), "dtype"),
        (lambda m: setattr(m.module.weight, "data", torch.zeros(2, 3)), "shape"),
        (lambda m: setattr(m.module.weight, "data", torch.zeros(3, 4).t()), "strides"),
        (lambda m: m.module.weight.untyped_storage().resize_(0), "no memory"),
        (lambda m: setattr(m.module.weight, "data", torch.empty(0)), "shape"),
    ],
)
def test_a_changed_or_absent_parameter_is_refused_by_name(change, what):
    model = _Holder()
    trainer = FSDPTrainer(model, rank=1, world=2)
    trainer.binding()
    change(model)
    with pytest.raises(AdapterError, match=what) as caught:
        trainer.binding()
    assert caught.value.tensor == "module.weight"
    assert caught.value.rank == "writer 1"


def test_a_replaced_module_is_refused():
    model = _Holder()
    trainer = FSDPTrainer(model)
    trainer.binding()
    model.module = nn.Linear(3, 4)
    with pytest.raises(AdapterError, match="module was replaced"):
        trainer.binding()


def test_torn_tied_tensors_are_refused():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            flat = torch.zeros(6)
            self.whole, self.part = nn.Parameter(flat), nn.Parameter(flat[2:4])

    model = Pair()
    trainer = FSDPTrainer(model)
    assert len(trainer.manifest.storage_nbytes) == 1
    model.part.data = model.part.data.clone()
    with pytest.raises(AdapterError, match="torn apart"):
        trainer.binding()


def test_offloaded_when_made_restored_before_publish():
    model = tiny("llama")
    want = FSDPTrainer(tiny("llama"))
    kept = {name: p.data for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = torch.empty(0)
    trainer = FSDPTrainer(model)
    with pytest.raises(AdapterError, match="offloaded") as caught:
        _ = trainer.manifest
    assert caught.value.tensor == "model.embed_tokens.weight"
    for name, p in model.named_parameters():
        p.data = kept[name]
    assert trainer.manifest.fingerprint == want.manifest.fingerprint
    assert int(trainer.manifest.storage_nbytes.sum()) == sum(p.nbytes for p in model.parameters())


def test_offload_and_reload_of_fsdp_shards():
    with fake_rank(1, 2):
        model = _fsdp(tiny("llama"), init_device_mesh("cpu", (2,)))
        trainer = FSDPTrainer(model)
        before = trainer.binding()
        sizes = {}
        for p in model.parameters():
            storage = p._local_tensor.untyped_storage()
            sizes[storage] = storage.nbytes()
            storage.resize_(0)
        with pytest.raises(AdapterError, match="no memory"):
            trainer.binding()
        blocker = [torch.empty(1 << 16) for _ in range(4)]  # what the allocator gives back now lies elsewhere
        for storage, nbytes in sizes.items():
            storage.resize_(nbytes)
        assert blocker
        assert trainer.binding().fingerprint == before.fingerprint


def test_a_gathered_module_publishes_its_sharded_parameters():
    with fake_rank(0, 2):
        model = _fsdp(tiny("llama"), init_device_mesh("cpu", (2,)))
        expected = FSDPTrainer(model).binding()
        for module in model.modules():
            if hasattr(module, "unshard"):
                module.unshard()
        assert type(model.model.layers[0].mlp.up_proj.weight).__name__ != "DTensor"
        trainer = FSDPTrainer(model)
        trainer.quiesce()
        assert trainer.binding().same_places(expected) or np.array_equal(
            trainer.binding().addresses(), expected.addresses()
        )


def test_quiesce_finishes_a_lazy_refresh():
    class Lazy(nn.Module):
        """Parameters are refreshed from the optimizer's own copy by the next forward pass."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))
            self.main = torch.zeros(4)
            self.register_forward_pre_hook(lambda *_: self.refresh())

        def refresh(self):
            self.weight.data.copy_(self.main)

        def forward(self):
            return self.weight.sum()

    model = Lazy()
    trainer = FSDPTrainer(model, quiesce=model.refresh)
    model.main += 1.0  # an optimizer step on the main copy, no forward pass after it
    trainer.quiesce()
    found = read(trainer.manifest, trainer.binding().addresses())["weight"]
    np.testing.assert_array_equal(found, model.main.numpy())


def test_mutation_points():
    model, other = _Holder(), nn.Linear(2, 2)
    given = torch.optim.SGD([model.low], lr=1.0)
    unknown = torch.optim.AdamW([model.high], lr=1.0)
    foreign = torch.optim.SGD(other.parameters(), lr=1.0)
    trainer = FSDPTrainer(model, given)
    seen = []
    value = {}

    def before(reason):
        seen.append(reason)
        value["low"] = model.low.detach().clone()

    handle = trainer.on_mutation(before)
    untouched = model.low.detach().clone()
    for p in (model.low, model.high, *other.parameters()):
        p.grad = torch.ones_like(p)
    given.step()
    assert seen == ["optimizer.step"]
    assert torch.equal(value["low"], untouched)  # called before the change
    assert not torch.equal(model.low, untouched)
    unknown.step()
    assert seen == ["optimizer.step"] * 2
    foreign.step()
    assert len(seen) == 2
    with trainer.mutation("ema swap"):
        assert seen[2:] == ["ema swap"]
    model.embed.load_state_dict(model.embed.state_dict())
    assert seen[3:] == ["load_state_dict"]
    handle.remove()
    handle.remove()
    given.step()
    unknown.step()
    model.load_state_dict(model.state_dict())
    assert len(seen) == 4


def test_an_accelerate_like_wrapper_is_looked_through():
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)

    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    trainer = FSDPTrainer(model, [Wrapper(inner)])
    seen = []
    handle = trainer.on_mutation(seen.append)
    inner.step()
    assert seen == ["optimizer.step"]
    handle.remove()


class _Negate(ConversionOps):
    """An exporter's operation that copies and then changes the copy in place."""

    def __init__(self, in_place):
        self.in_place = in_place

    def convert(self, input_dict, **kwargs):
        tensor = next(iter(input_dict.values()))
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        copied = tensor.clone()
        return {kwargs["target_patterns"][0]: copied.exp_().neg_() if self.in_place else -copied.exp()}

    @property
    def reverse_op(self):
        return self


@pytest.mark.parametrize("in_place", [True, False])
def test_an_exporter_that_computes_is_refused_and_live_memory_untouched(in_place):
    model = tiny("llama")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model._weight_conversions = [WeightConverter("norm.a_log", "model.norm.weight", [_Negate(in_place)])]
    with pytest.raises(AdapterError, match="checkpoint form of LlamaForCausalLM") as caught:
        _ = FSDPTrainer(model).manifest
    assert caught.value.tensor in {"model.norm.weight", "norm.a_log"}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_binding_of_twenty_thousand_tensors_is_cheap():
    model = nn.ParameterList([nn.Parameter(torch.zeros(2, 2)) for _ in range(20_000)])
    trainer = FSDPTrainer(model)
    first = trainer.binding()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert trainer.binding() is first
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1  # loose: other tests share the machine


def test_it_is_a_trainer_adapter():
    assert isinstance(FSDPTrainer(nn.Linear(2, 2)), TrainerAdapter)
