"""How long it takes to trace a loader: ``python -m benchmarks.tracing [NAMES]`` prints seconds of CPU.

The loader is one of stacked experts, as inference engines have it: each expert's gate, up and down
projections are cut for a tensor-parallel rank, and the first two are put side by side.
"""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from syncline.layout.loader import LoaderTrace, Spec, trace_loader

if TYPE_CHECKING:
    from collections.abc import Iterable

HIDDEN, INNER, EXPERTS, RANKS, RANK = 64, 32, 256, 2, 1
_NAME = re.compile(r"layers\.(\d+)\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def experts(names: int) -> tuple[dict[str, torch.Tensor], Any, dict[str, Spec]]:
    """Return live tensors, their loader, and the specs of about so many checkpoint tensors."""
    live: dict[str, torch.Tensor] = {}
    checkpoint: dict[str, Spec] = {}
    half = INNER // RANKS
    shards = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    for layer in range(-(-names // (3 * EXPERTS))):
        shapes = {"w13": (EXPERTS, 2 * half, HIDDEN), "w2": (EXPERTS, HIDDEN, half)}
        for kind, shape in shapes.items():
            live[f"layers.{layer}.{kind}"] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for expert in range(EXPERTS):
            for kind, shape in shards.items():
                checkpoint[f"layers.{layer}.experts.{expert}.{kind}_proj.weight"] = Spec(shape, "bfloat16")

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            found = _NAME.fullmatch(name)
            if found is None:
                continue
            layer, expert, kind = found[1], int(found[2]), found[3]
            into = live[f"layers.{layer}.{'w2' if kind == 'down' else 'w13'}"].data[expert]
            if kind != "down":
                into = into.narrow(0, half * (kind == "up"), half)
            part = weight.narrow(1 if kind == "down" else 0, RANK * half, half)
            if into.shape == part.shape:
                into.copy_(part)

    return live, load, checkpoint


def measure(names: int) -> tuple[int, float, LoaderTrace]:
    """Return the number of names, seconds of CPU that their trace took, and the trace."""
    live, load, checkpoint = experts(names)
    began = time.process_time()
    trace = trace_loader(live, load, checkpoint)
    return len(checkpoint), time.process_time() - began, trace


def main() -> None:
    """Print one line for a tenth of the names, to warm up and to compare with, and one for all."""
    torch.set_num_threads(1)
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    for count in (wanted // 10, wanted):
        names, seconds, trace = measure(count)
        writes = sum(map(len, trace.writes.values()))
        print(
            f"trace: {names} names, {writes} writes, {seconds:.1f} s, {1e6 * seconds / names:.0f} us a name"
        )


if __name__ == "__main__":
    main()
