"""The whole path on one host against libc's ``memcpy``: ``python -m benchmarks.host [--json] [--quick]``.

Two FSDP2 ranks publish to one instance of two tensor-parallel ranks, one copy thread each, all warm. The
baseline is one ``memcpy`` of each reader's bytes between two warm private buffers, both readers at once,
from the first one's start to the last one's end. It is taken anew before every measured update, and a ratio
is the median over rounds of one measurement and the baseline before it, so that other load on the machine
hits both alike.

    copy_ratio         baseline / transfer (first reader's start to last reader's end), no proof
    moe_copy_ratio     the same for 18,000 expert matrices
    source_ratio       the writers' digests, both at once / baseline
    fused_ratio        transfer with digests, while writers rest / baseline
    delivered_ratio    from `publish` to the commit, digests at both ends / baseline
    installed_ratio    the same, and everything read once more
    publish_ms         of the call
    p95_over_median    of the updates counted in ``updates``, from `publish` to commit
    rss_growth_mib     of the worst process from update 20 to the last: private memory and arenas; likewise
                       fd_growth and segment_growth
    reader_extra_mib   highest private memory beyond that before the reader was made, model and libraries
                       loaded; from the first update on
    writer_extra_mib   highest memory beyond that before, while the parameters move into the arena, to be
                       compared with writer_largest_mib; and afterwards: writer_after_mib
    rebind_ms          a changed binding of 20,000 tensors
    import_s           of syncline, beyond torch
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks import importing, models, rebinding
from benchmarks.process import MIB, PrivatePeak
from benchmarks.ranks import Fleet, span

BUDGETS: dict[str, tuple[str, float]] = {
    "copy_ratio": (">=", 0.95),
    "moe_copy_ratio": (">=", 0.85),
    "source_ratio": ("<=", 0.75),
    "fused_ratio": ("<=", 1.4),
    "delivered_ratio": ("<=", 2.3),
    "publish_ms": ("<", 1.0),
    "rss_growth_mib": ("<=", 4.0),
    "fd_growth": ("<=", 0),
    "segment_growth": ("<=", 0),
    "reader_extra_mib": ("<", 64.0),
    "rebind_ms": ("<=", 10.0),
    "import_s": ("<=", 0.3),
}


@dataclass
class Rounds:
    """Ratios and milliseconds by what was measured."""

    ratios: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float, baseline: float) -> None:
        """Note one measurement and the baseline before it."""
        self.seconds.setdefault(name, []).append(seconds)
        self.ratios.setdefault(name, []).append(seconds / baseline)

    def ratio(self, name: str) -> float:
        """Return the median of measurement / baseline."""
        return statistics.median(self.ratios[name])

    def milliseconds(self) -> dict[str, float]:
        """Return the median of each measurement."""
        return {f"{name}_ms": 1e3 * statistics.median(took) for name, took in self.seconds.items()}


def transfer(fleet: Fleet, rounds: Rounds, level: str, name: str) -> None:
    """Measure the source pass, then the transfer by itself."""
    baseline = fleet.memcpy()
    fleet.publish()
    rounds.add("source", span(fleet.all(fleet.writers, "published")), baseline)
    baseline = fleet.memcpy()
    fleet.all(fleet.readers[:1], "update", fleet.number, level)
    rounds.seconds.setdefault("memcpy", []).append(baseline)
    rounds.add(name, span(fleet.all(fleet.readers, "transferred")), baseline)


def update(fleet: Fleet, level: str) -> tuple[float, float]:
    """Publish to an instance that waits; return seconds from publish to commit, and those of `publish`."""
    controller = fleet.readers[0]
    controller.tell("update", fleet.number + 1, level)
    calls = fleet.publish()
    committed, _report = controller.hear()
    return committed - min(began for began, _ in calls), max(seconds for _, seconds in calls)


def compare(fleet: Fleet, count: int) -> Rounds:
    """Interleave everything that has a ratio, ``count`` times."""
    rounds = Rounds()
    for _ in range(count):
        transfer(fleet, rounds, "none", "copy")
        transfer(fleet, rounds, "delivered", "fused")
        for level in ("delivered", "installed"):
            baseline = fleet.memcpy()
            rounds.add(level, update(fleet, level)[0], baseline)
    return rounds


def first_update(fleet: Fleet) -> float:
    """Update for the first time; return the readers' highest extra memory in bytes."""
    resident = fleet.all(fleet.readers, "resident")
    before = {one["pid"]: one["before"] for one in resident}
    with PrivatePeak(*before) as peak:
        for level in ("delivered", "none", "installed", "delivered"):
            update(fleet, level)
    return max(peak.highest[pid] - before[pid] for pid in before)


