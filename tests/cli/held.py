"""A command with a `Fleet`, to be sent a signal: ``python -m tests.cli.held DIRECTORY``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from syncline.cli.demo.fleet import Fleet


def main() -> None:
    """Start a child, print its process id and that of its child, and wait."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's child would ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as would a child of nohup this one
    with Fleet(Path(sys.argv[1]), {}, lambda _child, _event: None) as fleet:
        child = fleet.start("child", "tests.cli.family")
        (ready,) = fleet.take([child], "ready", 60.0)
        print(child.process.pid, ready["child"], flush=True)
        fleet.take([child], "never told", 600.0)


if __name__ == "__main__":
    main()
