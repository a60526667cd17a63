"""The worker's main thread at the disposal of an update that runs in other threads.

vLLM runs an update as a call in each worker's main thread, which is where its models, devices and thread
pools belong. The transfer runs in a thread of its own; what touches the model is handed to the main thread.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from syncline.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class MainThread:
    """Runs tasks of other threads in the thread that called `serve`."""

    def __init__(self) -> None:
        self._tasks: queue.Queue[tuple[Callable[[], None], Future[None]] | None] = queue.Queue()
        self._serving: int | None = None
        self._lock = threading.Lock()

    @property
    def held(self) -> bool:
        """Whether the main thread serves now, so that it runs nothing else."""
        return self._serving is not None

    def run(self, task: Callable[[], None]) -> None:
        """Run a task in the main thread and return when it is done; in this one if nobody serves."""
        with self._lock:
            elsewhere = self._serving is not None and self._serving != threading.get_ident()
            done: Future[None] = Future()
            if elsewhere:
                self._tasks.put((task, done))
        if elsewhere:
            done.result()
        else:
            task()

    def serve(self, work: Callable[[], T], deadline: float) -> T:
        """Run ``work`` in another thread, and its tasks in this one; return its result, or raise its error.

        Args:
            work: the update.
            deadline: seconds after which this thread no longer waits for it.

        Raises:
            DeadlineError: it did not end; it may still run.
        """
        ended: Future[T] = Future()
        thread = threading.Thread(target=self._work, args=(work, ended), name="syncline update", daemon=True)
        self._serving = threading.get_ident()
        try:
            thread.start()
            while True:
                task = self._tasks.get(timeout=deadline)
                if task is None:
                    return ended.result()
                _run(*task)
        except queue.Empty:
            raise DeadlineError(
                f"an update did not end within {deadline:g} s", hint="restart the engine"
            ) from None
        finally:
            self._close()

    def _work(self, work: Callable[[], T], ended: Future[T]) -> None:
        try:
            ended.set_result(work())
        except BaseException as error:  # raised again in the main thread
            ended.set_exception(error)
        finally:
            self._tasks.put(None)

    def _close(self) -> None:
        """End serving; tasks that came too late run in their own threads' stead here."""
        with self._lock:
            self._serving = None
            while not self._tasks.empty():
                task = self._tasks.get()
                if task is not None:
                    _run(*task)


def _run(task: Callable[[], None], done: Future[None]) -> None:
    try:
        task()
    except BaseException as error:  # raised again in the thread that asked
        done.set_exception(error)
    else:
        done.set_result(None)
