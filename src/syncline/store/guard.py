"""Watching an idle instance: one whose ranks no longer hold the same weights must not go on serving."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from syncline.errors import DeadlineError, SynclineError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_PATIENCE = 5.0


class Guard:
    """A thread that pauses an instance's engine when the instance becomes DIRTY between two updates.

    That happens when a rank's process is replaced by a new one, which holds no version yet: nothing fails in
    the others, and they would answer with what the ranks hold together.

    Args:
        instance: name of the instance.
        check: wait until the instance is DIRTY while its engine runs, and pause it; raises `DeadlineError`
            now and then while all is well.
    """

    def __init__(self, instance: str, check: Callable[[], None]) -> None:
        self._instance, self._check = instance, check
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"syncline guard {instance}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end; it does once the wait it is in is over, as when its connection is closed."""
        self._stopping.set()

    def join(self) -> None:
        """Wait for the thread's end, a moment."""
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._check()
            except DeadlineError:
                continue  # all is well, or the engine did not pause in time: the next check tells
            except SynclineError as error:
                if not self._stopping.is_set():
                    logger.warning("nobody watches instance %s any more: %s", self._instance, error)
                return
            except Exception:
                if not self._stopping.is_set():
                    logger.exception("nobody watches instance %s any more", self._instance)
                return
