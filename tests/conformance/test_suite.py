"""The conformance suite passes an honest engine, and names what each dishonest one did."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from syncline.adapters.fsdp import FSDPTrainer
from syncline.adapters.module import ModuleEngine
from syncline.cli import app
from syncline.conformance import Outcome, check, factory_of
from syncline.errors import SynclineError
from syncline.options import Options

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("run_dir")

OPTIONS = Options(connect_timeout=15.0, update_timeout=15.0, heartbeat=0.5, lease=8.0, stall=4.0)

MUTANTS = {
    "ForgetsToPause": "pause.holds",
    "PausesInPassing": "pause.deadline",
    "StaysPaused": "pause.deadline",
    "MovesATensor": "addresses",
    "DerivesTwice": "after_update.once",
    "ForgetsToDerive": "effective.first",
    "IgnoresAStage": "effective.first",
    "LosesAStorage": "stages",
    "CallsSyncedLocal": "live_status.names",
    "SwapsNames": "live_status.names",
    "HidesATensor": "live_status",
    "WrongCut": "effective.first",
    "LaysTwice": "manifest",
    "BindsAnother": "binding",
    "KeepsItsCache": "caches",
    "HidesItsVersion": "version",
    "LoadsNothing": "misuse.checkpoint",
    "TakesAnyStage": "misuse.stage",
    "LacksAMember": "contract",
}


def outcomes(report: Any) -> dict[str, str]:
    return {one.name: str(one.outcome) for one in report.checks}


@pytest.mark.parametrize("world", [1, 2])
def test_an_honest_engine_passes_every_check(site: Path, world: int, run_dir: Path) -> None:
    report = check(factory_of("toy"), world=world, options=OPTIONS)
    assert report.failed == []
    assert {one.outcome for one in report.checks} == {Outcome.PASSED}
    assert len(report.checks) == 21
    assert list(run_dir.iterdir()) == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_promise_is_named(site: Path, mutant: str) -> None:
    report = check(factory_of(f"toy_engine.mutants:{mutant}"), options=OPTIONS)
    assert MUTANTS[mutant] in report.failed, report.checks
    failed = next(one for one in report.checks if one.name == MUTANTS[mutant])
    assert failed.expected
    assert failed.found


def test_every_mutant_is_tried(site: Path) -> None:
    module = importlib.import_module("toy_engine.mutants")
    toy = module.ToyAdapter
    made = {name for name, one in vars(module).items() if isinstance(one, type) and issubclass(one, toy)}
    assert made - {"ToyAdapter"} == MUTANTS.keys() | {"WrongColumns"}


def test_a_cut_of_another_rank_shows_with_two_ranks(site: Path) -> None:
    report = check(factory_of("toy_engine.mutants:WrongColumns"), world=2, options=OPTIONS)
    assert "effective.first" in report.failed


def test_the_repositorys_own_engine_passes() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).bfloat16()

    def load(directory: Path) -> nn.Module:
        from safetensors.torch import load_file  # noqa: PLC0415

        made = net()
        made.load_state_dict(load_file(directory / "model.safetensors"))
        return made

    report = check(
        lambda rank, world: ModuleEngine(net(), rank=rank, world=world, loader=load), options=OPTIONS
    )
    assert report.failed == []
    skipped = {name for name, outcome in outcomes(report).items() if outcome == "skipped"}
    assert skipped == {"stages", "caches", "misuse.stage"}


def test_trainers() -> None:
    class Unshared(FSDPTrainer):
        def share(self) -> dict[int, int]:
            super().share()
            return {}

    class Clinging(FSDPTrainer):
        def on_mutation(self, before: Any) -> Any:
            handle, removed = super().on_mutation(before), []

            class Once:
                def remove(self) -> None:
                    handle.remove()
                    if removed:
                        raise ValueError("removed already")
                    removed.append(True)

            return Once()

    class Halved(FSDPTrainer):
        def quiesce(self) -> None:
            with torch.no_grad():
                self.model[0].weight.mul_(0.5)

    def made(kind: type[FSDPTrainer]) -> Any:
        return lambda rank, world: kind(nn.Sequential(nn.Linear(6, 5)), rank=rank, world=world)

    honest = check(made(FSDPTrainer), options=OPTIONS)
    assert honest.kind == "trainer"
    assert {one.outcome for one in honest.checks} == {Outcome.PASSED}
    assert "update.first" in check(made(Halved), options=OPTIONS).failed
    assert check(made(Unshared), options=OPTIONS).failed == ["share"]
    assert check(made(Clinging), options=OPTIONS).failed == ["mutation"]


def test_the_command(site: Path) -> None:
    runner = CliRunner()
    good = runner.invoke(app, ["conformance", "toy", "--json"])
    assert good.exit_code == 0
    assert json.loads(good.output)["ok"]
    bad = runner.invoke(app, ["conformance", "toy_engine.mutants:KeepsItsCache"])
    assert bad.exit_code == 1
    assert "caches" in bad.output
    assert "20 passed, 1 failed, 0 skipped" in bad.output
    for target in ("toy_engine:nothing", "toy_engine:CHECKPOINT", "nobody", "broken"):
        assert runner.invoke(app, ["conformance", target]).exit_code == 2


def test_the_command_of_a_fresh_process(site: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-c", "from syncline.cli import app; app()", "conformance", "toy", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kind"] == "engine"


def test_what_is_no_factory_is_an_error(site: Path) -> None:
    for target in ("toy_engine:nothing", "no_such_module:x", "toy_engine:CHECKPOINT"):
        with pytest.raises(SynclineError, match=target):
            factory_of(target)
