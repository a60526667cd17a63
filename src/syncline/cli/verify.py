"""``syncline verify``: compare dumps of live parameters with a checkpoint, by the engine's own loader."""

from __future__ import annotations

import json as json_format
import subprocess
import sys
import tempfile
from pathlib import Path  # noqa: TC003 - typer reads the annotations at run time
from typing import Annotated

import typer


def verify(
    directory: Annotated[
        Path, typer.Argument(help="What `syncline demo --keep DIRECTORY` left: checkpoint/ and dumps/.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Load the checkpoint afresh, cut as each instance is, and compare every dumped tensor bit by bit."""
    facts = _facts(directory)
    found: dict[str, dict[str, object]] = {}
    for instance, world in facts["instances"].items():
        found |= _verify_instance(directory, instance, int(world))
    equal = all(not rank["diffs"] and not rank["error"] for rank in found.values())
    if json:
        sys.stdout.write(json_format.dumps({"equal": equal, "ranks": found}) + "\n")
    else:
        _show(found, equal=equal)
    if not equal:
        raise typer.Exit(1)


def _facts(directory: Path) -> dict[str, dict[str, int]]:
    path = directory / "demo.json"
    if not path.is_file():
        typer.echo(f"{path} is missing: give a directory that `syncline demo --keep` left", err=True)
        raise typer.Exit(2)
    return json_format.loads(path.read_text())


def _verify_instance(directory: Path, instance: str, world: int) -> dict[str, dict[str, object]]:
    """Run one process a rank, since loading a sharded model takes all of them."""
    with tempfile.TemporaryDirectory(prefix="syncline-verify-") as scratch:
        started = []
        for rank in range(world):
            command = [sys.executable, "-m", "syncline.cli.verify_rank", str(directory), instance, str(rank)]
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [*command, str(world), f"{scratch}/store"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.append((f"instance {instance} rank {rank}", process))
        return {name: _result(process) for name, process in started}


def _result(process: subprocess.Popen[str]) -> dict[str, object]:
    output, errors = process.communicate(timeout=300)
    if process.returncode:
        return {
            "tensors": 0,
            "diffs": [],
            "error": errors.strip().splitlines()[-1:] or ["it printed nothing"],
        }
    return json_format.loads(output.splitlines()[-1]) | {"error": []}


def _show(found: dict[str, dict[str, object]], *, equal: bool) -> None:
    from rich.console import Console  # noqa: PLC0415 - only for people
    from rich.table import Table  # noqa: PLC0415

    table = Table("rank", "tensors", "result")
    for name, rank in found.items():
        problems = [*rank["error"], *rank["diffs"]]  # pyright: ignore[reportGeneralTypeIssues]
        table.add_row(name, str(rank["tensors"]), "\n".join(problems[:5]) or "equal")
    Console(highlight=False).print(table)
    typer.echo(
        "verify: every dumped tensor equals a fresh load" if equal else "verify: there are differences"
    )
