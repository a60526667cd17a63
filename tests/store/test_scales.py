"""Quantised weights travel with their scales (B39), which each engine brings into the form it wants (B40)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from syncline.errors import NameMismatchError
from syncline.memory import Binding
from syncline.store.adapter import Stage
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


class PowersOfTwo(Engine):
    """An engine whose kernels take scales as powers of two, none smaller than what it was sent."""

    stages = (Stage("weights", (0,)), Stage("scales", (1,)))

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(module({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}))
        self.arrived = torch.zeros_like(tensors["w_scale"])
        weights = self.model.get_parameter("w").data_ptr()
        self._staged = Binding.private(self.manifest.fingerprint, [weights, self.arrived.data_ptr()])

    def binding(self) -> Binding:
        return self._staged

    def begin_stage(self, index: int) -> None:
        pass

    def end_stage(self, index: int) -> None:
        if index == 1:
            self.model.get_parameter("w_scale").data.copy_(self.arrived.log2().ceil().exp2())


def test_two_engines_hold_the_scales_of_one_publish_in_two_forms(job: Job) -> None:  # B40
    sent = _quantised(3)
    trained = module({name: tensor.clone() for name, tensor in sent.items()})
    writer = job.writer(Trainer(trained))
    plain = Engine(module({name: torch.zeros_like(tensor) for name, tensor in sent.items()}))
    rounded = PowersOfTwo(sent)
    readers = [job.reader(plain, instance="plain"), job.reader(rounded, instance="powers")]
    writer.publish(1)
    for reader in readers:
        reader.update(1)
    powers = torch.tensor([[4.0, 4.0, 8.0, 8.0], [8.0, 8.0, 16.0, 16.0]])  # of 3, 4, 5, 6; 7, 8, 9, 10
    assert torch.equal(rounded.live_tensors()["w_scale"], powers)
    for model in (plain.model, trained):
        assert torch.equal(model.get_parameter("w_scale"), sent["w_scale"])
    for engine in (plain, rounded):
        assert torch.equal(engine.live_tensors()["w"].view(torch.uint8), sent["w"].view(torch.uint8))
