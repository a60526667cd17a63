"""The test's side of its processes: started, asked, killed, and never left behind."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tests.chaos import roles

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from pathlib import Path

WALL = 30.0  # seconds that no single answer may take
SPAWN = mp.get_context("forkserver")
OPTIONS = {
    "stall": 1.0,
    "lease": 2.0,
    "heartbeat": 0.3,
    "connect_timeout": 10.0,
    "update_timeout": 15.0,
}


class ChildError(Exception):
    """What a process raised; its class and fields are those of the process."""

    def __init__(self, who: str, fields: dict[str, Any]) -> None:
        super().__init__(f"{who} raised {fields['kind']}: {fields['text']}")
        self.kind, self.text = fields["kind"], fields["text"]
        self.rank, self.tensor, self.trace = fields["rank"], fields["tensor"], fields["trace"]


@dataclass
class Pending:
    """An answer to come."""

    child: Child
    number: int

    @property
    def done(self) -> bool:
        self.child.drain()
        return self.number in self.child.answers

    def get(self, wall: float = WALL) -> Any:
        until = time.monotonic() + wall
        while not self.done:
            assert time.monotonic() < until, f"{self.child.name} does not answer within {wall:g} s"
            self.child.listen(until - time.monotonic())
        kind, value = self.child.answers.pop(self.number)
        if kind == "error":
            raise ChildError(self.child.name, value)
        return value

    def error(self, wall: float = WALL) -> ChildError:
        try:
            value = self.get(wall)
        except ChildError as error:
            return error
        raise AssertionError(f"{self.child.name} was expected to raise, and returned {value!r}")


class Child:
    """One process with a role."""

    def __init__(self, role: str, name: str, environment: dict[str, str], arguments: dict[str, Any]) -> None:
        self.role, self.name = role, name
        self.pipe: Connection
        self.pipe, theirs = SPAWN.Pipe()
        target, given = roles.main, (theirs, role, environment, arguments)
        self.process: BaseProcess = SPAWN.Process(target=target, args=given, daemon=True)
        self.process.start()
        theirs.close()
        self.answers: dict[int, tuple[str, Any]] = {}
        self.last = 0
        self.leaving = False
        self.made = Pending(self, 0)

    def ready(self) -> Self:
        self.made.get()
        return self

    def start(self, method: str, *positional: Any, **keywords: Any) -> Pending:
        self.last += 1
        self.pipe.send((self.last, method, positional, keywords))
        return Pending(self, self.last)

    def do(self, method: str, *positional: Any, **keywords: Any) -> Any:
        return self.start(method, *positional, **keywords).get()

    def listen(self, seconds: float) -> None:
        try:
            if self.pipe.poll(max(0.0, seconds)):
                number, kind, value = self.pipe.recv()
                self.answers[number] = (kind, value)
        except (EOFError, OSError):
            raise AssertionError(f"{self.name} is dead") from None

    def drain(self) -> None:
        with suppress(EOFError, OSError):
            while self.pipe.poll(0):
                number, kind, value = self.pipe.recv()
                self.answers[number] = (kind, value)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WALL)

    def wait_dead(self, wall: float = WALL) -> None:
        self.process.join(wall)
        assert self.process.exitcode == -9, f"{self.name}: exit code {self.process.exitcode}"

    def leave(self) -> None:
        if self.process.is_alive() and not self.leaving:
            self.leaving = True
            with suppress(OSError):
                self.start("close")

    def close(self) -> None:
        self.leave()
        self.process.join(8.0)
        if self.process.is_alive():
            self.kill()
        self.pipe.close()


class Fleet:
    """All processes of one test."""

    def __init__(self, root: Path, job: str = "chaos", **options: float | str) -> None:
        self.root, self.job = root, job
        self.options = OPTIONS | options
        self.children: list[Child] = []
        self.environment = {"SYNCLINE_RUN_DIR": str(root), "OMP_NUM_THREADS": "1"}

    def start(
        self, role: str, name: str, *, job: str | None = None, env: dict[str, str] | None = None, **more: Any
    ) -> Child:
        """Start a process without waiting for it; `Child.ready` does."""
        own = more.pop("options", {})
        arguments = {"job": job or self.job, "options": self.options | own} | more
        child = Child(role, name, self.environment | (env or {}), arguments)
        self.children.append(child)
        return child

    def server(self, **more: Any) -> Child:
        return self.start("server", "server", **more)

    def trainer(self, rank: int = 0, world: int = 1, **more: Any) -> Child:
        return self.start("trainer", f"trainer {rank}", rank=rank, world=world, **more)

    def trainers(self, world: int, *, sharded: bool = False, **more: Any) -> list[Child]:
        group = str(self.root.parent / f"group-{len(self.children)}") if sharded else None
        return [self.trainer(rank, world, group=group, **more) for rank in range(world)]

    def reader(self, instance: str = "a", rank: int = 0, world: int = 1, **more: Any) -> Child:
        name = f"reader {instance}{rank}"
        return self.start("reader", name, instance=instance, rank=rank, world=world, **more)

    def readers(self, instance: str, world: int, **more: Any) -> list[Child]:
        return [self.reader(instance, rank, world, **more) for rank in range(world)]

    def close(self) -> None:
        """End readers, then trainers, then servers: nobody has to wait for one that is gone."""
        for role in ("reader", "trainer", "server"):
            leaving = [child for child in self.children if child.role == role]
            for child in leaving:
                child.leave()
            for child in leaving:
                child.close()


def ready(*children: Child) -> None:
    for child in children:
        child.ready()


def every(children: list[Child], method: str, *positional: Any, **keywords: Any) -> list[Any]:
    """Ask all at once; return all answers."""
    pending = [child.start(method, *positional, **keywords) for child in children]
    return [one.get() for one in pending]


def until(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.03)
    return True


def shared_memory() -> set[str]:
    """Return the names of this user's entries in /dev/shm."""
    return {entry.name for entry in os.scandir("/dev/shm") if entry.stat().st_uid == os.geteuid()}
