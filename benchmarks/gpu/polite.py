"""A transfer beside a neighbour's work on the receiving GPU: what either loses."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 1.2


class Neighbour:
    """A step, captured in a graph: ``train`` multiplies many rows by large matrices, ``decode`` few."""

    def __init__(self, kind: str) -> None:
        rows, width, layers = (8192, 8192, 4) if kind == "train" else (32, 8192, 24)
        self._stream = torch.cuda.Stream()
        weights = [torch.randn(width, width, device="cuda", dtype=torch.bfloat16) / 90 for _ in range(layers)]
        self._x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        self._kept = weights
        with torch.cuda.stream(self._stream):
            self._forward(weights)
            self._stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._forward(weights)

    def _forward(self, weights: list[torch.Tensor]) -> torch.Tensor:
        x = self._x
        for weight in weights:
            x = torch.nn.functional.silu(x @ weight)
        return x

    def steps(self, seconds: float) -> float:
        """Return the mean seconds of a step, over so long a time."""
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            with torch.cuda.stream(self._stream):
                for _ in range(4):
                    self._graph.replay()
            self._stream.synchronize()
            count += 4
        return (time.perf_counter() - began) / count


def beside(kind: str, pull: Callable[[], object]) -> tuple[float, float]:
    """Return the neighbour's slowdown while updates follow each other, and an update's seconds."""
    neighbour = Neighbour(kind)
    neighbour.steps(0.3)
    alone = neighbour.steps(SECONDS)
    over = threading.Event()
    took: list[float] = []

    def transfer() -> None:
        while not over.is_set():
            began = time.perf_counter()
            pull()
            took.append(time.perf_counter() - began)

    thread = threading.Thread(target=transfer)
    thread.start()
    together = neighbour.steps(SECONDS)
    over.set()
    thread.join()
    return together / alone - 1, sorted(took)[len(took) // 2]
