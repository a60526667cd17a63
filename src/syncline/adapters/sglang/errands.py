"""Errands: work that other threads hand to an engine's own thread while that thread stands still for them.

SGLang's code expects its scheduler's thread: thread-local contexts, an inference mode, a current device. An
update runs in threads of its own. So the scheduler's thread stops, runs what it is handed, and goes on when
the update is over; meanwhile it cannot start a forward pass.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from syncline.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Errands:
    """One engine thread that serves, and any number of others that send it on errands."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._state = threading.Lock()
        self._server: int | None = None

    @property
    def serving(self) -> bool:
        """Whether the engine's thread stands still for errands now."""
        return self._server is not None

    def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the engine's thread and return its result, or raise what it raised.

        Raises:
            AdapterError: the engine's thread does not serve: what came too late must not touch the engine.
        """
        if self._server == threading.get_ident():
            return work()
        done: Future[T] = Future()
        with self._state:
            if self._server is None:
                raise AdapterError(
                    "the engine has gone on: it does not stand still for an update any more",
                    expected="a call while the engine's thread serves",
                    hint="the update was given up before this rank had finished; run it again",
                )
            self._queue.put((work, done))
        return done.result()

    def serve(self, body: Callable[[], T]) -> T:
        """Run ``body`` in a thread of its own, and in this thread whatever it and others send, until it ends.

        Returns what ``body`` returned, or raises what it raised. Errands that were accepted are all run.
        """
        outcome: Future[T] = Future()
        with self._state:
            if self._server is not None:
                raise AdapterError("the engine's thread serves already", hint="one command at a time")
            self._server = threading.get_ident()
        helper = threading.Thread(
            target=self._body, args=(body, outcome), name="syncline command", daemon=True
        )
        try:
            helper.start()
            while (errand := self._queue.get()) is not None:
                _settle(*errand)
        finally:
            with self._state:
                self._server = None
            while not self._queue.empty():  # accepted in the last moment
                if (errand := self._queue.get()) is not None:
                    _settle(*errand)
        return outcome.result()

    def _body(self, body: Callable[[], T], outcome: Future[T]) -> None:
        _settle(body, outcome)
        self._queue.put(None)


def _settle(work: Callable[[], Any], done: Future[Any]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
