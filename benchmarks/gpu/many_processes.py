"""Processes that are told what to do over pipes; when one dies or is late, all of them end."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

_GRACE = 5.0


class RankError(RuntimeError):
    """A process died, failed or did not answer."""


@dataclass(frozen=True)
class Member:
    """One process and the pipe to it."""

    name: str
    process: BaseProcess
    pipe: Connection


class Together:
    """Some processes of one program; use it in a ``with`` statement.

    Args:
        target: called in each with (pipe, *its own arguments); what it raises is raised here.
        given: the name and the arguments of each.
    """

    def __init__(self, target: Callable[..., None], given: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        context = multiprocessing.get_context("forkserver")
        self.members: list[Member] = []
        try:
            for name, arguments in given:
                ours, theirs = context.Pipe()
                process = context.Process(target=_guarded, args=(target, theirs, arguments), daemon=True)
                process.start()
                theirs.close()
                self.members.append(Member(name, process, ours))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tell(self, order: Any, among: Sequence[int] | None = None) -> None:
        """Send an order to all, or to some by number."""
        for number in range(len(self.members)) if among is None else among:
            member = self.members[number]
            try:
                member.pipe.send(order)
            except OSError as error:
                raise RankError(f"{member.name} is gone: {error}") from error

    def answers(self, seconds: float, among: Sequence[int] | None = None) -> list[Any]:
        """Return everybody's answer, in order.

        Raises:
            RankError: one failed, died, or did not answer in time.
        """
        wanted = list(range(len(self.members)) if among is None else among)
        until, found = time.monotonic() + seconds, dict[int, Any]()
        while len(found) < len(wanted):
            missing = [n for n in wanted if n not in found]
            pipes = {self.members[n].pipe: n for n in missing}
            ready = wait(list(pipes), max(0.0, until - time.monotonic()))
            if not ready:
                names = ", ".join(self.members[n].name for n in missing)
                raise RankError(f"no answer within {seconds:g} s from {names}")
            for pipe in ready:
                number = next(n for own, n in pipes.items() if own is pipe)
                found[number] = self._heard(self.members[number])
        return [found[n] for n in wanted]

    def ask(self, order: Any, seconds: float, among: Sequence[int] | None = None) -> list[Any]:
        """Send an order, and return the answers."""
        self.tell(order, among)
        return self.answers(seconds, among)

    def close(self) -> None:
        """End all processes, those that hang as well."""
        for member in self.members:
            with contextlib.suppress(OSError):
                member.pipe.close()
        until = time.monotonic() + _GRACE
        for end in ("wait", "terminate", "kill"):
            for member in self.members:
                if end != "wait" and member.process.is_alive():
                    getattr(member.process, end)()
            for member in self.members:
                member.process.join(max(0.1, until - time.monotonic()))
            until = time.monotonic() + 2.0

    def _heard(self, member: Member) -> Any:
        try:
            good, answer = member.pipe.recv()
        except (EOFError, OSError) as error:
            member.process.join(2.0)
            raise RankError(f"{member.name} died, exit code {member.process.exitcode}") from error
        if not good:
            raise RankError(f"{member.name} failed:\n{answer}")
        return answer


def _guarded(target: Callable[..., None], pipe: Connection, arguments: tuple[Any, ...]) -> None:
    """Run ``target``; say what it raised. A pipe that ends is the order to end."""
    try:
        target(pipe, *arguments)
    except EOFError:
        return
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send((False, traceback.format_exc(limit=8)))


def once(target: Callable[..., Any], given: Sequence[tuple[Any, ...]], seconds: float) -> list[Any]:
    """Call ``target`` in a process for each of ``given``; return what they returned."""
    named = [(f"{target.__name__} {n}", (target, *arguments)) for n, arguments in enumerate(given)]
    with Together(_returned, named) as together:
        return together.answers(seconds)


def _returned(pipe: Connection, target: Callable[..., Any], *arguments: Any) -> None:
    pipe.send((True, target(*arguments)))
