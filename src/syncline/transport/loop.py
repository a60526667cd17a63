"""One background thread a transport, which reads all of its sockets."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

_TICK = 0.25
_loops: weakref.WeakSet[Loop] = weakref.WeakSet()


class Loop:
    """Calls ``on_readable`` of each watched socket from one daemon thread, started with the first socket.

    A callback that raises does not end the thread: its socket is dropped, and ``on_error`` told why.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._mutex = threading.Lock()
        self._watched: dict[socket.socket, tuple[Callable[[], None], Callable[[BaseException], None]]] = {}
        self._ticks: list[Callable[[float], None]] = []
        self._thread: threading.Thread | None = None
        self._selector: selectors.BaseSelector | None = None
        self._wake = (-1, -1)
        self._closed = False
        _loops.add(self)

    def every(self, tick: Callable[[float], None]) -> None:
        """Call ``tick(monotonic now)`` about four times a second while the thread runs."""
        self._ticks.append(tick)

    def watch(
        self, sock: socket.socket, on_readable: Callable[[], None], on_error: Callable[[BaseException], None]
    ) -> None:
        """Watch a non-blocking socket until `forget`."""
        with self._mutex:
            if self._closed:
                return
            self._watched[sock] = (on_readable, on_error)
            if self._selector is None:
                self._selector = selectors.DefaultSelector()
                self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                self._selector.register(self._wake[0], selectors.EVENT_READ)
            self._selector.register(sock, selectors.EVENT_READ)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._poke()

    def forget(self, sock: socket.socket) -> None:
        """Stop watching a socket, before it is closed; one that is not watched is left alone."""
        with self._mutex:
            if self._watched.pop(sock, None) is not None and self._selector is not None:
                self._selector.unregister(sock)

    def close(self, deadline: float) -> bool:
        """End the thread within ``deadline`` seconds, or return False. Sockets are their owners' to close."""
        with self._mutex:
            self._closed = True
            thread = self._thread
        self._poke()
        if thread is not None and thread is not threading.current_thread():
            thread.join(deadline)
            if thread.is_alive():
                return False
        self._release()
        return True

    def _poke(self) -> None:
        with self._mutex, contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            if self._wake[1] >= 0:
                os.write(self._wake[1], b"x")

    def _run(self) -> None:
        selector = self._selector
        while selector is not None and not self._closed:
            ready = selector.select(_TICK)
            for key, _ in ready:
                if key.fd == self._wake[0]:
                    self._drain_wake()
                    continue
                with self._mutex:
                    calls = self._watched.get(key.fileobj)  # pyright: ignore[reportArgumentType]
                if calls is not None:
                    self._call(key.fileobj, *calls)  # pyright: ignore[reportArgumentType]
            now = time.monotonic()
            for tick in list(self._ticks):
                tick(now)

    def _call(
        self, sock: socket.socket, on_readable: Callable[[], None], on_error: Callable[[BaseException], None]
    ) -> None:
        try:
            on_readable()
        except BlockingIOError:
            return  # nothing to read after all
        except Exception as error:
            self.forget(sock)
            on_error(error)

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake[0], 4096):
                pass

    def _release(self) -> None:
        with self._mutex:
            selector, self._selector = self._selector, None
            wake, self._wake = self._wake, (-1, -1)
            self._watched.clear()
        if selector is not None:
            selector.close()
        for descriptor in wake:
            if descriptor >= 0:
                os.close(descriptor)

    def abandon(self) -> None:
        """In a forked child: close what was inherited, so that peers see the parent's death as such."""
        self._mutex = threading.Lock()
        watched = list(self._watched)
        self._thread = None
        self._closed = True
        self._release()
        for sock in watched:
            sock.close()


def _abandon_all() -> None:
    for loop in list(_loops):
        loop.abandon()


os.register_at_fork(after_in_child=_abandon_all)
