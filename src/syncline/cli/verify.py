"""``syncline verify``: compare dumps with the engine's own load; or list an engine's live tensors."""

from __future__ import annotations

import json as json_format
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from syncline.cli.engines import Engine, Interpreter, Listed, sglang, vllm
from syncline.errors import SynclineError, from_wire, to_wire

_SECONDS = 900.0  # in which an engine starts, learns and answers


def verify(
    directory: Annotated[
        Path,
        typer.Argument(
            help="What `syncline demo --keep DIRECTORY` left: checkpoint/ and dumps/. "
            "With --engine: a checkpoint directory."
        ),
    ],
    engine: Annotated[
        Listed | None,
        typer.Option(help="Start this engine on a checkpoint and list its live tensors (vllm, sglang)."),
    ] = None,
    engine_python: Annotated[
        Path | None,
        typer.Option(help="The Python interpreter that has the engine, if it is not this one."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="With --engine: tensor-parallel size.")] = 1,
    dtype: Annotated[str, typer.Option(help="With --engine: dtype, as the engine takes it.")] = "auto",
    local: Annotated[
        list[str] | None,
        typer.Option(
            help="With --engine: pattern of parameters that no checkpoint tensor fills; may be repeated."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare every dumped tensor, bit by bit, with a fresh load of the checkpoint, cut as each instance is.

    With --engine: list every live tensor as synced (with its checkpoint names), derived or local, and fail on
    any that cannot be explained.
    """
    try:
        if engine is None:
            ok = _verify_dumps(directory, engine_python, as_json=json)
        else:
            request = {"directory": str(directory), "ranks": ranks, "dtype": dtype, "local": local or []}
            ok = _list_live(engine, engine_python, request, as_json=json)
    except SynclineError as error:
        if json:
            sys.stdout.write(json_format.dumps({"error": to_wire(error)}) + "\n")
        typer.echo(f"verify failed: {error}", err=True)
        raise typer.Exit(2) from None
    if not ok:
        raise typer.Exit(1)


# ------------------------------------------------------------------------------------------------ dumps


def _verify_dumps(directory: Path, python: Path | None, *, as_json: bool) -> bool:
    facts = _facts(directory)
    found: dict[str, dict[str, Any]] = {}
    interpreter = vllm(python) if facts.get("engine") == Engine.VLLM else None
    for instance, world in facts["instances"].items():
        if interpreter is None:
            found |= _verify_instance(directory, instance, int(world))
        else:
            found |= _verify_vllm(directory, instance, int(world), interpreter)
    equal = all(not rank["diffs"] and not rank["error"] for rank in found.values())
    if as_json:
        sys.stdout.write(json_format.dumps({"equal": equal, "ranks": found}) + "\n")
    else:
        _show(found, equal=equal)
    return equal


def _facts(directory: Path) -> dict[str, Any]:
    path = directory / "demo.json"
    if not path.is_file():
        raise SynclineError(
            f"{path} is missing",
            hint="give a directory that `syncline demo --keep` left; or a checkpoint, and --engine vllm",
        )
    return json_format.loads(path.read_text())


def _verify_instance(directory: Path, instance: str, world: int) -> dict[str, dict[str, Any]]:
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


def _result(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=300)
    if process.returncode:
        return {
            "tensors": 0,
            "diffs": [],
            "error": errors.strip().splitlines()[-1:] or ["it printed nothing"],
        }
    return json_format.loads(output.splitlines()[-1]) | {"error": []}


def _verify_vllm(
    directory: Path, instance: str, world: int, interpreter: Interpreter
) -> dict[str, dict[str, Any]]:
    request = {
        "engine": Listed.VLLM.value,
        "directory": str(directory / "checkpoint"),
        "ranks": world,
        "dtype": "float32",  # as the demo runs it
        "dumps": str(directory / "dumps"),
        "instance": instance,
    }
    names = [f"instance {instance} rank {rank}" for rank in range(world)]
    try:
        ranks = _ask(interpreter, request)
    except SynclineError as error:
        return {name: {"tensors": 0, "diffs": [], "error": [str(error)]} for name in names}
    return {name: rank | {"error": []} for name, rank in zip(names, ranks, strict=True)}


def _show(found: dict[str, dict[str, Any]], *, equal: bool) -> None:
    from rich.console import Console  # noqa: PLC0415 - only for people
    from rich.table import Table  # noqa: PLC0415

    table = Table("rank", "tensors", "result")
    for name, rank in found.items():
        problems = [*rank["error"], *rank["diffs"]]
        table.add_row(name, str(rank["tensors"]), "\n".join(problems[:5]) or "equal")
    Console(highlight=False).print(table)
    typer.echo(
        "verify: every dumped tensor equals a fresh load" if equal else "verify: there are differences"
    )


# ------------------------------------------------------------------------------------------- live tensors


def _list_live(engine: Listed, python: Path | None, request: dict[str, Any], *, as_json: bool) -> bool:
    """Return whether everything is explained."""
    interpreter = sglang(python) if engine is Listed.SGLANG else vllm(python)
    request = request | {"engine": engine.value}
    try:
        ranks = _ask(interpreter, request)
    except SynclineError as error:
        if as_json:
            told = {"explained": False, "ranks": [], "error": to_wire(error)}
            sys.stdout.write(json_format.dumps(told) + "\n")
        else:
            typer.echo(f"verify: not everything is explained\n{error}")
        return False
    if as_json:
        sys.stdout.write(json_format.dumps({"explained": True, "ranks": ranks, "error": None}) + "\n")
        return True
    for number, rank in enumerate(ranks):
        _show_live(number, rank)
    return True


def _show_live(number: int, rank: dict[str, Any]) -> None:
    statuses = [tensor["status"] for tensor in rank["tensors"].values()]
    for name, tensor in rank["tensors"].items():
        held = tensor["names"]
        of = f" <- {held[0]}" if held else ""
        more = f" and {len(held) - 1} more" if len(held) > 1 else ""
        own = f"; {rank['own'][name]} elements are the engine's own" if name in rank["own"] else ""
        typer.echo(f"{tensor['status']:8} {name} {tensor['dtype']}{tensor['shape']}{of}{more}{own}")
    if rank["unused"]:
        typer.echo(f"checkpoint tensors that the engine does not load: {', '.join(rank['unused'])}")
    told = ", ".join(f"{statuses.count(name)} {name}" for name in ("synced", "derived", "local"))
    ways = ", ".join(f"{count} {way}" for way, count in rank["ways"].items())
    typer.echo(f"verify: rank {number}: {len(statuses)} live tensors: {told}; put in: {ways}")


def _ask(interpreter: Interpreter, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Have one process start an engine and answer; return what each rank answered.

    Raises:
        SynclineError: what it could not explain; or it ended without an answer, with what it printed last.
    """
    from syncline.cli.demo.fleet import Fleet  # noqa: PLC0415 - other commands do not need it

    with tempfile.TemporaryDirectory(prefix="syncline-verify-") as scratch:
        offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with Fleet(Path(scratch), offline, lambda _child, _event: None) as fleet:
            child = fleet.start(
                request["engine"], "syncline.cli.verify_live", json_format.dumps(request), python=interpreter
            )
            (answer,) = fleet.take([child], "answered", _SECONDS)
    if (error := answer.get("error")) is not None:
        raise from_wire(error)
    return answer["ranks"]
