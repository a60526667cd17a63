"""``syncline clean``: remove the run directories of dead jobs."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from syncline.errors import SynclineError
from syncline.meta.clean import clean as clean_jobs


def clean(
    job: Annotated[
        str | None, typer.Option(help="Only this job; by default all dead jobs of this user.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Remove what dead jobs of this user left behind; never a live job's or another user's."""
    try:
        report = clean_jobs(job)
    except SynclineError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        typer.echo(f"{report.root}: {len(report.removed)} removed")
        for name in report.removed:
            typer.echo(f"  removed  {name}")
        for name, locks in report.live.items():
            typer.echo(f"  live     {name} ({', '.join(locks)})")
        for name, reason in report.refused.items():
            typer.echo(f"  refused  {name}: {reason}")
    if job is not None and job not in report.removed and (job in report.live or job in report.refused):
        raise typer.Exit(1)
