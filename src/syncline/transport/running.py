"""A transfer in a thread of its own: progress, deadline, cancellation, and the count of bytes at its end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from syncline.errors import DeadlineError, SynclineError, TransportError
from syncline.transport.base import Drained, Limits, Progress, Wedged
from syncline.transport.clock import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray


class Running:
    """One run of a program: a `Transfer`.

    Args:
        name: of what runs, for its thread and its errors.
        body: does the work in the new thread; it calls `check` often and `add` as bytes move, may set
        `digests`,
            and has stopped touching memory when it returns or raises.
        nbytes: wire bytes planned; a body that returns without having moved exactly these has failed.
        hops: hops planned.
        limits: of this run.
        peers: whom it works with, for errors.
    """

    def __init__(
        self,
        name: str,
        body: Callable[[Running], None],
        nbytes: int,
        hops: int,
        limits: Limits,
        peers: tuple[str, ...] = (),
    ) -> None:
        self.limits, self.peers = limits, peers
        self.digests: NDArray[np.uint64] | None = None
        self._name, self._body = name, body
        self._total, self._total_hops = nbytes, hops
        self._moved = self._hops_done = 0
        self._mutex = threading.Lock()
        self._deadline = Deadline(limits.deadline)
        self._reason: SynclineError | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"syncline {name}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise why the body must stop now, if it must."""
        if self._reason is not None:
            raise self._reason
        if self._deadline.over:
            whom = f", with {', '.join(self.peers)}" if self.peers else ""
            raise DeadlineError(
                f"the transfer {self._name!r} did not finish in time{whom}",
                expected=f"{self._total} bytes within {self.limits.deadline:g} s",
                found=f"{self._moved} bytes",
            )

    @property
    def left(self) -> float:
        """Seconds left of the run's own deadline."""
        return self._deadline.left

    def add(self, nbytes: int, hops: int = 0) -> None:
        """Count what has moved."""
        with self._mutex:
            self._moved += nbytes
            self._hops_done += hops

    def stop(self, reason: SynclineError) -> None:
        """Ask the body to stop, and say why; the first reason counts."""
        with self._mutex:
            self._reason = self._reason or reason

    def poll(self) -> Progress:
        """Return the progress now."""
        done = self._ended.is_set()
        with self._mutex:
            return Progress(self._moved, self._total, self._hops_done, self._total_hops, done)

    def wait(self, deadline: float) -> None:
        """Return when every planned byte has moved; see `Transfer.wait` for errors."""
        if not self._ended.wait(deadline):
            whom = ", ".join(self.peers) or "this process's own threads"
            raise DeadlineError(
                f"the transfer {self._name!r} still runs, with {whom}",
                expected=f"{self._total} bytes within {deadline:g} s",
                found=f"{self._moved} bytes",
            )
        if self._error is not None:
            raise self._error

    def cancel(self, deadline: float) -> Drained | Wedged:
        """Stop, and return when no memory is touched any more."""
        self.stop(
            TransportError(f"the transfer {self._name!r} was cancelled", found=f"{self._moved} bytes moved")
        )
        if self._ended.wait(deadline):
            return Drained()
        return Wedged(self.peers, f"the transfer {self._name!r} did not stop within {deadline:g} s")

    def _run(self) -> None:
        try:
            self._body(self)
            if self._moved != self._total:
                raise TransportError(  # noqa: TRY301 - one place records every failure
                    f"the transfer {self._name!r} ended without having moved every byte",
                    expected=f"{self._total} bytes",
                    found=f"{self._moved} bytes",
                )
        except SynclineError as error:
            self._error = error
        except BaseException as error:
            wrapped = TransportError(
                f"the transfer {self._name!r} failed", found=f"{type(error).__name__}: {error}"
            )
            wrapped.__cause__ = error
            self._error = wrapped
        finally:
            if self._error is not None:
                self.digests = None
            del self._body
            self._ended.set()
