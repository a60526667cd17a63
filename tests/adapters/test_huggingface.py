"""The inference adapter in one process: in-place updates, derived state, pauses, a fresh load as oracle."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from syncline.adapters.huggingface import HuggingFaceEngine
from syncline.errors import AdapterError, DeadlineError
from syncline.protocol.ids import VersionKey
from syncline.store.adapter import EngineAdapter, Status
from tests.adapters.helpers import read, save_tiny, write

PROMPTS = ["w5 w6 w7", [{"role": "user", "content": "w9 w10 w11 w12"}]]


@pytest.fixture(params=["qwen3_tied", "qwen3_moe"])
def family(request):
    return request.param


@pytest.fixture
def old(family, tmp_path):
    return save_tiny(family, tmp_path / "old", seed=1)


@pytest.fixture
def new(family, tmp_path):
    return save_tiny(family, tmp_path / "new", seed=2)


def _install(engine, directory):
    full = {name: t.numpy() for name, t in load_file(directory / "model.safetensors").items()}
    write(engine.manifest, engine.binding().addresses(), full)


def _texts(engine):
    return [c.text for c in engine.generate(PROMPTS, max_new_tokens=8)]


def test_an_update_in_place_equals_a_fresh_load(old, new):
    engine, want = HuggingFaceEngine.load(old), HuggingFaceEngine.load(new)
    assert (engine.rank, engine.world) == (0, 1)
    before = _texts(engine)
    pointers = {name: t.data_ptr() for name, t in engine.live_tensors().items()}
    fresh = engine.load_fresh(new)
    assert engine.live_tensors().keys() == fresh.keys()
    assert any(not torch.equal(t, fresh[name]) for name, t in engine.live_tensors().items())
    for number in range(3):
        engine.pause("wait", 5.0)
        _install(engine, new)
        key = VersionKey(1, number)
        engine.after_update(key)
        engine.flush_caches()
        engine.report_version(key)
        engine.resume(key)
    assert all(torch.equal(t, fresh[name]) for name, t in engine.live_tensors().items())
    assert {name: t.data_ptr() for name, t in engine.live_tensors().items()} == pointers
    done = engine.generate(PROMPTS, max_new_tokens=8)
    assert [c.text for c in done] == _texts(want) != before
    assert {c.version for c in done} == {VersionKey(1, 2)}
    assert all(c.finish == "length" and len(c.tokens) == 8 for c in done if c.finish != "stop")


def test_every_live_tensor_is_synced_derived_or_local(family, old):
    engine = HuggingFaceEngine.load(old)
    kept = torch.zeros(96, 32)
    engine.derive(lambda m: {"head32": m.get_output_embeddings().weight.float()}, {"head32": kept})
    status = engine.live_status()
    assert status.keys() == engine.live_tensors().keys()
    assert status["head32"].status is Status.DERIVED
    assert status["model.rotary_emb.inv_freq"].status is Status.LOCAL
    assert status["model.embed_tokens.weight"].names == ("model.embed_tokens.weight",)
    synced = {name for name, s in status.items() if s.status is Status.SYNCED}
    assert synced == {name for name, _ in engine.model.named_parameters()}
    if family == "qwen3_moe":
        fused = status["model.layers.0.mlp.experts.gate_up_proj"]
        assert len(fused.names) == 8
        assert fused.shape == (4, 32, 32)
        assert "model.layers.0.mlp.experts.3.up_proj.weight" in fused.names


def test_tied_embeddings_are_installed_once(tmp_path):
    engine = HuggingFaceEngine.load(save_tiny("qwen3_tied", tmp_path))
    assert "lm_head.weight" not in engine.manifest.names
    assert engine.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert int(engine.manifest.storage_nbytes.sum()) == sum(p.nbytes for p in engine.model.parameters())


def test_a_copy_that_lives_apart_is_fed_from_the_same_name(tmp_path):
    engine = HuggingFaceEngine.load(save_tiny("qwen3_tied", tmp_path))
    engine.model.lm_head.weight = nn.Parameter(engine.model.lm_head.weight.detach().clone())
    apart = HuggingFaceEngine(engine.model, engine.tokenizer)
    assert "lm_head.weight" in apart.manifest.names
    assert apart.aliases == {"lm_head.weight": "model.embed_tokens.weight"}


def test_derived_state_once_for_each_version_in_place_and_only_for_its_inputs(old, new):
    engine = HuggingFaceEngine.load(old)
    calls = []

    def product(model):
        calls.append(model)
        layer = model.model.layers[0].self_attn
        return {"product": layer.q_proj.weight.detach() @ layer.o_proj.weight.detach()}

    cache = {"product": torch.zeros(32, 32)}
    inputs = [f"model.layers.0.self_attn.{n}_proj.weight" for n in "qo"]
    engine.derive(product, cache, inputs)
    pointer = cache["product"].data_ptr()
    fresh = engine.load_fresh(new)
    calls.clear()
    _install(engine, new)
    for _ in range(2):
        engine.after_update(VersionKey(1, 1))
    assert len(calls) == 1
    assert torch.equal(cache["product"], fresh["product"])
    assert cache["product"].data_ptr() == pointer
    engine.after_update(VersionKey(1, 2), received=["model.norm.weight"])
    assert len(calls) == 1
    engine.after_update(VersionKey(1, 3), received=[inputs[1], "model.norm.weight"])
    assert len(calls) == 2
    with pytest.raises(AdapterError, match="derived twice"):
        engine.derive(product, cache)


def test_views_keep_their_alias(old, new):
    engine = HuggingFaceEngine.load(old)
    weight = engine.model.model.layers[0].self_attn.q_proj.weight
    view = weight.detach()[4:8].t()
    _install(engine, new)
    assert view.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    assert torch.equal(
        view, load_file(new / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"][4:8].t()
    )


def test_moved_tensors_are_refused_by_name(old):
    engine = HuggingFaceEngine.load(old)
    kept = torch.zeros(96, 32)
    engine.derive(lambda m: {"head": m.get_output_embeddings().weight}, {"head": kept})
    first = engine.binding()
    assert engine.binding() is first
    kept.data = kept.data.clone()
    with pytest.raises(AdapterError, match="moved") as caught:
        engine.binding()
    assert caught.value.tensor == "head"
    weight = engine.model.model.norm.weight
    weight.data = weight.data.clone()
    with pytest.raises(AdapterError, match="moved") as caught:
        engine.binding()
    assert caught.value.tensor == "model.norm.weight"


def test_a_dump_is_what_lives(old, tmp_path):
    engine = HuggingFaceEngine.load(old)
    engine.dump(tmp_path / "rank0.safetensors")
    dumped = load_file(tmp_path / "rank0.safetensors")
    assert dumped.keys() == engine.live_tensors().keys()
    assert all(torch.equal(t, dumped[name]) for name, t in engine.live_tensors().items())


class _Running:
    """A generation in a thread, slowed so that a pause finds it running."""

    def __init__(self, engine, new):
        self.begun, self.result = threading.Event(), []
        hook = engine.model.register_forward_hook(lambda *_: (self.begun.set(), time.sleep(0.02), None)[-1])
        self.thread = threading.Thread(target=lambda: self.result.extend(engine.generate(["w5 w6"], new)))
        self.thread.start()
        assert self.begun.wait(20)
        self.hook = hook

    def join(self):
        self.thread.join(20)
        self.hook.remove()
        assert not self.thread.is_alive()
        return self.result[0]


@pytest.fixture
def endless(tmp_path):
    engine = HuggingFaceEngine.load(save_tiny("llama", tmp_path))
    engine.model.generation_config.eos_token_id = None
    return engine


def test_pause_aborts_a_generation_at_its_next_token(endless):
    running = _Running(endless, 100)
    endless.pause("abort", 10.0)
    assert endless.paused
    done = running.join()
    assert done.finish == "aborted"
    assert 1 <= len(done.tokens) < 100
    with pytest.raises(DeadlineError, match="update to end"):
        endless.generate(["w5"], 2, deadline=0.05)
    endless.resume(VersionKey(1, 7))
    (after,) = endless.generate(["w5"], 2)
    assert (after.finish, after.version) == ("length", VersionKey(1, 7))


def test_pause_waits_for_a_generation_to_its_end(endless):
    running = _Running(endless, 10)
    endless.pause("wait", 20.0)
    assert not endless._turn.locked()
    done = running.join()
    assert (done.finish, len(done.tokens)) == ("length", 10)
    endless.pause("wait", 0.1)  # paused already
    endless.resume(None)
    assert endless.version is None


def test_a_pause_past_its_deadline_leaves_the_engine_running(endless):
    running = _Running(endless, 50)
    with pytest.raises(DeadlineError, match="running generation") as caught:
        endless.pause("wait", 0.05)
    assert "abort" in (caught.value.hint or "")
    assert not endless.paused
    endless.pause("abort", 10.0)
    assert running.join().finish == "aborted"
    endless.resume(None)


def test_a_generation_that_arrives_during_an_update_waits_for_it(endless):
    endless.pause("wait", 1.0)
    result = []
    thread = threading.Thread(target=lambda: result.extend(endless.generate(["w5"], 2)))
    thread.start()
    time.sleep(0.1)
    assert not result
    endless.report_version(VersionKey(2, 0))
    endless.resume(VersionKey(2, 0))
    thread.join(20)
    assert result[0].version == VersionKey(2, 0)


def test_a_batch_answers_each_prompt(endless):
    both = endless.generate(["w5 w6 w7 w8", "w9"], 5)
    alone = [endless.generate([p], 5)[0] for p in ("w5 w6 w7 w8", "w9")]
    assert [c.tokens for c in both] == [c.tokens for c in alone]
    assert endless.generate([], 5) == []


def test_bf16_engine_reads_its_manifest_in_bf16(tmp_path):
    engine = HuggingFaceEngine.load(save_tiny("llama", tmp_path), dtype=torch.bfloat16)
    found = read(engine.manifest, engine.binding().addresses())
    norm = engine.model.model.norm.weight.detach().view(torch.uint16).numpy()
    np.testing.assert_array_equal(found["model.norm.weight"], norm)


def test_without_a_loader_there_is_no_oracle(endless):
    with pytest.raises(AdapterError, match="no loader"):
        HuggingFaceEngine(endless.model, endless.tokenizer).load_fresh("anywhere")


def test_it_is_an_engine_adapter(endless):
    assert isinstance(endless, EngineAdapter)
