"""How the demo's processes talk to it: JSON lines, events one way and commands the other."""

from __future__ import annotations

import os
import sys
import threading
from typing import IO, TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

EVENTS_VARIABLE = "SYNCLINE_DEMO_EVENTS"
"""Names the descriptor that a child writes its events to: libraries may print what they like elsewhere."""


class Events:
    """A child's way to tell what happened."""

    def __init__(self) -> None:
        self._file: IO[bytes] = os.fdopen(int(os.environ[EVENTS_VARIABLE]), "wb", buffering=0)
        self._lock = threading.Lock()

    def tell(self, kind: str, **fields: Any) -> None:
        """Send one event."""
        with self._lock:
            self._file.write(msgspec.json.encode({"kind": kind, **fields}) + b"\n")


def commands() -> Iterator[dict[str, Any]]:
    """Yield the commands that come on standard input, until it closes."""
    for line in sys.stdin.buffer:
        yield msgspec.json.decode(line)
