"""What ``import syncline`` adds to ``import torch``, in fresh interpreters."""

from __future__ import annotations

import statistics
import subprocess
import sys

_TORCH = "import time; b = time.perf_counter(); import torch; print(time.perf_counter() - b)"
_BOTH = "import time; b = time.perf_counter(); import torch, syncline; print(time.perf_counter() - b)"


def seconds(pairs: int = 11) -> float:
    """Return the median difference of interleaved pairs of interpreters."""
    return statistics.median(_run(_BOTH) - _run(_TORCH) for _ in range(pairs))


def _run(code: str) -> float:
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
