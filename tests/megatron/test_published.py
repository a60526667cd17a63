"""What a Megatron trainer adapter publishes, received by a plain module: no Megatron needed.

Met are a router's bias whose dtype flips (B29), dtypes that travel as they are held (B36), scales that are
missing or of the other form (B39, B40), parameters that are offloaded (B45) and gathers still to come (B108).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from syncline.adapters.megatron import BlockFP8, MegatronTrainer
from syncline.adapters.module import ModuleEngine
from syncline.errors import AdapterError, SynclineError
from syncline.kernels.fp8 import quantise
from syncline.layout import Rules
from tests.store.pair import Job, blank, module

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Chunk(torch.nn.Module):
    """A model chunk of whole or cut parameters, which says so as Megatron's do.

    Args:
        tensors: parameters by name.
        cuts: by name, (first row, rows of the whole) where only some rows are held.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, tuple[int, int]] | None = None
    ) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self._cuts = dict(cuts or {})

    def sharded_state_dict(self, metadata: Any = None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, parameter in self.named_parameters():
            low, rows = self._cuts.get(name, (0, len(parameter)))
            found[name] = SimpleNamespace(
                key=name,
                data=parameter.detach(),
                global_shape=(rows, *parameter.shape[1:]),
                global_offset=(low, *[0] * (parameter.ndim - 1)),
            )
        return found


def identity(whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(whole)


def trainer(chunk: Chunk, **more: Any) -> MegatronTrainer:
    return MegatronTrainer(chunk, exporter=identity, rank=0, world=1, **more)


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_steps_and_announced_changes_arrive(run_dir: Path) -> None:
    weight = noise(6, 4, dtype=torch.float32)
    chunk = Chunk({"w": weight.clone()})
    optimizer = torch.optim.SGD(chunk.parameters(), lr=1.0)
    with Job("m") as job:
        adapter = trainer(chunk, optimizers=optimizer)
        writer = job.writer(adapter)
        engine = ModuleEngine(module(blank({"w": weight})))
        reader = job.reader(engine)
        writer.publish(1)
        reader.update(1)
        assert torch.equal(engine.live_tensors()["w"], weight)
        chunk.get_parameter("w").grad = torch.ones(6, 4)
        optimizer.step()
        writer.publish(2)
        reader.update(2)
        assert torch.equal(engine.live_tensors()["w"], weight - 1)
        with torch.no_grad(), adapter.mutation("swap in averaged weights"):
            chunk.get_parameter("w").copy_(weight * 3)
        writer.publish(3)
        reader.update(3)
        assert torch.equal(engine.live_tensors()["w"], weight * 3)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_fp8_payload_and_scales_are_the_references(run_dir: Path, power_of_two: bool) -> None:
    weight, norm = noise(200, 300), noise(8)
    chunk = Chunk({"w": weight.clone(), "norm": norm.clone()})
    live = {
        "w": torch.zeros(200, 300, dtype=torch.float8_e4m3fn),
        "w_scale_inv": torch.full((2, 3), -1.0),
        "norm": torch.zeros(8, dtype=torch.bfloat16),
    }
    with Job("m") as job:
        writer = job.writer(trainer(chunk, fp8=BlockFP8(("w",), power_of_two=power_of_two)))
        engine = ModuleEngine(module(live))
        reader = job.reader(engine)
        for version, factor in enumerate((1, 4), 1):
            with torch.no_grad():
                writer.close_window()
                chunk.get_parameter("w").copy_(weight * factor)
            writer.publish(version)
            reader.update(version, verify="installed")
            bits = (weight * factor).view(torch.int16).numpy().view(np.uint16)
            payload, scale = quantise(bits, power_of_two=power_of_two)
            held = engine.live_tensors()
            assert np.array_equal(held["w"].view(torch.uint8).numpy(), payload)
            assert np.array_equal(held["w_scale_inv"].numpy(), scale)
            assert torch.equal(held["norm"], norm)


def test_weights_without_their_scales_are_refused_by_name(run_dir: Path) -> None:
    """A reader that needs scales, and a trainer that publishes none."""
    chunk = Chunk({"w": noise(128, 128)})
    with Job("m", connect_timeout=5.0) as job:
        job.writer(trainer(chunk))
        live = {"w": torch.zeros(128, 128, dtype=torch.bfloat16), "w_scale_inv": torch.zeros(1, 1)}
        with pytest.raises(SynclineError, match="w_scale_inv"):
            job.reader(ModuleEngine(module(live)))


def test_a_border_that_cuts_a_block_is_refused_by_name() -> None:
    chunk = Chunk({"w": noise(100, 128)}, {"w": (0, 256)})
    with pytest.raises(AdapterError, match="cuts a block") as caught:
        trainer(chunk, fp8=BlockFP8(("w",)))
    assert caught.value.tensor == "w"


def test_what_is_no_bfloat16_matrix_is_not_quantised() -> None:
    with pytest.raises(AdapterError, match="cannot be quantised") as caught:
        trainer(Chunk({"w": noise(128, 128, dtype=torch.float32)}), fp8=BlockFP8(("w",)))
    assert caught.value.tensor == "w"


def test_padded_rows_that_a_reader_asks_for_are_refused_by_name(run_dir: Path) -> None:
    chunk = Chunk({"embed": noise(8, 4)})
    chunk.get_parameter("embed").is_embedding_or_output_parameter = True
    with Job("m", connect_timeout=5.0) as job:
        adapter = trainer(chunk, vocabulary=6)
        assert adapter.learned.dropped == {"0.embed": 2}
        writer = job.writer(adapter)
        with pytest.raises(SynclineError) as caught:
            job.reader(ModuleEngine(module({"embed": torch.zeros(8, 4, dtype=torch.bfloat16)})), "greedy")
        assert caught.value.tensor == "embed"
        assert "(8, 4)" in str(caught.value)
        engine = ModuleEngine(module({"embed": torch.zeros(6, 4, dtype=torch.bfloat16)}))
        reader = job.reader(engine, "modest")
        writer.publish(1)
        reader.update(1)
        assert torch.equal(engine.live_tensors()["embed"], chunk.get_parameter("embed")[:6])


def test_an_offload_between_versions_is_noticed_and_survived(run_dir: Path) -> None:
    weight = noise(64, 4)
    chunk = Chunk({"w": weight.clone()})
    with Job("m") as job:
        adapter = trainer(chunk)
        writer = job.writer(adapter)
        engine = ModuleEngine(module(blank({"w": weight})))
        reader = job.reader(engine)
        writer.publish(1)
        reader.update(1)
        parameter = chunk.get_parameter("w")
        with adapter.mutation("offload"):
            kept, parameter.data = parameter.data.clone(), torch.empty(0, dtype=torch.bfloat16)
        with pytest.raises(AdapterError) as caught:
            adapter.binding()
        assert caught.value.tensor == "0.w"
        parameter.data = kept * 2
        writer.publish(2)
        reader.update(2)
        assert torch.equal(engine.live_tensors()["w"], weight * 2)


def test_wider_master_dtypes_travel_as_they_are_and_are_cast_once(run_dir: Path) -> None:
    weight = noise(16, 8, dtype=torch.float32)
    chunk = Chunk({"w": weight.clone()})

    def rounded(whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"w": whole["w"].to(torch.bfloat16)}

    with Job("m") as job:
        adapter = MegatronTrainer(chunk, exporter=rounded, rank=0, world=1)
        assert adapter.casts == {"w": "bfloat16"}
        writer = job.writer(adapter, rules=_casting())
        engine = ModuleEngine(module({"w": torch.zeros(16, 8, dtype=torch.bfloat16)}))
        reader = job.reader(engine)
        writer.publish(1)
        reader.update(1)
        assert torch.equal(engine.live_tensors()["w"], weight.to(torch.bfloat16))


def _casting() -> Rules:
    return Rules(casts={"*": "bfloat16"})


class Lazy(torch.nn.Module):
    """A wrapper whose parameters are those of the last step only once they are gathered."""

    def __init__(self, module: Chunk) -> None:
        super().__init__()
        self.module = module
        self.ddp_config = SimpleNamespace(overlap_param_gather=True)
        self.main = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        self.gathers: list[bool] = []

    @torch.no_grad()
    def start_param_sync(self, *, force_sync: bool = False) -> None:
        self.gathers.append(force_sync)
        for name, parameter in self.module.named_parameters():
            parameter.copy_(self.main[name])

    def forward(self) -> None:
        """Nothing but the hooks."""


def test_a_lazy_gather_is_finished_before_a_version_opens(run_dir: Path) -> None:
    weight = noise(8, 4, dtype=torch.float32)
    chunk = Lazy(Chunk({"w": weight.clone()}))
    with Job("m") as job:
        writer = job.writer(MegatronTrainer(chunk, exporter=identity, rank=0, world=1))
        engine = ModuleEngine(module(blank({"w": weight})))
        reader = job.reader(engine)
        for version in (1, 2):
            writer.close_window()
            chunk.main["w"] += 1
            writer.publish(version)
            reader.update(version, verify="installed")
            assert torch.equal(engine.live_tensors()["w"], chunk.main["w"])
    assert chunk.gathers == [True, True]


def test_a_gather_in_forward_is_a_mutation_only_after_a_step() -> None:
    chunk = Lazy(Chunk({"w": noise(8, 4, dtype=torch.float32)}))
    optimizer = torch.optim.SGD(chunk.parameters(), lr=0.1)
    adapter = MegatronTrainer(chunk, optimizer, exporter=identity, rank=0, world=1)
    seen: list[str] = []
    adapter.on_mutation(seen.append)
    adapter.quiesce()
    chunk()
    assert seen == []
    optimizer.step()
    chunk()
    assert seen == ["optimizer.step", "gather in forward"]
    adapter.quiesce()
    chunk()
    assert len(seen) == 2


class Router(Chunk):
    """Holds a bias in float32 that mixed precision casts with the module, and that it restores lazily."""

    def __init__(self, bias: torch.Tensor) -> None:
        super().__init__({"w": noise(4, 4, dtype=torch.float32)})
        self.register_buffer("bias", bias)

    def _maintain_float32_expert_bias(self) -> None:
        self.bias = self.bias.to(torch.float32)

    def sharded_state_dict(self, metadata: Any = None) -> dict[str, Any]:
        one = SimpleNamespace(
            key="bias", data=self.bias, global_shape=tuple(self.bias.shape), global_offset=(0,)
        )
        return {**super().sharded_state_dict(), "bias": one}


def test_a_routers_bias_lands_in_its_own_dtype_whatever_it_was_cast_to(run_dir: Path) -> None:
    bias = torch.tensor([1.00001, -2.3, 0.1, 7.0])  # none of the first three fits bfloat16
    chunk = Router(bias.clone())
    live = {"w": torch.zeros(4, 4), "bias": torch.zeros(4)}
    with Job("m") as job:
        adapter = MegatronTrainer(chunk, exporter=identity, rank=0, world=1)
        writer = job.writer(adapter)
        engine = ModuleEngine(module(live))
        reader = job.reader(engine)
        writer.publish(1)
        reader.update(1)
        assert torch.equal(engine.live_tensors()["bias"], bias)
        with adapter.mutation("cast"):
            chunk.bias = chunk.bias.to(torch.bfloat16)
        writer.publish(2)
        reader.update(2)
        assert torch.equal(engine.live_tensors()["bias"], bias.to(torch.bfloat16).float())
        with adapter.mutation("new bias"):
            chunk.bias = bias * 3
        writer.publish(3)
        reader.update(3)
        assert torch.equal(engine.live_tensors()["bias"], bias * 3)
