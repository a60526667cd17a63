"""A deadline: seconds from its making, asked for what is left of it."""

from __future__ import annotations

import time


class Deadline:
    """``seconds`` from now; `left` never falls below 0."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether nothing is left."""
        return time.monotonic() >= self._end
