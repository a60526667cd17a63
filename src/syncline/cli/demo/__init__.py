"""``syncline demo``: the whole path on real weights, on one machine."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from syncline.cli.engines import Engine
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
    engine: Annotated[Engine, typer.Option(help="What the inference instances run.")] = Engine.TRANSFORMERS,
    engine_python: Annotated[
        Path | None,
        typer.Option(help="The Python interpreter that has the engine, if it is not this one."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cuda: a small trainer and its engines, split over two GPUs; cuda:0: on one.")
    ] = "cpu",
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the display.")
    ] = False,
) -> None:
    """Fine-tune SmolLM2 on two FSDP2 ranks and keep two inference instances (TP1, TP3) in sync."""
    from syncline.cli.demo.run import facts, run  # noqa: PLC0415 - the other commands do not need it
    from syncline.cli.demo.screen import Screen  # noqa: PLC0415

    if device != "cpu":
        _on_gpus(device, steps, keep, json=json)
        return
    with tempfile.TemporaryDirectory(prefix="syncline-demo-") as work:
        try:
            with Screen(quiet=json) as screen:
                result = run(cache, Path(work), keep, steps, screen, engine=engine, python=engine_python)
        except SynclineError as error:
            typer.echo(f"demo failed: {error}", err=True)
            raise typer.Exit(1) from None
    if json:
        sys.stdout.write(msgspec.json.encode(facts(result)).decode() + "\n")
        return
    typer.echo(result.last_line)


def _on_gpus(device: str, steps: int, keep: Path | None, *, json: bool) -> None:
    """Run the demo of GPUs; it needs neither Transformers nor a checkpoint."""
    from syncline.cli.demo import gpu  # noqa: PLC0415 - the other commands do not need it
    from syncline.options import Options  # noqa: PLC0415

    transport = Options.from_environment().transport
    with tempfile.TemporaryDirectory(prefix="syncline-demo-") as work:
        try:
            result = gpu.run(
                Path(work), steps, device, lambda line: None if json else typer.echo(line), transport
            )
        except SynclineError as error:
            typer.echo(f"demo failed: {error}", err=True)
            raise typer.Exit(1) from None
    found = msgspec.json.encode(result.facts())
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"demo-{result.device}-{result.mode}.json").write_bytes(found)
    if json:
        sys.stdout.write(found.decode() + "\n")
        return
    typer.echo(result.last_line)
