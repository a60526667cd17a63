"""Carries a trace into the threads that a loader starts: torch's modes belong to one thread each.

While a trace runs, work that a traced thread gives away - to a `ThreadPoolExecutor` of any age, or to a new
`threading.Thread` - is done under the same trace, in the thread that does it. Threads that nobody traced are
left alone, and the two patched methods are put back when the last trace ends.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


class Carrier:
    """The threads and pool tasks of one trace.

    Args:
        enter: makes the context that traces the thread it is entered in.
    """

    def __init__(self, enter: Callable[[], AbstractContextManager[None]]) -> None:
        self._enter = enter
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._futures: list[Future[Any]] = []

    @contextmanager
    def here(self) -> Iterator[None]:
        """Trace the current thread, and what it starts; nothing happens in one that is traced already."""
        if getattr(_local, "carrier", None) is self:
            yield
            return
        before = getattr(_local, "carrier", None)
        _local.carrier = self
        try:
            with self._enter():
                yield
        finally:
            _local.carrier = before

    def wrapped(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the callable that runs ``run`` under the trace."""

        def traced(*args: Any, **kwargs: Any) -> Any:
            with self.here():
                return run(*args, **kwargs)

        return traced

    def keep(self, item: threading.Thread | Future[Any]) -> None:
        """Remember something to wait for."""
        with self._lock:
            if isinstance(item, Future):
                self._futures.append(item)
            else:
                self._threads.append(item)

    def unfinished(self, seconds: float) -> list[str]:
        """Wait for everything that was started; return the names of what still runs after ``seconds``."""
        until = time.monotonic() + seconds
        late = wait(self._futures, timeout=seconds).not_done
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        names = [thread.name for thread in self._threads if thread.is_alive()]
        return names + [f"a task of a thread pool: {future}" for future in late]


class _Local(threading.local):
    carrier: Carrier | None = None
    within_pool: bool = False


_local = _Local()
_guard = threading.Lock()
_active = 0
_submit: Callable[..., Future[Any]] = ThreadPoolExecutor.submit
_start: Callable[..., None] = threading.Thread.start


@contextmanager
def carried() -> Iterator[None]:
    """Patch the two ways to give work to a thread, for as long as any trace runs."""
    _install()
    try:
        yield
    finally:
        _remove()


def _install() -> None:
    global _active, _submit, _start  # noqa: PLW0603 (two methods of the process, guarded by one lock)
    with _guard:
        if _active == 0:
            _submit, _start = ThreadPoolExecutor.submit, threading.Thread.start
            ThreadPoolExecutor.submit = _traced_submit
            threading.Thread.start = _traced_start
        _active += 1


def _remove() -> None:
    global _active  # noqa: PLW0603 (as above)
    with _guard:
        _active -= 1
        if _active == 0:
            ThreadPoolExecutor.submit = _submit
            threading.Thread.start = _start


def _traced_submit(
    self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Future[Any]:
    carrier = _local.carrier
    if carrier is None:
        return _submit(self, fn, *args, **kwargs)
    # a pool's worker outlives the trace: its tasks are traced, not the worker
    _local.within_pool = True
    try:
        future = _submit(self, carrier.wrapped(fn), *args, **kwargs)
    finally:
        _local.within_pool = False
    carrier.keep(future)
    return future


def _traced_start(self: threading.Thread) -> None:
    carrier = _local.carrier
    if carrier is not None and not _local.within_pool:
        self.run = carrier.wrapped(self.run)
        carrier.keep(self)
    _start(self)
