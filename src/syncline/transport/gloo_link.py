"""One pair of processes over gloo: a process group of two with its own store, watched by a thread.

Gloo offers neither a way to ask whether an operation has finished nor one to end it, and an operation that
times out breaks the pair. So nobody here waits inside gloo for a message that has not come: the last eight
bytes of every message are a mark, the receiver looks whether the mark has arrived, and only then lets gloo
finish, at once. A receive that is never answered (the sentinel) is what notices a peer's death, or its
orderly farewell.
"""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from syncline.errors import DeadlineError, PeerLostError, TransportError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, Work

    from syncline.transport.base import Endpoint
    from syncline.transport.clock import Deadline

MARK_BYTES = 8
_DATA_TAG, _SENTINEL_TAG, _BREAK_TAG = 1, 2, 3
_FOREVER = timedelta(days=300)
_AT_ONCE = timedelta(milliseconds=1)
_FINISH = timedelta(seconds=10)


class GlooLink:
    """A link to one peer, for one transfer at a time. Whatever goes wrong on it ends it; the next one is new.

    Args:
        peer: the other process.
        rank: 0 in one of the two processes, 1 in the other.
        store: where the two find each other; theirs alone.
        interface: host name or address to bind to.
        deadline: for both to arrive.

    Raises:
        DeadlineError: the peer did not come.
    """

    def __init__(self, peer: Endpoint, rank: int, store: Store, interface: str, deadline: Deadline) -> None:
        self._peer, self._other = peer, 1 - rank
        self._mutex = threading.Lock()
        self._user: object | None = None
        self._ended: str | None = None
        try:
            self._group: Any = _group_of_two(store, rank, interface, max(deadline.left, 0.001))
        except RuntimeError as error:
            raise DeadlineError(
                f"{peer} did not meet us over gloo", expected=f"within {deadline.seconds:g} s", found=error
            ) from error
        self._sentinel = threading.Thread(
            target=self._watch, args=(self._group,), name=f"syncline gloo {peer.name}", daemon=True
        )
        self._sentinel.start()

    @property
    def peer(self) -> Endpoint:
        """The other process."""
        return self._peer

    @property
    def alive(self) -> bool:
        """Whether both are still there and nothing has gone wrong."""
        return self._ended is None

    def enter(self, user: object) -> None:
        """Reserve the link for one transfer.

        Raises:
            PeerLostError: it has ended; TransportError: another transfer has it.
        """
        self.check()
        with self._mutex:
            if self._user is not None:
                raise TransportError(f"the link to {self._peer} is busy", hint="one transfer at a time")
            self._user = user

    def leave(self, user: object) -> None:
        """End the reservation."""
        with self._mutex:
            if self._user is user:
                self._user = None

    def check(self) -> None:
        """Raise if the link has ended."""
        if self._ended is not None:
            raise PeerLostError(
                f"the link to {self._peer} has ended",
                found=self._ended,
                hint="make a new link and start again",
            )

    def send(self, message: torch.Tensor) -> Work:
        """Begin to send uint8[n], which must stay as it is until the peer has answered it."""
        try:
            return self._living().send([message], self._other, _DATA_TAG)
        except RuntimeError as error:
            raise self._lost(error) from error

    def receive(self, message: torch.Tensor) -> Work:
        """Begin to receive uint8[n]; its mark is cleared first."""
        message[-MARK_BYTES:] = 0
        try:
            return self._living().recv([message], self._other, _DATA_TAG)
        except RuntimeError as error:
            raise self._lost(error) from error

    def finish(self, work: Work) -> None:
        """Let gloo finish an operation whose message is known to be through."""
        try:
            work.wait(_FINISH)
        except RuntimeError as error:
            raise self._lost(error) from error

    def break_off(self, why: str) -> None:
        """End the link at once; gloo touches no memory of it any more, and the peer notices."""
        with self._mutex:
            self._ended = self._ended or why
            group = self._group
        if group is not None:
            # An operation that times out closes the pair: gloo has no other way.
            with contextlib.suppress(RuntimeError):
                group.recv([torch.zeros(1, dtype=torch.uint8)], self._other, _BREAK_TAG).wait(_AT_ONCE)

    def close(self) -> None:
        """Say farewell, so that the peer knows this is no accident, and end the link."""
        group = self._group
        if group is not None and self.alive:
            with contextlib.suppress(RuntimeError):
                farewell = torch.ones(MARK_BYTES, dtype=torch.uint8)
                group.send([farewell], self._other, _SENTINEL_TAG).wait(timedelta(seconds=1))
        self.break_off("closed by this process")
        del group
        self._sentinel.join(_FINISH.total_seconds())
        with self._mutex:
            self._group = None

    def _living(self) -> Any:
        self.check()
        if self._group is None:
            raise PeerLostError(f"the link to {self._peer} is closed")
        return self._group

    def _lost(self, error: BaseException) -> PeerLostError:
        with self._mutex:
            self._ended = self._ended or str(error).splitlines()[0]
        return PeerLostError(
            f"{self._peer} is gone", found=self._ended, hint="make a new link and start again"
        )

    def _watch(self, group: Any) -> None:
        message = torch.zeros(MARK_BYTES, dtype=torch.uint8)
        try:
            group.recv([message], self._other, _SENTINEL_TAG).wait(_FOREVER)
            why = "the peer closed it"
        except RuntimeError as error:
            why = f"the peer is gone ({str(error).splitlines()[0]})"
        with self._mutex:
            self._ended = self._ended or why


def _group_of_two(store: Store, rank: int, interface: str, seconds: float) -> Any:
    """Return a process group that belongs to nobody else, nor to `torch.distributed`'s registry."""
    # The class is not in torch's stubs, and its options are only to be had under their private name.
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 - see above
    options._devices = [gloo.create_device(hostname=interface)]  # noqa: SLF001 - see above
    options._timeout = timedelta(seconds=seconds)  # noqa: SLF001 - see above
    options._threads = 1  # noqa: SLF001 - see above
    return gloo(store, rank, 2, options)


def mark_of(message: torch.Tensor) -> int:
    """Return the mark at the end of a message, 0 while it has not arrived."""
    return int(message[-MARK_BYTES:].numpy().view(np.uint64)[0])


def set_mark(message: torch.Tensor, mark: int) -> None:
    """Write the mark of a message that is about to be sent."""
    message[-MARK_BYTES:].numpy().view(np.uint64)[0] = mark
