"""``syncline serve``: a MetaServer of its own, which outlives the trainers of its job."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from syncline.errors import SynclineError
from syncline.meta.server import MetaServer

if TYPE_CHECKING:
    from types import FrameType

_LOOK = 0.1


def serve(
    job: Annotated[str, typer.Argument(help="Name of the job.")],
    bind: Annotated[
        str, typer.Option(help="Address or host name to listen at; 0.0.0.0 or :: for all.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port; 0: the former server's if free, else any.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object once it serves.")] = False,
) -> None:
    """Serve one job until SIGINT or SIGTERM; clients of a server before it refill this one."""
    stopping: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        stopping.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        with MetaServer(job, bind, port) as server:
            _announce(server, as_json=json)
            while not stopping:
                if server.wait(_LOOK):
                    break
    except SynclineError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _announce(server: MetaServer, *, as_json: bool) -> None:
    facts = {"job": server.job, "endpoint": server.endpoint, "boot": server.boot, "pid": os.getpid()}
    if as_json:
        sys.stdout.write(msgspec.json.encode(facts).decode() + "\n")
    else:
        sys.stdout.write(f"job {server.job}: MetaServer boot {server.boot} at {server.endpoint}\n")
    sys.stdout.flush()
