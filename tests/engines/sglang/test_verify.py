"""``syncline verify --engine sglang`` on a real engine: everything explained, or refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines import checkpoints
from tests.engines.sglang.engine import environment

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed here: make test-engines"),
]


def _verify(out: Path, directory: Path) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-P", "-c", "from syncline.cli import app; app()", "verify", str(directory)]
    done = subprocess.run(
        [*command, "--engine", "sglang", "--json"],
        env=environment(1, out / "run"),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def test_everything_is_explained(tmp_path: Path) -> None:
    made = checkpoints.make("qwen3_tied", tmp_path / "model", 1)
    code, told, said = _verify(tmp_path, made)
    assert code == 0, said
    assert told["explained"] is True
    (rank,) = told["ranks"]
    assert rank["unused"] == []
    held = {name for tensor in rank["tensors"].values() for name in tensor["names"]}
    assert held == set(checkpoints.tensors(made))
    for name, tensor in rank["tensors"].items():
        assert bool(tensor["names"]) == (tensor["status"] == "synced"), name
