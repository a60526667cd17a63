"""The command line: ``syncline demo``, ``serve``, ``verify``, ``conformance``, ``clean``."""

from __future__ import annotations

import typer

from syncline.cli.clean import clean
from syncline.cli.conformance import conformance
from syncline.cli.demo import demo
from syncline.cli.serve import serve
from syncline.cli.verify import verify

app = typer.Typer(
    name="syncline",
    help="Weight sync at line rate for reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (demo, serve, verify, conformance, clean):
    app.command()(_command)

__all__ = ["app"]
