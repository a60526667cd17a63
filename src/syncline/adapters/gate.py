"""The gate before forward passes: closed while an update writes into this process's parameters."""

from __future__ import annotations

import threading


class Gate:
    """Pauses are numbered by rank 0: one that arrives early, late or not at all is told from the next.

    In every process a worker passes through `enter` (or `wait`) and `leave`; forward passes wait in `opened`.
    """

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._announced = 0  # newest pause that rank 0 announced
        self._released = 0  # newest pause that is over here
        self._held: int | None = None  # pause that the worker of this process is in

    @property
    def held(self) -> bool:
        """Whether this process is paused."""
        return self._held is not None

    def enter(self) -> int | None:
        """Start a pause, in rank 0; return its number, or None if it is paused already."""
        with self._state:
            if self._held is not None:
                return None
            self._announced += 1
            self._held = self._announced
            return self._held

    def announce(self, number: int) -> None:
        """Note a pause that rank 0 announced, in any other rank."""
        with self._state:
            self._announced = max(self._announced, number)
            self._state.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait for rank 0 to announce a pause, and enter it; return whether it came."""
        with self._state:
            if self._held is None:
                if not self._state.wait_for(lambda: self._announced > self._released, timeout):
                    return False
                self._held = self._announced
            return True

    def leave(self) -> None:
        """End the pause of this process, if there is one."""
        with self._state:
            if self._held is not None:
                self._released, self._held = max(self._released, self._held), None
            self._state.notify_all()

    def passed(self, number: int) -> None:
        """Note that rank 0 itself left every pause up to ``number``: one not entered here is stale."""
        with self._state:
            if self._held is None:
                self._released = max(self._released, number)

    def opened(self, timeout: float) -> bool:
        """Wait until this process is not paused; return whether it came to that."""
        with self._state:
            return self._state.wait_for(lambda: self._held is None, timeout)

    @property
    def number(self) -> int:
        """Number of the newest pause."""
        return self._announced
