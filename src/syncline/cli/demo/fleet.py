"""The demo's child processes: started, told, listened to, and never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

import msgspec

from syncline.cli.demo.wire import EVENTS_VARIABLE
from syncline.errors import DeadlineError, SynclineError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import FrameType, TracebackType

    from syncline.cli.engines import Interpreter

_TAIL = 25  # lines of a failed child's output that are shown
_GRACE = 10.0  # seconds to end by itself after being told to
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TERMINATING = 3.0  # seconds to end by itself after being sent a signal


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    """End this process by way of the blocks that it is in; a second signal would cut that short."""
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


@dataclass(eq=False)
class Child:
    """One process, leader of a group of its own: whatever it starts ends with it.

    Attributes:
        name: as messages call it.
        log: file with everything that it printed.
        events: what it told and nobody has taken yet.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    events: deque[dict[str, Any]] = field(default_factory=deque)

    def tell(self, **command: Any) -> None:
        """Send a command."""
        if self.process.stdin is not None:
            self.process.stdin.write(msgspec.json.encode(command) + b"\n")
            self.process.stdin.flush()

    def tail(self) -> str:
        """Return the last lines that it printed."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-_TAIL:])

    def send(self, number: signal.Signals | Literal[0]) -> bool:
        """Send a signal to the process and all that it started; return whether there are any."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def close(self, until: float) -> None:
        """End it and all that it started: by its own doing until a time, then by signals."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until - time.monotonic()))
        until = time.monotonic() + _TERMINATING
        left = self.send(signal.SIGTERM)
        while left and time.monotonic() < until:
            self.process.poll()  # until its status is taken, it counts as one of the group
            time.sleep(0.02)
            left = self.send(0)
        if left:
            self.send(signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


class Fleet:
    """All children of one run. Leaving the block ends them, and so does what ends this process by a signal.

    Args:
        directory: for logs.
        environment: added to this process's own.
        on_event: called with (child, event) for every event, from reader threads, before anybody takes it.
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        on_event: Callable[[Child, dict[str, Any]], None],
    ) -> None:
        self._directory, self._environment, self._on_event = directory, dict(environment), on_event
        self._changed = threading.Condition()
        self._handlers: dict[signal.Signals, Any] = {}
        self.children: list[Child] = []

    def start(self, name: str, module: str, *arguments: object, python: Interpreter | None = None) -> Child:
        """Start ``python -m module arguments``, with this process's interpreter or another one."""
        command = [sys.executable] if python is None else python.command
        environment = self._environment if python is None else self._environment | python.environment
        read_end, write_end = os.pipe()
        log = self._directory / f"{name.replace(' ', '-')}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [*command, "-m", module, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                start_new_session=True,
                env=os.environ | environment | {EVENTS_VARIABLE: str(write_end)},
            )
        os.close(write_end)
        child = Child(name, process, log)
        self.children.append(child)
        threading.Thread(target=self._listen, args=(child, read_end), daemon=True).start()
        return child

    def take(self, children: Sequence[Child], kind: str, deadline: float) -> list[dict[str, Any]]:
        """Wait until each child has told an event of this kind; return them, in the order of the children.

        Raises:
            SynclineError: a child ended early; with what it printed last.
            DeadlineError: names the children that are late.
        """
        until = time.monotonic() + deadline
        found: dict[str, dict[str, Any]] = {}
        with self._changed:
            while True:
                for child in children:
                    if child.name not in found and (event := _pop(child, kind)) is not None:
                        found[child.name] = event
                if len(found) == len(children):
                    return [found[child.name] for child in children]
                self._check_alive()
                if time.monotonic() >= until:
                    late = [child.name for child in children if child.name not in found]
                    raise DeadlineError(f"waited {deadline:g} s in vain for {kind!r} of {', '.join(late)}")
                self._changed.wait(0.2)

    def tell(self, children: Sequence[Child], **command: Any) -> None:
        """Send one command to several children."""
        for child in children:
            child.tell(**command)

    def close(self) -> None:
        """End all children: by word, then by force, and only our own."""
        for child in self.children:
            with contextlib.suppress(OSError):
                child.tell(do="stop")
        self._end(_GRACE)

    def _end(self, grace: float) -> None:
        until = time.monotonic() + grace
        for child in self.children:
            child.close(until)

    def dismiss(self, child: Child) -> None:
        """End one child, which is no longer waited for."""
        self.children.remove(child)
        child.close(time.monotonic() + _GRACE)

    def __enter__(self) -> Self:
        for number in _ENDING:
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN:  # as nohup has it
                self._handlers[number] = handler
                signal.signal(number, _leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)
        try:
            if error is not None:
                for child in self.children:
                    child.send(signal.SIGTERM)
                self._end(_TERMINATING)
            else:
                self.close()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers.clear()

    def _check_alive(self) -> None:
        for child in self.children:
            code = child.process.poll()
            if code is not None:
                raise SynclineError(
                    f"{child.name} ended early", found=f"exit code {code}; it printed last:\n{child.tail()}"
                )

    def _listen(self, child: Child, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as lines:
            for line in lines:
                event = msgspec.json.decode(line)
                self._on_event(child, event)
                with self._changed:
                    child.events.append(event)
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


def _pop(child: Child, kind: str) -> dict[str, Any] | None:
    for event in child.events:
        if event["kind"] == kind:
            child.events.remove(event)
            return event
    return None
