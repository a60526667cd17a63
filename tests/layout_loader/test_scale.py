"""Many names: a stacked-experts loader whose trace has to stay linear."""

from __future__ import annotations

import time

import torch

from syncline.layout.loader import Spec, trace_loader
from syncline.layout.manifest import Manifest


def _trace(layers: int, experts: int):
    inner, hidden, rank = 8, 16, 1
    live, checkpoint = {}, {}
    for layer in range(layers):
        live[f"{layer}.w13"] = torch.empty(experts, inner, hidden, dtype=torch.bfloat16, device="meta")
        live[f"{layer}.w2"] = torch.empty(experts, hidden, inner // 2, dtype=torch.bfloat16, device="meta")
        for e in range(experts):
            for kind in ("gate", "up"):
                checkpoint[f"{layer}.{e}.{kind}"] = Spec((inner, hidden), "bfloat16")
            checkpoint[f"{layer}.{e}.down"] = Spec((hidden, inner), "bfloat16")

    def load(weights):
        half = inner // 2
        for name, w in weights:
            layer, e, kind = name.split(".")
            if kind == "down":
                live[f"{layer}.w2"][int(e)].copy_(w.narrow(1, rank * half, half))
            else:
                target = live[f"{layer}.w13"][int(e)].narrow(0, half * (kind == "up"), half)
                target.copy_(w.narrow(0, rank * half, half))

    began = time.process_time()
    trace = trace_loader(live, load, checkpoint)
    return trace, live, len(checkpoint), time.process_time() - began


def test_the_time_of_a_trace_grows_with_the_names():
    _trace(1, 64)
    _, _, few, short = _trace(4, 128)
    trace, live, many, long = _trace(4, 1024)
    assert (few, many) == (1536, 12288)
    assert long / short < 3 * many / few
    shards = trace.shards({name: (i, 0) for i, name in enumerate(live)})
    assert len(shards) == many
    assert not trace.holes
    assert not trace.unused
    manifest = Manifest.from_shards(shards, [t.numel() * 2 for t in live.values()])
    assert len(manifest.names) == many


def test_interleaved_columns_of_many_experts_stay_fast():
    """Every write of one tensor spans all of it: the worst case for telling writes apart by their bounds."""
    live = {"w": torch.empty(16, 8 * 512, dtype=torch.bfloat16, device="meta")}
    checkpoint = {f"{e}": Spec((16, 8), "bfloat16") for e in range(512)}

    def load(weights):
        for name, w in weights:
            live["w"].narrow(1, 8 * int(name), 8).copy_(w)

    began = time.process_time()
    trace = trace_loader(live, load, checkpoint)
    assert time.process_time() - began < 30
    assert len(trace.writes["w"]) == 512
    assert not trace.holes
