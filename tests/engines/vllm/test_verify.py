"""``syncline verify --engine vllm`` on real engines: everything explained, or refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines import checkpoints
from tests.engines.vllm.running import environment, needs_vllm

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), needs_vllm]

PLUGIN = '''
import torch
from torch import nn


def register():
    """Give every model of this class a parameter that no checkpoint knows."""
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM as Model

    build, load = Model.__init__, Model.load_weights

    def built(self, *, vllm_config, prefix=""):
        build(self, vllm_config=vllm_config, prefix=prefix)
        self.stray = nn.Parameter(torch.zeros(3), requires_grad=False)

    def loaded(self, weights):
        return load(self, weights) | {"stray"}

    if build.__name__ != "built":
        Model.__init__, Model.load_weights = built, loaded
'''


def _verify(out: Path, directory: Path, *options: str, **more: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit status, what it printed as JSON, and what it said of errors."""
    command = [sys.executable, "-P", "-c", "from syncline.cli import app; app()", "verify", str(directory)]
    done = subprocess.run(
        [*command, "--engine", "vllm", "--json", *options],
        env=environment(1, out / "run") | more,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return checkpoints.make("qwen3", tmp_path / "model", 1)


def _check_listing(rank: dict[str, Any], names: set[str]) -> None:
    assert {tensor["status"] for tensor in rank["tensors"].values()} <= {"synced", "derived", "local"}
    for name, tensor in rank["tensors"].items():
        assert bool(tensor["names"]) == (tensor["status"] == "synced"), name
    held = {name for tensor in rank["tensors"].values() for name in tensor["names"]}
    assert held | set(rank["unused"]) == names
    fused = next(
        t for name, t in rank["tensors"].items() if "layers.0" in name and "qkv" in name and t["names"]
    )
    kinds = ("q_proj", "k_proj", "v_proj")
    assert {kind for kind in kinds for name in fused["names"] if kind in name} == set(kinds)


def test_everything_is_explained(made: Path, tmp_path: Path) -> None:
    code, told, said = _verify(tmp_path, made)
    assert code == 0, said
    assert told["explained"] is True
    (rank,) = told["ranks"]
    assert rank["unused"] == []
    _check_listing(rank, set(checkpoints.tensors(made)))


@pytest.mark.slow
def test_every_rank_is_explained(made: Path, tmp_path: Path) -> None:
    code, told, said = _verify(
        tmp_path, made, "--ranks", "2", "--dtype", "float32", VLLM_CPU_OMP_THREADS_BIND="0|1"
    )
    assert code == 0, said
    assert len(told["ranks"]) == 2
    for rank in told["ranks"]:
        _check_listing(rank, set(checkpoints.tensors(made)))


@pytest.mark.slow
def test_a_parameter_that_nothing_fills_fails_by_name_unless_declared(made: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    (plugin / "stray-0.dist-info").mkdir(parents=True)
    (plugin / "stray_parameter.py").write_text(PLUGIN)
    (plugin / "stray-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: stray\nVersion: 0\n")
    (plugin / "stray-0.dist-info" / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nstray = stray_parameter:register\n"
    )
    more = {"PYTHONPATH": str(plugin), "VLLM_PLUGINS": "syncline,stray"}
    code, told, _ = _verify(tmp_path, made, **more)
    assert code == 1
    assert told["explained"] is False
    assert told["error"]["kind"] == "AdapterError"
    assert told["error"]["tensor"] == "stray"
    code, told, said = _verify(tmp_path, made, "--local", "stray", **more)
    assert code == 0, said
    assert told["ranks"][0]["tensors"]["stray"]["status"] == "local"
