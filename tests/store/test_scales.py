"""Quantised weights travel with their scales, or not at all (B39)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from syncline.errors import NameMismatchError
from tests.store.pair import Engine, Trainer, blank, module, stamped

if TYPE_CHECKING:
    from tests.store.pair import Job


def _quantised(seed: int) -> dict[str, torch.Tensor]:
    bits = torch.randint(0, 120, (4, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return {"w": bits.view(torch.float8_e4m3fn), "w_scale": stamped(2, 4, start=seed)}


def test_float8_without_its_scales_is_refused_by_name_and_nothing_is_touched(job: Job) -> None:
    sent = _quantised(1)
    held = blank({"w_scale": sent["w_scale"]}) | {"w": torch.zeros_like(sent["w"])}
    writer = job.writer(Trainer(module({"w": sent["w"].clone()})))
    engine = Engine(module(held))
    with pytest.raises(NameMismatchError) as caught:
        job.reader(engine)
    assert "w_scale" in str(caught.value)
    assert not engine.live_tensors()["w"].view(torch.uint8).any()
    assert (engine.live_tensors()["w_scale"] == -1).all()
    writer.close()


def test_weights_and_scales_are_of_one_version(job: Job) -> None:
    first, second = _quantised(1), _quantised(2)
    trainer = Trainer(module({name: tensor.clone() for name, tensor in first.items()}))
    writer = job.writer(trainer)
    engine = Engine(module({name: torch.zeros_like(tensor) for name, tensor in first.items()}))
    reader = job.reader(engine)
    for number, wanted in enumerate((first, second), 1):
        writer.close_window("the next version")
        for name, parameter in trainer.model.named_parameters():
            parameter.data.copy_(wanted[name])
        writer.publish(number)
        reader.update(number)
        live = engine.live_tensors()
        assert torch.equal(live["w"].view(torch.uint8), wanted["w"].view(torch.uint8))
        assert torch.equal(live["w_scale"], wanted["w_scale"])
