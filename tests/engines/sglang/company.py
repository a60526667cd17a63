"""The process that has imported SGLang and forks one for each part of a scene."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from tests.engines.sglang.engine import ROOT, environment

if TYPE_CHECKING:
    from pathlib import Path

IMPORT_SECONDS = 240.0


class _Company:
    """Starts the process with the first part, and another one after one that answered too late."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._said: queue.Queue[int | None] = queue.Queue()
        atexit.register(self.close)

    def play(self, part: str, ranks: int, out: Path, seconds: float, *checkpoints: Path) -> int | None:
        """Play a part; return the exit status of its process, None if it was ended for being late."""
        environ = environment(ranks, out / "run")
        log = out / f"{part}.log"
        case = {
            "part": part,
            "ranks": ranks,
            "out": str(out),
            "checkpoints": list(map(str, checkpoints)),
            "log": str(log),
            "environ": environ,
        }
        process = self._running(environ)
        assert process.stdin is not None
        process.stdin.write(json.dumps(case) + "\n")
        process.stdin.flush()
        child = self._answer(IMPORT_SECONDS)
        status = self._answer(seconds) if child is not None else None
        if status is None:
            if child is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                with log.open("a") as file:
                    file.write(f"\nended after {seconds:g} s\n")
            self.close()
        return status

    def close(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _running(self, environ: dict[str, str]) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.engines.sglang.scene"],
                cwd=ROOT,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
            self._said = queue.Queue()
            threading.Thread(target=_listen, args=(self._process, self._said), daemon=True).start()
        return self._process

    def _answer(self, seconds: float) -> int | None:
        """Return the next number that it says; None after so many seconds, or when it has ended."""
        try:
            return self._said.get(timeout=seconds)
        except queue.Empty:
            return None


def _listen(process: subprocess.Popen[str], said: queue.Queue[int | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        said.put(int(line))
    said.put(None)


_company = _Company()
play = _company.play
