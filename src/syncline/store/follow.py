"""Following a table: update whenever a version appears that is new enough."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from syncline.errors import DeadlineError, SynclineError
from syncline.protocol.ids import VersionKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncline.protocol.parts import Level
    from syncline.store.reader import WeightReader
    from syncline.store.report import UpdateReport

logger = logging.getLogger(__name__)

_WAIT = 1.0  # seconds of one wait for a version; it is asked again at once, unless told to stop
_BREATH = (
    0.2  # seconds after a failed update, so that a broken trainer is not asked a thousand times a second
)


class Follower:
    """A thread that keeps an instance up to date; made by `WeightReader.follow`.

    Attributes:
        updates: number of updates made.
        error: why the last attempt failed; None after one that succeeded.
    """

    def __init__(
        self,
        reader: WeightReader,
        every: int,
        max_staleness: int | None,
        verify: Level,
        on_update: Callable[[UpdateReport], None] | None,
    ) -> None:
        if every < 1 or (max_staleness is not None and max_staleness < 0):
            raise SynclineError(
                "cannot follow like that",
                expected="every >= 1, max_staleness >= 0 or None",
                found=f"every {every}, max_staleness {max_staleness}",
            )
        self._reader, self._every, self._max_staleness = reader, every, max_staleness
        self._verify: Level = verify
        self._on_update = on_update
        self._stopping = threading.Event()
        self.updates = 0
        self.error: SynclineError | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"syncline follow {reader.instance}", daemon=True
        )
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self, deadline: float = 15.0) -> None:
        """Ask the thread to end after the update at hand, and wait for it.

        Raises:
            DeadlineError: it still updates.
        """
        self._stopping.set()
        if self._thread is threading.current_thread():
            return
        self._thread.join(deadline)
        if self._thread.is_alive():
            raise DeadlineError(f"the follower of instance {self._reader.instance} still updates")

    def _run(self) -> None:
        served: VersionKey | None = None
        while not self._stopping.is_set():
            try:
                served = self._step(served)
            except SynclineError as error:
                self._note(error, served)
            except BaseException:
                if not self._stopping.is_set():
                    logger.exception("the follower of instance %s ended", self._reader.instance)
                return

    def _step(self, served: VersionKey | None) -> VersionKey | None:
        """Wait a moment for a version that is new enough, and take it; return what is served then."""
        after = None if served is None else VersionKey(served.epoch, served.number + self._every - 1)
        ready = self._reader.await_version(after, _WAIT)
        if ready is None or self._stopping.is_set():
            return served
        report = self._reader.update(ready.number, verify=self._verify)
        self.error = None
        if report.changed:
            self.updates += 1
            if self._on_update is not None:
                self._on_update(report)
        return report.key

    def _note(self, error: SynclineError, served: VersionKey | None) -> None:
        if self._stopping.is_set():
            return
        self.error = error
        logger.warning("instance %s could not update: %s", self._reader.instance, error)
        self._stopping.wait(_BREATH)
        try:
            self._limit_staleness(served)
        except SynclineError as unknown:
            logger.warning("staleness of instance %s is unknown: %s", self._reader.instance, unknown.what)

    def _limit_staleness(self, served: VersionKey | None) -> None:
        if self._max_staleness is None or served is None:
            return
        newest = self._reader.newest()
        if newest is None or newest <= served:
            return
        behind = newest.number - served.number if newest.epoch == served.epoch else self._max_staleness + 1
        if behind > self._max_staleness:
            logger.warning("instance %s is %d versions behind: paused", self._reader.instance, behind)
            self._reader.hold()
