"""A version as a checkpoint directory: what any loader opens equals the weights; torn, nothing appears."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from syncline import faults
from syncline.errors import RevokedError, SynclineError, UnknownVersionError
from syncline.store.files import INDEX_NAME
from tests.store.pair import Engine, Trainer, blank, module, shard, stamped

if TYPE_CHECKING:
    from pathlib import Path

    from tests.store.pair import Job

VALUES = {
    "b.bias": stamped(5, start=900, dtype=torch.bfloat16),
    "c.count": torch.tensor(7),
    "w.turned": stamped(6, 4).t(),
    "w.whole": stamped(9, 4, start=100),
}


def load_all(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(directory.glob("*.safetensors")) for k, v in load_file(path).items()}


def equal(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return found.keys() == want.keys() and all(
        torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in want.items()
    )


@pytest.mark.parametrize("limit", [1, 100, 1 << 30])
def test_the_open_version_is_written_as_it_is(job: Job, tmp_path: Path, limit: int) -> None:
    writer = job.writer(Trainer(module(VALUES)))
    writer.publish(3)
    files = writer.save(tmp_path / "v3", max_shard_bytes=limit)
    assert equal(load_all(tmp_path / "v3"), VALUES)
    assert len(files) == {1: 4, 100: 3, 1 << 30: 1}[limit]
    with safe_open(files[0], "pt") as opened:
        assert opened.metadata() == {"format": "pt", "syncline_version": "1.3"}
    if len(files) > 1:
        index = json.loads((tmp_path / "v3" / INDEX_NAME).read_text())
        assert {n: files[0].with_name(f) for n, f in index["weight_map"].items()}.keys() == VALUES.keys()
    writer.close_window()  # the pin is gone: nobody is waited for


def test_shards_of_several_writers_become_whole_tensors(job: Job, tmp_path: Path) -> None:
    full = stamped(9, 4)
    writers = [
        job.writer(
            Trainer(
                module({"w": full[a:b].clone()}),
                shards=[shard("w", (9, 4), (a, 0), (b - a, 4))],
                rank=rank,
                world=2,
            )
        )
        for rank, (a, b) in enumerate([(0, 4), (4, 9)])
    ]
    for writer in writers:
        writer.publish(1)
    for writer in writers:
        writer._current.wait()
    writers[1].save(tmp_path / "v1")
    assert equal(load_all(tmp_path / "v1"), {"w": full})


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_opens_it(job: Job, tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    base = tmp_path / "base"
    model.save_pretrained(base)
    writer = job.writer(Trainer(model))
    with writer.adapter.mutation("step"):
        for p in model.parameters():
            p.data.mul_(1.25)
    writer.publish(1)
    writer.save(tmp_path / "v1", base=base, max_shard_bytes=4096)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "v1")
    want = model.state_dict()
    assert loaded.state_dict().keys() == want.keys()
    assert all(torch.equal(loaded.state_dict()[n], t) for n, t in want.items())
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert (tmp_path / "v1" / "config.json").read_text() == (base / "config.json").read_text()


def test_a_window_that_closes_between_two_files_leaves_nothing(job: Job, tmp_path: Path) -> None:
    job.options = type(job.options)(
        connect_timeout=15.0, update_timeout=3.0, heartbeat=0.5, lease=8.0, stall=0.5
    )
    model = module({n: t.clone() for n, t in VALUES.items()})
    writer = job.writer(Trainer(model))
    job.reader(Engine(module(blank(VALUES))))
    writer.publish(1)
    shards: list[float] = []

    def close() -> None:
        shards.append(0.0)
        if len(shards) == 2:  # the second file: the trainer steps, and does not wait for ever
            step = threading.Thread(target=writer.close_window)
            step.start()
            step.join(10.0)
            assert not step.is_alive()
            model.w.whole.data.add_(1.0)

    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "marker").write_text("the old one")
    with faults.arm("files.before_shard", close), pytest.raises(SynclineError) as caught:
        writer.save(tmp_path / "v1", max_shard_bytes=1)
    assert isinstance(caught.value, RevokedError | UnknownVersionError)
    assert [p.name for p in tmp_path.iterdir() if p.name != "run"] == ["v1"]
    assert [p.name for p in (tmp_path / "v1").iterdir()] == ["marker"]
    writer.publish(2)
    writer.save(tmp_path / "v1")
    assert equal(load_all(tmp_path / "v1"), VALUES | {"w.whole": VALUES["w.whole"] + 1.0})


def test_a_slow_save_that_moves_on_is_waited_for(job: Job, tmp_path: Path) -> None:
    job.options = type(job.options)(
        connect_timeout=15.0, update_timeout=15.0, heartbeat=0.1, lease=8.0, stall=0.5
    )
    values = {f"t{i}": stamped(50, start=100.0 * i) for i in range(8)}
    model = module({n: t.clone() for n, t in values.items()})
    writer = job.writer(Trainer(model))
    writer.publish(1).wait()
    begun = threading.Event()

    def slow() -> None:
        begun.set()
        time.sleep(0.25)

    def step() -> None:
        begun.wait(10.0)
        writer.close_window()
        for p in model.parameters():
            p.data.zero_()

    thread = threading.Thread(target=step)
    thread.start()
    with faults.arm("files.before_shard", slow):
        writer.save(tmp_path / "v1", max_shard_bytes=1)
    thread.join(10.0)
    assert equal(load_all(tmp_path / "v1"), values)
    assert not model.t3.any()


def test_without_a_window_there_is_nothing_to_save(job: Job, tmp_path: Path) -> None:
    writer = job.writer(Trainer(module(VALUES)))
    with pytest.raises(UnknownVersionError):
        writer.save(tmp_path / "v")
    writer.publish(1)
    writer.close_window()
    with pytest.raises(UnknownVersionError):
        writer.save(tmp_path / "v")
    assert not (tmp_path / "v").exists()


def test_saving_and_updating_meet_in_one_window(job: Job, tmp_path: Path) -> None:
    writer = job.writer(Trainer(module(VALUES)))
    engine = Engine(module(blank(VALUES)))
    reader = job.reader(engine)
    writer.publish(1)
    with faults.arm("files.before_shard", lambda: reader.update(1)):
        writer.save(tmp_path / "v1")
    assert equal(load_all(tmp_path / "v1"), engine.live_tensors())
