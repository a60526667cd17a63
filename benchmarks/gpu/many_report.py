"""What the many-to-many case says: one line for each layout and each way of moving it."""

from __future__ import annotations

import datetime as dt
import importlib
import importlib.util
import json
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

COLUMNS = (
    ("layout", "layout"),
    ("layers", "layers"),
    ("way", "way"),
    ("bytes", "MB"),
    ("ms", "ms"),
    ("gbs", "GB/s"),
    ("bound_gbs", "bound GB/s"),
    ("ratio", "ratio"),
    ("ingress_balance", "busiest in / mean"),
    ("egress_balance", "busiest out / mean"),
    ("link_balance", "busiest link / mean"),
    ("predicted_ms", "predicted ms"),
    ("error_percent", "error %"),
    ("exact", "bit-exact"),
)
_WIDTH = 170
_SPEEDS = ("ms", "gbs", "bound_gbs", "ratio", "predicted_ms", "error_percent")


@dataclass
class Report:
    """Lines, and what holds for all of them."""

    fake: bool
    facts: dict[str, Any]
    lines: list[dict[str, Any]] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    not_made: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def leave(self, what: str, why: str = "", layout: str = "") -> None:
        """Note a kind of run that is not made, of one layout or of all."""
        self.not_made.setdefault((what, why), []).extend([layout] if layout else [])

    def line(self, **figures: Any) -> None:
        """Add a line, and print it; fake devices have no speeds."""
        kept = {k: v for k, v in figures.items() if not (self.fake and k in _SPEEDS)}
        self.lines.append(kept)
        print(", ".join(f"{k} {_short(v)}" for k, v in kept.items() if not isinstance(v, dict)), flush=True)

    @property
    def exact(self) -> tuple[int, int]:
        """Tensors that arrived bit for bit, and tensors that were compared."""
        pairs = [one["exact"] for one in self.lines if "exact" in one]
        return sum(good for good, _ in pairs), sum(count for _, count in pairs)

    @property
    def good(self) -> bool:
        """Whether all that was asked for arrived, bit for bit."""
        right, count = self.exact
        asked = ("part ours", "") not in self.not_made
        return right == count and not self.failed and (count > 0 or not asked)

    def heading(self) -> list[str]:
        """Return what stands above the table."""
        f = self.facts
        kind = "FAKE devices on CPU: who moves what is real, and speeds are not given" if self.fake else ""
        return [
            f"GPUs of one host, many to many, {f['date']}",
            kind or f"{f['gpus']}, driver's CUDA {f['cuda']}",
            f"torch {f['torch']}, Triton {f['triton']}, Python {f['python']}",
            f"`{f['command']}`",
            "bit-exact: {} of {}".format(*self.exact),
            "Not made: " + ("; ".join(_left(*one) for one in self.not_made.items()) or "nothing") + ".",
            *(f"FAILED: {one}" for one in self.failed),
            *([] if self.fake else [f"One copy alone: {_rates(self.rates)}."]),
        ]

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Return the titles and cells of the table, without columns that are empty."""
        seen = {key for one in self.lines for key in one} | {"exact"}
        used = [(key, title) for key, title in COLUMNS if key in seen]
        cells = [[_cell(key, one) for key, _ in used] for one in self.lines]
        return [title for _, title in used], cells

    def text(self) -> str:
        """Return the report as Markdown."""
        title, *rest = self.heading()
        titles, cells = self.rows()
        rows = [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *cells)]
        return "\n".join([f"# {title}", "", *(f"{line}\n" for line in rest), *rows, "", *_ports(self.lines)])

    def show(self) -> None:
        """Print the table: by rich, where it is installed."""
        if importlib.util.find_spec("rich") is None:
            print(self.text())
            return
        from rich.console import Console  # noqa: PLC0415 - only for people
        from rich.table import Table  # noqa: PLC0415 - as above

        title, *rest = self.heading()
        titles, cells = self.rows()
        table = Table(*titles, title=title)
        for row in cells:
            table.add_row(*row)
        console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
        console.print(table)
        for line in rest:
            console.print(line, highlight=False)

    def save(self, directory: str) -> None:
        """Write the report as Markdown and JSON."""
        place = Path(directory)
        place.mkdir(parents=True, exist_ok=True)
        name = f"gpu-many-{'fake-' if self.fake else ''}{self.facts['date']}"
        good, count = self.exact
        found = {
            **self.facts,
            "fake": self.fake,
            "bit_exact": good,
            "cases": count,
            "rates_gbs": {k: v / 1e9 for k, v in self.rates.items()},
            "not_made": [_left(*one) for one in self.not_made.items()],
            "failed": self.failed,
            "lines": self.lines,
        }
        (place / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (place / f"{name}.md").write_text(self.text(), encoding="utf-8")


def facts(given: list[str], *, fake: bool) -> dict[str, Any]:
    """Return date, hardware, versions and command; the place of the results is left out of that."""
    kept = [a for a in given if "/" not in a and a != "--out"]
    found = importlib.util.find_spec("triton")
    triton = importlib.import_module("triton").__version__ if found else "none"
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "gpus": "none" if fake else f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}",
        "torch": torch.__version__,
        "triton": triton,
        "cuda": str(torch.version.cuda),
        "python": ".".join(map(str, sys.version_info[:3])),
        "system": platform.system(),
        "command": " ".join(["python -m benchmarks.gpu.many", *kept]),
    }


def _ports(lines: list[dict[str, Any]]) -> list[str]:
    """Return, as Markdown, what every GPU's ports gave in the bound."""
    out = {}
    for one in lines:
        for side in ("ingress", "egress"):
            ports = one.get(f"bound_{side}")
            if ports:
                listed = ", ".join(f"GPU {gpu}: {rate / 1e9:.0f}" for gpu, rate in sorted(ports.items()))
                out[f"- {one['layout']}: {side} of the bound in GB/s: {listed}"] = None
    return [*out, ""] if out else []


def _rates(rates: dict[str, float]) -> str:
    names = {"link": "between two GPUs", "local": "within one"}
    return ", ".join(f"{names[k]} {v / 1e9:.0f} GB/s" for k, v in rates.items())


def _cell(key: str, line: dict[str, Any]) -> str:
    value = line.get(key)
    if key == "exact":
        good, count = value or line["arrived"]
        return f"{good} of {count}"
    if value is None:
        return ""
    if key == "bytes":
        return f"{value / 1e6:.3f}" if value < 1e6 else f"{value / 1e6:.0f}"
    if key in {"ms", "predicted_ms"}:
        return f"{value:.2f}"
    return _short(value)


def _left(what: tuple[str, str], layouts: list[str]) -> str:
    """Return in words what was not made, and why."""
    many = f"{len(layouts)} layouts" if len(layouts) > 1 else "".join(layouts)
    return what[0] + (f" for {many}" if many else "") + (f" ({what[1]})" if what[1] else "")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
