"""Faults that users of such trainers met, each tried on the adapter itself: no Megatron needed."""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from syncline.adapters.megatron import BlockFP8, trainer
from syncline.adapters.megatron.exchange import agree
from syncline.adapters.module import ModuleEngine
from syncline.errors import CoverageError
from tests.megatron.test_published import Chunk, noise
from tests.megatron.test_published import trainer as made
from tests.store.pair import Job, blank, module

if TYPE_CHECKING:
    from pathlib import Path


def median_costs(job: Job, updates: int) -> tuple[float, float]:
    """Return what an update costs, in seconds of a core: the median of an early ten and of the last ten."""
    chunk = Chunk({"w": noise(256, 256), "norm": noise(64)})
    live = {
        "w": torch.zeros(256, 256, dtype=torch.float8_e4m3fn),
        "w_scale_inv": torch.zeros(2, 2),
        "norm": torch.zeros(64, dtype=torch.bfloat16),
    }
    writer = job.writer(made(chunk, fp8=BlockFP8(("w",), halo="exchange")))
    engine = ModuleEngine(module(blank(live) | {"w": live["w"]}))
    reader = job.reader(engine)
    costs = []
    for version in range(1, updates + 1):
        began = time.process_time()
        writer.close_window()
        with torch.no_grad():
            chunk.get_parameter("norm").add_(1.0)
        writer.publish(version)
        reader.update(version)
        costs.append(time.process_time() - began)
    assert torch.equal(engine.live_tensors()["norm"], chunk.get_parameter("norm"))
    return statistics.median(costs[5:15]), statistics.median(costs[-10:])


def test_the_hundredth_version_costs_what_the_tenth_did(run_dir: Path) -> None:
    """B106. Neighbours on the machine disturb single rounds; what piles up would show in every one."""
    seen = []
    for attempt in range(3):
        with Job(f"m{attempt}") as job:
            early, late = median_costs(job, 100)
        seen.append((early, late))
        if late <= 1.2 * early:
            return
    pytest.fail(f"updates became slower: {seen}")


def test_a_vocabulary_is_that_of_the_text_model() -> None:
    """B21: a configuration of several towers, whose outer level says something else than the text's."""
    text = SimpleNamespace(vocab_size=500, tie_word_embeddings=False)
    outer = SimpleNamespace(vocab_size=900, tie_word_embeddings=True, get_text_config=lambda: text)
    for source in (outer, SimpleNamespace(config=outer)):
        assert trainer._vocabulary(SimpleNamespace(hf_pretrained=source)) == 500


def test_a_head_of_its_own_is_published_whatever_a_configuration_says(run_dir: Path) -> None:
    """B21: ties are read off memory, by the exporter's own account; equal shapes or names tie nothing."""
    embed, head = noise(8, 4), noise(8, 4, seed=1)
    chunk = Chunk({"embed": embed.clone(), "head": head.clone()})
    with Job("m") as job:
        adapter = made(chunk)
        assert adapter.aliases == {}
        writer = job.writer(adapter)
        engine = ModuleEngine(module(blank({"embed": embed, "head": head})))
        reader = job.reader(engine)
        writer.publish(1)
        reader.update(1)
        assert torch.equal(engine.live_tensors()["head"], head)


def test_two_names_of_one_parameter_travel_once(run_dir: Path) -> None:
    """B19, B22: what an exporter makes of one parameter under two names is an alias of the first."""
    weight = noise(64, 4)
    chunk = Chunk({"w": weight.clone()})

    def twice(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"embed": whole["w"], "head": whole["w"]}

    with Job("m") as job:
        adapter = trainer.MegatronTrainer(chunk, exporter=twice, rank=0, world=1)  # pyright: ignore[reportArgumentType]
        assert adapter.aliases == {"head": "embed"}
        assert [shard.name for shard in adapter.manifest.shards()] == ["embed"]
        writer = job.writer(adapter)
        engine = ModuleEngine(module({"embed": torch.zeros_like(weight)}))
        reader = job.reader(engine)
        writer.publish(1)
        assert reader.update(1).nbytes == weight.nbytes
        assert torch.equal(engine.live_tensors()["embed"], weight)


def test_storages_that_moved_and_weights_under_quantisation_go_together(run_dir: Path) -> None:
    """B28, B45: offloaded, brought back elsewhere, and still quantised from where it lies now."""
    weight = noise(200, 128)
    chunk = Chunk({"w": weight.clone()})
    live = {"w": torch.zeros(200, 128, dtype=torch.float8_e4m3fn), "w_scale_inv": torch.zeros(2, 1)}
    fresh = ModuleEngine(module({name: tensor.clone() for name, tensor in live.items()}))
    with Job("m") as job:
        adapter = made(chunk, fp8=BlockFP8(("w",)))
        writer = job.writer(adapter)
        engine = ModuleEngine(module(live))
        reader = job.reader(engine)
        for version in (1, 2, 3):
            with adapter.mutation("offload"):
                chunk.get_parameter("w").data = (weight * version).clone()
            writer.publish(version)
            reader.update(version)
    with Job("other") as job:  # a new process's view of the last version
        writer = job.writer(made(Chunk({"w": (weight * 3).clone()}), fp8=BlockFP8(("w",))))
        reader = job.reader(fresh)
        writer.publish(1)
        reader.update(1)
    for name, tensor in engine.live_tensors().items():
        assert torch.equal(tensor.view(torch.uint8), fresh.live_tensors()[name].view(torch.uint8))


def test_one_ranks_error_is_every_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = CoverageError("a gap", tensor="w")
    with pytest.raises(CoverageError) as caught:
        agree(mine)
    assert caught.value is mine
    agree(None)
    told: list[bytes] = []
    monkeypatch.setattr(
        "syncline.adapters.megatron.exchange.exchange", lambda data, _group: told.append(data) or [data]
    )
    with pytest.raises(CoverageError):
        agree(mine)
    monkeypatch.setattr("syncline.adapters.megatron.exchange.exchange", lambda data, _group: [data, *told])
    with pytest.raises(CoverageError, match="a gap") as heard:
        agree(None)
    assert heard.value.tensor == "w"
