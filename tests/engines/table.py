"""Print the table of a run of the engine suites: ``python -m tests.engines.table DIRECTORY ENGINE...``.

Ends with 0 only if every case of every named engine ran to its end and all of it holds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tests.engines import rows

if TYPE_CHECKING:
    from collections.abc import Sequence

COLUMNS = ("tensors", "traced", "replayed", "probed", "derived", "local")


def table(found: Sequence[rows.Row]) -> Table:
    """Return the table; what does not hold is said in the last column."""
    made = Table(title="engines after two updates, each against a fresh engine", title_justify="left")
    for name in ("engine", "model", "TP", "dtype"):
        made.add_column(name)
    for name in (*COLUMNS, "bit-equal", "tokens equal", "experts"):
        made.add_column(name, justify="right")
    made.add_column("")
    for row in found:
        case, faults = row.case, row.faults()
        made.add_row(
            case.engine,
            case.model,
            str(case.ranks),
            case.dtype,
            *(str(getattr(row, name)) for name in COLUMNS),
            f"{row.equal}/{row.tensors}",
            f"{row.same}/{row.tokens}",
            row.experts or "-",
            "FAILED" if faults else "ok",
            style="red" if faults else None,
        )
    return made


def main(arguments: list[str] | None = None, console: Console | None = None) -> int:
    """Print, and return the exit status."""
    parser = argparse.ArgumentParser(description="print the table of a run of the engine suites")
    parser.add_argument("directory", type=Path)
    parser.add_argument("engines", nargs="+")
    chosen = parser.parse_args(arguments)
    console = console or Console()
    if console.width < WIDTH and not console.is_terminal:
        console = Console(width=WIDTH, file=console.file)
    found = rows.read(chosen.directory)
    console.print(table(found))
    absent = sorted(set(chosen.engines) - {row.case.engine for row in found})
    failed = [row for row in found if row.faults()]
    for row in failed:
        told = f"FAILED: {row.case}: {'; '.join(row.faults())}"
        console.print(told, style="red", markup=False, soft_wrap=True)
    for engine in absent:
        console.print(f"FAILED: no case of {engine} ran")
    models = {name: {row.case.model for row in found if row.case.engine == name} for name in chosen.engines}
    told = ", ".join(f"{engine}: {len(names)} model families" for engine, names in models.items())
    console.print(f"{len(found) - len(failed)} of {len(found)} cases hold; {told}")
    return 1 if absent or failed or not found else 0


WIDTH = 150

if __name__ == "__main__":
    raise SystemExit(main())
