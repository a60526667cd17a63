"""Transformers' own modules as engines, with ``load_state_dict`` as their loader; and a fused engine."""

from __future__ import annotations

import pytest
import torch

from syncline.layout.export import dtype_name
from syncline.layout.loader import Spec, trace_loader
from syncline.layout.manifest import Manifest
from syncline.layout.probe import compare, probe_loader
from syncline.verify.twin import twin_check

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "qwen2": ("Qwen2Config", {}),
    "qwen3_tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "llama": ("LlamaConfig", {}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 64}),
    "mamba": ("MambaConfig", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "state_size": 4}),
}


def _model(name: str, device: str) -> torch.nn.Module:
    kind, extra = MODELS[name]
    base = {} if kind in ("GPT2Config", "MambaConfig") else COMMON
    config = getattr(transformers, kind)(**(base | extra))
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return dict(named)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(name, assign):
    twin, real = _model(name, "meta"), _model(name, "cpu")
    checkpoint = {n: Spec(tuple(t.shape), dtype_name(t.dtype)) for n, t in real.state_dict().items()}

    def loader(model):
        return lambda weights: model.load_state_dict(dict(weights), assign=assign)

    trace = trace_loader(_tensors(twin), loader(twin), checkpoint, state=lambda: _tensors(twin))
    assert not trace.replays
    assert bool(trace.rebound) == assign
    persistent = set(real.state_dict())
    assert set(trace.holes) == set(trace.live) - persistent
    writes = {live: [w.name for w in found] for live, found in trace.writes.items()}
    if assign:
        assert writes == {n: [n] for n in writes}
        assert set(trace.writes) == persistent & set(trace.live)
    else:
        assert set(writes) | set(trace.ties) >= persistent
        assert all(len(names) == 1 for names in writes.values())
    tensors = _tensors(real)
    shards = trace.shards({n: (i, 0) for i, n in enumerate(trace.live)})
    manifest = Manifest.from_shards(
        shards, [tensors[n].numel() * tensors[n].element_size() for n in trace.live]
    )
    assert set(manifest.names) == set(checkpoint) - set(trace.unused)
    report = twin_check(
        trace, tensors, loader(real), checkpoint, state=lambda: _tensors(real), groups=[list(trace.live)[:3]]
    )
    assert report.replayed == 0
    assert report.written + report.untouched == report.elements
    assert report.groups == 2
    probed = probe_loader(_tensors(real), loader(real), checkpoint, state=lambda: _tensors(real))
    assert compare(trace, probed) == len(trace.live)


def test_a_fused_engine_fed_from_a_transformers_checkpoint():
    """An engine in the style of vLLM, TP2 rank 1, on a Qwen2 state dict: QKV and gate/up fused."""
    model = _model("qwen2", "meta")
    checkpoint = {n: Spec(tuple(t.shape), dtype_name(t.dtype)) for n, t in model.state_dict().items()}
    rank, world = 1, 2
    fused = {"q_proj": ("qkv", 0, 32), "k_proj": ("qkv", 32, 16), "v_proj": ("qkv", 48, 16),
             "gate_proj": ("gate_up", 0, 48), "up_proj": ("gate_up", 48, 48)}  # fmt: skip

    def place(name):
        for part, (into, start, size) in fused.items():
            if f".{part}." in name:
                return name.replace(part, into), start // world, size // world, 0
        dim = 1 if "o_proj" in name or "down_proj" in name else 0
        return name, 0, None, None if "norm" in name else dim

    def make(device):
        shapes = {}
        for name, spec in checkpoint.items():
            into, start, size, dim = place(name)
            shape = list(spec.shape)
            if size is not None:
                shape[0] = max(shapes.get(into, [0])[0], start + size)
            elif dim is not None:
                shape[dim] //= world
            shapes[into] = shape
        return {n: torch.zeros(s, dtype=torch.bfloat16, device=device) for n, s in shapes.items()}

    def loader(live):
        def load(weights):
            for name, w in weights:
                into, start, size, dim = place(name)
                if size is not None:
                    live[into].narrow(0, start, size).copy_(w.narrow(0, rank * size, size))
                elif dim is not None:
                    n = w.shape[dim] // world
                    live[into].copy_(w.narrow(dim, rank * n, n))
                else:
                    live[into].copy_(w)

        return load

    twin, real = make("meta"), make("cpu")
    trace = trace_loader(twin, loader(twin), checkpoint)
    assert not trace.unused
    assert not trace.holes
    assert all(len(found) == 3 for n, found in trace.writes.items() if ".qkv." in n)
    report = twin_check(trace, real, loader(real), checkpoint, seed=9)
    assert report.written == report.elements == sum(t.numel() for t in real.values())
    assert compare(trace, probe_loader(real, loader(real), checkpoint)) == len(real)
