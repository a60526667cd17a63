"""``syncline conformance``: check an adapter that somebody else wrote, by real updates."""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer

from syncline.errors import SynclineError
from syncline.options import Options

if TYPE_CHECKING:
    from syncline.conformance.report import Report


def conformance(
    target: Annotated[
        str,
        typer.Argument(
            help="module:factory, called as factory(rank, world) -> adapter; "
            "or the name of an entry point of syncline.adapters."
        ),
    ],
    world: Annotated[int, typer.Option(min=1, help="Ranks to make, all in this process.")] = 1,
    base: Annotated[
        Path | None, typer.Option(help="A checkpoint whose configuration the engine's loader needs.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for one update.")] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the conformance suite on an engine's or a trainer's adapter; its contents are overwritten."""
    from syncline.conformance import check, factory_of  # noqa: PLC0415 (imports torch)

    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` would: an adapter in the working directory is found
    options = Options.from_environment(connect_timeout=timeout, update_timeout=timeout)
    try:
        report = check(factory_of(target), world=world, base=base, options=options, subject=target)
    except SynclineError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if json:
        sys.stdout.write(json_format.dumps(report.as_dict()) + "\n")
    else:
        _show(report)
    if not report.ok:
        raise typer.Exit(1)


def _show(report: Report) -> None:
    from rich.console import Console  # noqa: PLC0415 - only for people
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table("check", "outcome", "expected", "found", "s")
    for check in report.checks:
        cells = (check.name, str(check.outcome), check.expected, check.found, f"{check.seconds:.2f}")
        table.add_row(*(Text(cell) for cell in cells))
    Console(highlight=False).print(table)
    outcomes = [str(check.outcome) for check in report.checks]
    told = ", ".join(f"{outcomes.count(name)} {name}" for name in ("passed", "failed", "skipped"))
    typer.echo(f"conformance of {report.kind} {report.subject}: {told}")
