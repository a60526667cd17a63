"""``syncline demo``: the whole path on real weights, on one machine."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from syncline.errors import SynclineError


def demo(
    keep: Annotated[
        Path | None,
        typer.Option(help="Leave the trainer's checkpoint and a raw dump of every reader rank there."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps; each makes a version.")] = 4,
    cache: Annotated[
        Path, typer.Option(help="Directory that keeps the prepared model between runs.")
    ] = Path(),
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the display.")
    ] = False,
) -> None:
    """Fine-tune SmolLM2 on two FSDP2 ranks and keep two inference instances (TP1, TP3) in sync."""
    from syncline.cli.demo.run import facts, run  # noqa: PLC0415 - the other commands do not need it
    from syncline.cli.demo.screen import Screen  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="syncline-demo-") as work:
        try:
            with Screen(quiet=json) as screen:
                result = run(cache, Path(work), keep, steps, screen)
        except SynclineError as error:
            typer.echo(f"demo failed: {error}", err=True)
            raise typer.Exit(1) from None
    if json:
        sys.stdout.write(msgspec.json.encode(facts(result)).decode() + "\n")
        return
    typer.echo(result.last_line)
