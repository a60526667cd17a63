"""Starting vLLM for tests: in a process of its own, small, quiet and offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
INSTALLED = find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed here: make test-engines")


def environment(ranks: int, run: Path) -> dict[str, str]:
    """Return the environment of an engine with so many workers."""
    found = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_PLUGINS": "syncline",
        "VLLM_SERVER_DEV_MODE": "1",
        "SYNCLINE_RUN_DIR": str(run),
        "OMP_NUM_THREADS": "1",
    }
    if ranks > 1:
        found["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
    return found


def play(directory: Path, ranks: int = 1, seconds: float = 420.0, **case: Any) -> dict[str, Any]:
    """Run a scene and return what it saw."""
    out = directory / "seen.json"
    case = {"out": str(out), "tp": ranks, "dtype": "float32", **case}
    log = directory / "log"
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.engines.vllm.scene", json.dumps(case)],
            cwd=ROOT,
            env=environment(ranks, directory / "run"),
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
    assert out.is_file(), f"ended with {done.returncode}:\n" + "\n".join(log.read_text().splitlines()[-40:])
    return json.loads(out.read_text())
