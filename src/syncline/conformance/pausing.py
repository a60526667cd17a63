"""Checks of pause and resume, against forward passes that really run.

Most need ``adapter.forward()``: a context manager around one forward pass, that waits while it is paused.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from syncline.conformance.report import NonconformityError, UnobservableError
from syncline.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK = 0.4  # seconds in which a pass that nothing holds back has surely begun
_SOON = 5.0
_SHORT = 0.3  # deadline of a pause that must fail


class _Pass:
    """A forward pass in a thread of its own."""

    def __init__(self, forward: Callable[[], Any]) -> None:
        self.inside, self._end = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(forward,), daemon=True)
        self._thread.start()

    def _run(self, forward: Callable[[], Any]) -> None:
        try:
            with forward():
                self.inside.set()
                self._end.wait(10 * _SOON)
        except Exception as error:  # told by `begun`
            self._error = error

    def begun(self, seconds: float) -> bool:
        """Return whether it begins within some seconds."""
        found = self.inside.wait(seconds)
        if self._error is not None:
            raise NonconformityError("a forward pass failed", expected="it waits", found=self._error)
        return found

    def end(self) -> None:
        """Let it end, and wait for that."""
        self._end.set()
        self._thread.join(_SOON)


def _forward(adapter: Any) -> Callable[[], Any]:
    found = getattr(adapter, "forward", None)
    if not callable(found):
        raise UnobservableError("the adapter has no forward(): passes cannot be made to run")
    return found


def plain(adapter: Any) -> None:
    """Check that an idle engine pauses within its deadline, in both modes, and resumes."""
    for mode in ("wait", "abort"):
        began = time.monotonic()
        adapter.pause(mode, _SOON)
        took = time.monotonic() - began
        adapter.resume(None)
        if took > _SOON:
            raise NonconformityError(f"pause({mode!r}) overran", expected=f"{_SOON} s", found=f"{took:.1f} s")


def holds(adapter: Any) -> None:
    """Check that no forward pass starts between pause and resume, and that one does afterwards."""
    forward = _forward(adapter)
    adapter.pause("wait", _SOON)
    running = _Pass(forward)
    try:
        early = running.begun(_LOOK)
        adapter.resume(None)
        late = running.begun(_SOON)
    finally:
        running.end()
    if early:
        raise NonconformityError(
            "a forward pass ran while the engine was paused", expected="none before resume"
        )
    if not late:
        raise NonconformityError("no forward pass ran after resume", expected=f"one within {_SOON} s")


def deadline(adapter: Any) -> None:
    """Check that a pause which a running pass prevents fails in time, and leaves the engine running."""
    forward = _forward(adapter)
    running = _Pass(forward)
    try:
        if not running.begun(_SOON):
            raise NonconformityError("no forward pass runs", expected=f"one within {_SOON} s")
        began = time.monotonic()
        refused = _refuses(adapter)
        took = time.monotonic() - began
    finally:
        running.end()
    if not refused:
        adapter.resume(None)
        raise NonconformityError(
            "pause returned while a forward pass ran", expected=f"DeadlineError after {_SHORT} s"
        )
    if took > _SHORT + _SOON:
        raise NonconformityError("pause overran its deadline", expected=f"{_SHORT} s", found=f"{took:.1f} s")
    again = _Pass(forward)
    runs = again.begun(_SOON)
    if not runs:
        adapter.resume(None)
    again.end()
    if not runs:
        raise NonconformityError(
            "the engine stays paused after a pause that failed", expected="passes run on"
        )


def _refuses(adapter: Any) -> bool:
    try:
        adapter.pause("wait", _SHORT)
    except DeadlineError:
        return True
    except Exception as error:
        raise NonconformityError(
            "a pause that cannot be had fails otherwise",
            expected="DeadlineError",
            found=f"{type(error).__name__}: {error}",
        ) from error
    return False
