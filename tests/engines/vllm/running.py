"""Starting vLLM for tests: in a process of its own, small, quiet and offline."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
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
        "XDG_CACHE_HOME": str(
            run / "cache"
        ),  # whether a layout stood its check is remembered there: not here
        "OMP_NUM_THREADS": "1",
    }
    if ranks > 1:
        found["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
    return found


class _Company:
    """Processes that play scenes, one for each number of ranks: importing vLLM takes longer than most scenes.

    One that fails, or is late, is ended; the next scene gets a new one.
    """

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[str]] = {}
        atexit.register(self.close)

    def play(self, directory: Path, ranks: int, seconds: float, case: dict[str, Any]) -> dict[str, Any]:
        """Play a scene; its output goes to ``log`` in its directory."""
        out, log = Path(case["out"]), directory / "log"
        process = self._of(ranks, directory)
        assert process.stdin is not None
        process.stdin.write(json.dumps({**case, "log": str(log), "run": str(directory / "run")}) + "\n")
        process.stdin.flush()
        until = time.monotonic() + seconds
        while not out.is_file() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        if not out.is_file():
            self._end(ranks)
            told = log.read_text().splitlines()[-40:] if log.is_file() else []
            pytest.fail(f"a scene ended with {process.returncode}:\n" + "\n".join(told), pytrace=False)
        return json.loads(out.read_text())

    def close(self) -> None:
        """End all."""
        for ranks in list(self._processes):
            self._end(ranks)

    def _of(self, ranks: int, directory: Path) -> subprocess.Popen[str]:
        found = self._processes.get(ranks)
        if found is None or found.poll() is not None:
            found = self._processes[ranks] = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.engines.vllm.scene"],
                cwd=ROOT,
                env=environment(ranks, directory / "run"),
                stdin=subprocess.PIPE,
                text=True,
                start_new_session=True,  # its workers end with it
            )
        return found

    def _end(self, ranks: int) -> None:
        process = self._processes.pop(ranks)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


_company = _Company()


def play(directory: Path, ranks: int = 1, seconds: float = 900.0, **case: Any) -> dict[str, Any]:
    """Run a scene and return what it saw."""
    case = {"out": str(directory / "seen.json"), "tp": ranks, "dtype": "float32", **case}
    return _company.play(directory, ranks, seconds, case)
