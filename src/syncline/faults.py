"""Fault points: named places where tests, and the chaos suite, make a process die, stall or fail.

A point costs one dictionary look-up when nothing is armed. Names are dotted paths of the step they stand
before, for example ``reader.before_first_byte``. A point is armed in process by `arm`, or for a child process
by the environment: ``SYNCLINE_FAULTS="reader.before_first_byte=kill,writer.put=sleep:2.5"``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from syncline.errors import SynclineError

if TYPE_CHECKING:
    from collections.abc import Iterator

Action = Callable[[], None]


class InjectedFaultError(SynclineError):
    """Raised at a point armed with ``raise``."""


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _parse(point_name: str, spec: str) -> Action:
    kind, _, argument = spec.partition(":")
    if kind == "kill":
        return _kill
    if kind == "sleep":
        seconds = float(argument)
        return lambda: time.sleep(seconds)
    if kind == "raise":

        def fail() -> None:
            raise InjectedFaultError(argument or f"fault injected at {point_name}")

        return fail
    raise SynclineError("unknown fault action", expected="kill, sleep:SECONDS or raise[:TEXT]", found=spec)


def _from_environment() -> dict[str, Action]:
    specs = filter(None, os.environ.get("SYNCLINE_FAULTS", "").split(","))
    pairs = (spec.split("=", 1) for spec in specs)
    return {name: _parse(name, action) for name, action in pairs}


_armed: dict[str, Action] = _from_environment()


def point(name: str) -> None:
    """Run the action armed at ``name``, if any."""
    if _armed and (action := _armed.get(name)) is not None:
        action()


@contextmanager
def arm(name: str, action: Action | str) -> Iterator[None]:
    """Arm ``name`` within the block: a callable, or a specification as in ``SYNCLINE_FAULTS``."""
    _armed[name] = _parse(name, action) if isinstance(action, str) else action
    try:
        yield
    finally:
        _armed.pop(name, None)
