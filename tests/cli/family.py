"""A child of a `Fleet`, with a child of its own: ``python -m tests.cli.family [stubborn|fails]``."""

from __future__ import annotations

import signal
import subprocess
import sys

from syncline.cli.demo.wire import Events, commands


def main() -> None:
    """Tell the child's process id, then wait for the word to stop."""
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    stubborn = what == "stubborn"
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code if stubborn else "import time; time.sleep(600)"])
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Events().tell("ready", child=child.pid)
    if what == "fails":
        print("it went wrong", flush=True)
        sys.exit(3)
    for command in commands():
        if command["do"] == "stop" and not stubborn:
            return


if __name__ == "__main__":
    main()
