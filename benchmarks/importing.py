"""What ``import syncline`` takes in a fresh interpreter that has just imported torch."""

from __future__ import annotations

import statistics
import subprocess
import sys

# Both are timed in one process: torch's own import takes seconds and varies by more than is measured here.
_CODE = """
import time
began = time.perf_counter()
import torch
between = time.perf_counter()
import {name}
print(time.perf_counter() - between)
"""
_CONTROL = "keyword"  # a module of the standard library that torch has imported already


def seconds(pairs: int = 11) -> float:
    """Return the median over interleaved pairs of interpreters: import syncline, less import nothing."""
    return statistics.median(_run("syncline") - _run(_CONTROL) for _ in range(pairs))


def _run(name: str) -> float:
    code = _CODE.format(name=name)
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
