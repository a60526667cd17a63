"""A Megatron rank's blocks of fp8, quantised on the device: the same bits as on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from syncline.adapters.megatron import BlockFP8, MegatronTrainer
from syncline.adapters.megatron.learn import values_of
from syncline.adapters.megatron.quantise_device import DeviceBlocks
from syncline.kernels.fp8 import quantise

if TYPE_CHECKING:
    from collections.abc import Mapping


class Parts(torch.nn.Module):
    """Some boxes of one tensor ``w``, each a parameter of its own."""

    def __init__(self, whole: torch.Tensor, cuts: list[int]) -> None:
        super().__init__()
        self._shape, self._lows = tuple(whole.shape), [0, *cuts]
        for number, part in enumerate(whole.tensor_split(cuts, dim=-2)):
            self.register_parameter(
                f"p{number}", torch.nn.Parameter(part.contiguous().clone(), requires_grad=False)
            )

    def sharded_state_dict(self, metadata: Any = None) -> dict[str, Any]:
        lead = (0,) * (len(self._shape) - 2)
        return {
            name: SimpleNamespace(
                key="w", data=parameter.detach(), global_shape=self._shape, global_offset=(*lead, low, 0)
            )
            for (name, parameter), low in zip(self.named_parameters(), self._lows, strict=True)
        }


def identity(whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(whole)


def whole_of(trainer: MegatronTrainer, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return what is published under a checkpoint name, as bits."""
    found = None
    for one in trainer.learned.held:
        if one.name == name:
            values = values_of(one, trainer.live_tensor(one.live)).cpu()
            bits = values.view(torch.uint8 if values.element_size() == 1 else torch.int32).numpy()
            found = np.zeros(shape, bits.dtype) if found is None else found
            where = tuple(slice(o, o + n) for o, n in zip(one.box.offset, one.box.size, strict=True))
            found[where] = bits
    assert found is not None
    return found


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(
    ("shape", "cuts"),
    [((300, 272), []), ((300, 272), [100]), ((200, 200), [30, 70]), ((2, 260, 144), [96, 192])],
    ids=["whole", "cut", "three in a block", "stacked"],
)
def test_the_device_quantises_what_the_host_does(
    device: torch.device, shape: tuple[int, ...], cuts: list[int], power_of_two: bool
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * torch.linspace(0, 30, shape[-1])
    weight[..., -1, -1] = float("nan")
    weight = weight.to(torch.bfloat16)
    trainer = MegatronTrainer(
        Parts(weight.to(device), cuts),
        exporter=identity,
        rank=0,
        world=1,
        fp8=BlockFP8(("w",), power_of_two=power_of_two, halo="exchange"),
    )
    assert any(one.shared for one in trainer.learned.quantised) == bool(cuts)
    quantiser = trainer._quantiser
    assert quantiser is not None
    assert quantiser._neighbours is not None
    made = DeviceBlocks(trainer.learned, power_of_two=power_of_two)
    for factor in (1, 2):  # a table is used again
        with torch.no_grad():
            for parameter in trainer.chunks[0].parameters():
                parameter.mul_(factor)
        weights = [
            values_of(one.source, trainer.live_tensor(one.source.live)) for one in trainer.learned.quantised
        ]
        made.run(weights, quantiser._neighbours.round)
        matrices = (weight * factor).view(torch.int16).numpy().view(np.uint16).reshape(-1, *shape[-2:])
        payload, scale = zip(*(quantise(one, power_of_two=power_of_two) for one in matrices), strict=True)
        grid = (*shape[:-2], *scale[0].shape)
        assert np.array_equal(whole_of(trainer, "w", shape), np.stack(payload).reshape(shape))
        assert np.array_equal(
            whole_of(trainer, "w_scale_inv", grid), np.stack(scale).reshape(grid).view(np.int32)
        )


def test_a_weight_on_a_device_is_quantised_there_before_a_version(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("host memory is quantised on the host")
    weight = torch.randn(300, 272, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    trainer = MegatronTrainer(
        Parts(weight.to(device), [100]), exporter=identity, rank=0, world=1,
        fp8=BlockFP8(("w",), halo="exchange"),
    )  # fmt: skip
    trainer.quiesce()
    payload, scale = quantise(weight.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(whole_of(trainer, "w", (300, 272)), payload)
    assert np.array_equal(whole_of(trainer, "w_scale_inv", scale.shape), scale.view(np.int32))
