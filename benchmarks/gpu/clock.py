"""Wall-clock medians of work on GPUs, from an idle machine to an idle machine."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

WARM = 2


def idle() -> None:
    """Wait until no GPU works."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


def median(work: Callable[[], object], rounds: int = 7) -> float:
    """Return the median seconds of ``work`` and of all that it started, after warm-up rounds."""
    took = []
    for _ in range(rounds + WARM):
        idle()
        began = time.perf_counter()
        work()
        idle()
        took.append(time.perf_counter() - began)
    return statistics.median(took[WARM:])


def reachable() -> None:
    """Let every GPU of this process read every other."""
    for a in range(torch.cuda.device_count()):
        for b in range(torch.cuda.device_count()):
            if a != b:
                torch.ones(8, device=f"cuda:{a}").to(f"cuda:{b}")