def endure(fleet: Fleet, count: int, settle: int) -> dict[str, float]:
    """Update ``count`` times; compare what processes hold after ``settle`` updates and at the end."""
    took, called = [], []
    early: list[dict[str, int]] = []
    for done in range(count):
        if done == settle:
            early = fleet.all(fleet.children, "held")
        seconds, call = update(fleet, "delivered")
        took.append(seconds)
        called.append(call)
    late = fleet.all(fleet.children, "held")
    grown = {
        key: max(after[key] - before[key] for before, after in zip(early, late, strict=True))
        for key in early[0]
    }
    middle = statistics.median(took)
    return {
        "p95_over_median": statistics.quantiles(took, n=20)[-1] / middle,
        "update_ms": 1e3 * middle,
        "publish_ms": 1e3 * statistics.median(called),
        "rss_growth_mib": grown["memory"] / MIB,
        "fd_growth": grown["descriptors"],
        "segment_growth": grown["segments"],
        "updates": count,
    }


def dense(rounds: int, updates: int) -> dict[str, float]:
    """Measure the Llama."""
    with Fleet(models.llama()) as fleet:
        moved = fleet.all(fleet.writers, "moving")
        extra = first_update(fleet)
        fleet.memcpy()
        found = compare(fleet, rounds)
        figures = endure(fleet, updates, min(20, updates // 2))
        libraries = max(one["libraries"] for one in fleet.all(fleet.readers, "resident"))
        nbytes = sum(one["nbytes"] for one in fleet.all(fleet.readers, "resident"))
    memcpy = statistics.median(found.seconds["memcpy"])
    return {
        "copy_ratio": 1 / found.ratio("copy"),
        **{f"{name}_ratio": found.ratio(name) for name in ("source", "fused", "delivered", "installed")},
        **figures,
        "reader_extra_mib": extra / MIB,
        "reader_libraries_mib": libraries / MIB,
        "writer_extra_mib": max(one["peak"] for one in moved) / MIB,
        "writer_largest_mib": max(one["largest"] for one in moved) / MIB,
        "writer_after_mib": max(one["after"] for one in moved) / MIB,
        "model_mib": nbytes / MIB,
        "memcpy_gb_per_s": nbytes / memcpy / 1e9,
        **found.milliseconds(),
    }


def sparse(rounds: int) -> dict[str, float]:
    """Measure the experts."""
    found = Rounds()
    with Fleet(models.experts()) as fleet:
        first_update(fleet)
        tensors = fleet.all(fleet.writers, "moving")[0]["tensors"]
        fleet.memcpy()
        for _ in range(rounds):
            transfer(fleet, found, "none", "copy")
            baseline = fleet.memcpy()
            found.add("delivered", update(fleet, "delivered")[0], baseline)
    return {
        "moe_copy_ratio": 1 / found.ratio("copy"),
        "moe_delivered_ratio": found.ratio("delivered"),
        "moe_tensors": tensors,
        **{f"moe_{name}": value for name, value in found.milliseconds().items()},
    }


def measure(*, quick: bool) -> dict[str, Any]:
    """Run everything; ``quick`` takes fewer rounds and updates."""
    began = time.monotonic()
    figures = dense(rounds=3 if quick else 15, updates=20 if quick else 200)
    figures |= sparse(rounds=3 if quick else 15)
    figures["rebind_ms"] = rebinding.milliseconds()
    figures["import_s"] = importing.seconds(3 if quick else 11)
    figures["load_average"] = os.getloadavg()[0]
    figures["took_s"] = time.monotonic() - began
    return {name: round(value, 3) for name, value in figures.items()}


def show(figures: dict[str, Any]) -> None:
    """Print the figures that have a budget first, then the rest."""
    from rich.console import Console  # noqa: PLC0415 - only for people
    from rich.table import Table  # noqa: PLC0415

    table = Table("figure", "measured", "budget", title="syncline on one host")
    budgets = {name: f"{sign} {limit:g}" for name, (sign, limit) in BUDGETS.items()}
    budgets["writer_extra_mib"] = f"<= {figures['writer_largest_mib']:g}, the largest tensor"
    for name in [*budgets, *(name for name in figures if name not in budgets)]:
        table.add_row(name, f"{figures[name]:g}", budgets.get(name, ""))
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description="the whole path on one host against memcpy")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and updates: to see that it runs")
    options = parser.parse_args()
    figures = measure(quick=options.quick)
    if options.json:
        print(json.dumps(figures))
    else:
        show(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
