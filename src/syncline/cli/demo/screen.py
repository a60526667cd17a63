"""What the demo shows while it runs: a table of versions, then what the instances say."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from types import TracebackType

_REFRESH = 8  # frames a second
_COLUMNS = ("version", "of", "MB", "pause", "move", "proof", "commit", "GB/s", "memcpy", "covered", "level")


class Screen:
    """A live display on a terminal; plain lines where there is none, nothing with ``quiet``."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(quiet=quiet, highlight=False)
        self._lock = threading.Lock()
        self._status = "starting"
        self._rows: list[tuple[str, ...]] = []
        self._losses: dict[int, float] = {}
        self._answers: list[tuple[str, str, str]] = []
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.quiet:
            self._live = Live(
                get_renderable=self._draw, console=self._console, refresh_per_second=_REFRESH, transient=True
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            if error is None:
                self._console.print(self._table())
                self._console.print(self._said())

    def status(self, text: str) -> None:
        """Say what is being waited for."""
        with self._lock:
            self._status = text
        if self._live is None:
            self._console.print(f"- {text}")

    def published(self, event: dict[str, Any]) -> None:
        """Note what the trainer said of a version."""
        with self._lock:
            self._losses[event["version"]] = event["loss"]

    def updated(self, report: dict[str, Any]) -> None:
        """Add a row for one instance at one version."""
        seconds = report["seconds"]
        row = (
            report["key"],
            report["instance"],
            f"{report['nbytes'] / 1e6:.1f}",
            _ms(seconds.get("pause", 0.0)),
            _ms(slowest(report, "transfer_s")),
            _ms(slowest(report, "proof_s")),
            _ms(seconds.get("commit", 0.0) + seconds.get("apply", 0.0) + seconds.get("resume", 0.0)),
            f"{_rate(report):.2f}",
            f"{report['memcpy_ratio']:.2f}",
            f"{100 * report['coverage']:.2f}%",
            report["level"],
        )
        with self._lock:
            self._rows.append(row)
        if self._live is None:
            self._console.print(
                "  " + ", ".join(f"{k} {v}" for k, v in zip(_COLUMNS, row, strict=True)), soft_wrap=True
            )

    def answered(self, instance: str, when: str, text: str) -> None:
        """Note what an instance said."""
        with self._lock:
            self._answers.append((instance, when, text))
        if self._live is None:
            self._console.print(f"  instance {instance}, {when}: {text}")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text)

    def _draw(self) -> Group:
        with self._lock:
            return Group(self._table(), self._said(), Spinner("dots", Text(self._status)))

    def _table(self) -> Table:
        table = Table(
            title="versions, as each instance received them in place (times in ms)",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for name in _COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        if self._losses:
            losses = ", ".join(f"{version}: {loss:.2f}" for version, loss in sorted(self._losses.items()))
            table.caption = f"trainer's loss before each version: {losses}"
        return table

    def _said(self) -> Panel:
        lines = Text()
        for instance, when, text in self._answers:
            lines.append(f"instance {instance}, {when}: ", style="bold")
            lines.append(text + "\n")
        return Panel(lines or Text("..."), title="what they say", title_align="left")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def slowest(report: dict[str, Any], name: str) -> float:
    """Return the largest of one figure over the ranks of an update."""
    return max((float(rank.get(name, 0.0)) for rank in report["ranks"]), default=0.0)


def _rate(report: dict[str, Any]) -> float:
    seconds = slowest(report, "transfer_s")
    return report["nbytes"] / seconds / 1e9 if seconds else 0.0
