"""Every toy loader: its trace against a real run, the coordinate probe, and the twin check."""

from __future__ import annotations

import pytest
import torch

from syncline.layout.loader import trace_loader
from syncline.layout.manifest import Manifest
from syncline.layout.probe import compare, probe_loader
from syncline.verify.twin import random_tensor, twin_check
from tests.layout_loader import loaders_computed
from tests.layout_loader.loaders import CASES, Case

ALL = [*CASES]


def test_every_toy_loader_takes_part():
    assert loaders_computed.minus_exp_in_place in CASES.values()
    assert len(ALL) >= 25


def _trace(case: Case):
    meta = case.make("meta")
    return trace_loader(meta, lambda weights: case.load(meta, weights), case.checkpoint, state=lambda: meta)


def _weights(case: Case, seed: int):
    return {name: random_tensor(spec, seed, name) for name, spec in case.checkpoint.items()}


def _installed(trace, weights, live):
    """Install shards by plain torch indexing, element by element of each box; then the replays."""
    names = list(trace.live)
    shards = trace.shards({name: (i, 0) for i, name in enumerate(names)})
    for shard in shards:
        name = names[shard.view.storage]
        kind = getattr(torch, shard.dtype)
        flat = (
            live[name]
            .detach()
            .as_strided((live[name].untyped_storage().nbytes() // live[name].element_size(),), (1,))
        )
        flat = flat if flat.dtype == kind else flat.view(kind)
        box = weights[shard.name][
            tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.size, strict=True))
        ]
        index = torch.full(shard.box.size, shard.view.offset)
        for d, (extents, strides) in enumerate(zip(shard.view.shape, shard.view.stride, strict=True)):
            along = torch.zeros(1, dtype=torch.int64)
            for n, s in zip(extents, strides, strict=True):
                along = (along[:, None] + torch.arange(n) * s).flatten()
            index += along.view([-1 if i == d else 1 for i in range(len(shard.box.size))])
        flat[index.flatten()] = box.reshape(-1).to(kind)
    for replay in trace.replays:
        boxed = {
            name: weights[name][tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))]
            for name, box in replay.boxes.items()
        }
        replay.run(boxed, live)
    return shards


def _bits(t):
    return t.detach().contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("name", ALL)
def test_installing_by_the_trace_equals_loading(name):
    case = CASES[name]()
    trace = _trace(case)
    weights = _weights(case, 3)
    real = case.make("cpu")
    for tensor in real.values():
        tensor.data.fill_(1.5 if tensor.is_floating_point() else 77)
    case.load(real, ((n, w.clone()) for n, w in weights.items()))
    mine = {
        n: torch.empty_strided(s.shape, s.stride, dtype=getattr(torch, s.dtype))
        for n, s in trace.live.items()
    }
    for tensor in mine.values():
        tensor.fill_(1.5 if tensor.is_floating_point() else 77)
    shards = _installed(trace, weights, mine)
    for live in trace.live:
        assert mine[live].shape == real[live].shape
        assert torch.equal(_bits(mine[live]), _bits(real[live])), live
    sizes = [mine[n].untyped_storage().nbytes() for n in trace.live]
    manifest = Manifest.from_shards(shards, sizes)
    assert manifest.rows == len(shards)
    assert Manifest.decode(manifest.encode()) == manifest


@pytest.mark.parametrize("name", ALL)
def test_the_trace_says_what_is_copied_computed_unused_and_left(name):
    case = CASES[name]()
    trace = _trace(case)
    assert {n for replay in trace.replays for n in replay.inputs} == case.replays
    assert set(trace.unused) == case.unused == set(trace.reasons)
    assert sum(box.numel for boxes in trace.holes.values() for box in boxes) == case.holes
    if case.writes is not None:
        assert sum(map(len, trace.writes.values())) == case.writes


@pytest.mark.parametrize("name", ALL)
def test_the_probe_agrees(name):
    case = CASES[name]()
    trace = _trace(case)
    real = case.make("cpu")
    probed = probe_loader(real, lambda weights: case.load(real, weights), case.checkpoint, state=lambda: real)
    assert compare(trace, probed) == len(trace.live)
    reinterpreted = any(
        write.dst_dtype != trace.live[live].dtype for live, writes in trace.writes.items() for write in writes
    )
    assert bool(probed.computed) <= (bool(trace.replays) or reinterpreted)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("grouped", [False, True])
def test_the_twin_agrees(name, grouped):
    case = CASES[name]()
    trace = _trace(case)
    real = case.make("cpu")
    groups = [[n] for n in trace.live] if grouped else None
    report = twin_check(
        trace, real, lambda weights: case.load(real, weights), case.checkpoint, 11, state=lambda: real,
        groups=groups
    )  # fmt: skip
    assert report.tensors == len(trace.live)
    assert report.written + report.replayed + report.untouched == report.elements
    assert report.untouched == case.holes
