"""One published version, as the trainer rank that published it sees it."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from syncline.errors import DeadlineError, RemoteError, SynclineError
from syncline.protocol import messages as m

if TYPE_CHECKING:
    from syncline.protocol.ids import Fence, VersionKey
    from syncline.protocol.parts import Until
    from syncline.store.member import Member

logger = logging.getLogger(__name__)


class Publication:
    """A handle on one version: what `WeightWriter.publish` returns at once.

    Attributes:
        number: the version, as the trainer numbers it.
        key: the version's key, once the MetaServer knows it.
        readers: names of the instances of its plan, once known; empty: nobody reads.
        revoked: ranks that were too slow or stuck when the window closed, by name.
        missed: with ``wait="pulled"``: live instances that did not pull it in time.
    """

    def __init__(self, number: int, until: Until, member: Member, fence: Fence, table: str) -> None:
        self.number = number
        self.until: Until = until
        self._member, self._fence, self._table = member, fence, table
        self.key: VersionKey | None = None
        self.readers: tuple[str, ...] = ()
        self.revoked: tuple[str, ...] = ()
        self.missed: tuple[str, ...] = ()
        self._ready = threading.Event()
        self._error: SynclineError | None = None

    @property
    def done(self) -> bool:
        """Whether this rank has put the version and delivered its digests, or failed to."""
        return self._ready.is_set()

    def finish(self, error: SynclineError | None = None) -> None:
        """Say that this rank's part is over; called by the publisher's thread."""
        self._error = error
        self._ready.set()

    def wait(self, timeout: float | None = None) -> VersionKey:
        """Return once this rank's part is over: put, and digested for the readers that were there.

        Raises:
            AdapterError: a parameter changed its dtype or shape since the writer was made.
            ReplicaDivergenceError: this rank holds a box twice, with different contents.
            DeadlineError: it is not over yet.
        """
        seconds = self._member.options.update_timeout if timeout is None else timeout
        if not self._ready.wait(seconds):
            raise DeadlineError(
                f"version {self.number} is not published after {seconds:g} s",
                expected="this rank's put and digests",
                found="still at work, or no MetaServer",
            )
        if self._error is not None:
            raise self._error
        if self.key is None:
            raise SynclineError("a publication without a key", found=self.number)
        return self.key

    def wait_committed(self, timeout: float | None = None) -> tuple[str, ...]:
        """Return the instances that serve this version, once every live one does.

        An instance that died is not waited for; one that failed is an error, with its own words.

        Raises:
            RemoteError: an instance failed at this version.
            VersionAbortedError, VersionBrokenError: another writer failed.
            DeadlineError: names the instances that are late.
        """
        seconds = self._member.options.update_timeout if timeout is None else timeout
        key = self.wait(seconds)
        request = m.WaitCommitted(self._fence, self._table, key, seconds)
        summary: m.CommitSummary = self._member.ask(request, seconds)
        if summary.failed:
            raise RemoteError(
                f"{len(summary.failed)} instances failed at version {key}",
                expected="a commit by every live instance",
                found="; ".join(f"instance {name}: {why}" for name, why in sorted(summary.failed.items())),
                hint="the trainer may go on; a failed instance serves again after its next full update",
            )
        return summary.committed

    def close(self, timeout: float) -> None:
        """Close this rank's read window: returns when the weights may change.

        Raises:
            SynclineError: what went wrong while publishing; the weights may change all the same.
        """
        key = self.wait(timeout)
        request = m.CloseWindow(self._fence, self._table, key, timeout, self.until)
        closed: m.WindowClosed = self._member.ask(request, timeout + self._member.options.stall)
        self.revoked, self.missed = closed.revoked, closed.missed
        if closed.revoked:
            logger.warning("version %s: revoked %s", key, ", ".join(closed.revoked))
        if closed.missed:
            logger.warning("version %s was missed by %s", key, ", ".join(closed.missed))
        if closed.reason:
            logger.warning("version %s is %s: %s", key, closed.state, closed.reason)
