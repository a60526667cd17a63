"""The reader's end of shared memory: one connection to a writer, and its regions mapped read-only."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from syncline.errors import (
    DeadlineError,
    PeerLostError,
    RevokedError,
    SynclineError,
    TransportError,
    from_wire,
)
from syncline.faults import point
from syncline.memory.mapped import MappedRegion
from syncline.memory.region import Kind, Region
from syncline.transport import frames
from syncline.transport.sockets import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from syncline.transport.base import Endpoint, Ticket
    from syncline.transport.clock import Deadline
    from syncline.transport.loop import Loop

Key = tuple[int, int]  # region, generation


class OpenRegion(Protocol):
    """A peer's region, open here until `close`."""

    @property
    def address(self) -> int:
        """Address of its first byte."""
        ...

    def close(self) -> None:
        """Close it; a second call does nothing."""
        ...


@dataclass(eq=False)
class _Held:
    """One mapped region: in use by ``users`` transfers, and to be unmapped as soon as revoked and unused."""

    region: OpenRegion
    users: int = 0
    revoked: bool = False
    stops: list[Callable[[], None]] = field(default_factory=list)


class ShmLink:
    """Maps a writer's regions and keeps them until closed, revoked, or replaced by a later generation.

    Mapped memory outlives the writer: after its death `alive` is False, and what is mapped stays readable.

    Args:
        peer: the writer.
        path: its segment server's socket.
        hello: what this process says first.
        loop: the thread that reads the connection.
        deadline: for connection and greeting.

    Attributes:
        opened: number of times that a region was mapped: what is bound to this link is stale once it grew.
    """

    def __init__(
        self, peer: Endpoint, path: str, hello: frames.Hello, loop: Loop, deadline: Deadline
    ) -> None:
        self._peer, self._loop = peer, loop
        self._changed = threading.Condition()
        self._fetching = threading.Lock()
        self._held: dict[Key, _Held] = {}
        self._denied: dict[Key, SynclineError] = {}
        self._wanted: dict[Key, int] = {}  # what was asked for, and its size
        self._welcome = self._closed = False
        self.opened = 0
        self._lost: BaseException | None = None
        self._refused: SynclineError | None = None
        self._inbox = frames.Inbox()
        self._sock = connect(Path(path), deadline.left, str(peer))
        try:
            self._send(hello)
            loop.watch(self._sock, self._readable, self._fail)
            self._wait(lambda: self._welcome, deadline)
        except BaseException:
            self.close()
            raise

    @property
    def peer(self) -> Endpoint:
        """The writer."""
        return self._peer

    @property
    def alive(self) -> bool:
        """Whether the writer still holds its end of the connection."""
        return self._lost is None and not self._closed

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def regions(self) -> int:
        """Number of regions mapped now."""
        with self._changed:
            return len(self._held)

    def fetch(self, tickets: Sequence[Ticket], deadline: Deadline) -> None:
        """Map the tickets' regions, except those that are mapped already; older generations of them end.

        Raises:
            TransportError, RevokedError, FencedError: the writer refused; DeadlineError, PeerLostError.
        """
        with self._fetching:
            for ticket in tickets:
                self._fetch(ticket, deadline)

    def _fetch(self, ticket: Ticket, deadline: Deadline) -> None:
        key = (ticket.region, ticket.generation)
        with self._changed:
            if key in self._held:
                self._usable(key)
                return
            self._denied.pop(key, None)
            self._wanted[key] = ticket.nbytes
        point("shm.before_fetch")
        self._send(frames.Fetch(ticket.region, ticket.generation, ticket.nbytes, ticket.fence))
        self._wait(lambda: key in self._held or key in self._denied, deadline)
        with self._changed:
            if key in self._denied:
                raise self._denied.pop(key)
            for old in [k for k in self._held if k[0] == key[0] and k[1] < key[1]]:
                self._end(old)

    def pointers(self, regions: Iterable[Key]) -> dict[int, int]:
        """Return region id -> address here.

        Raises:
            RevokedError: one of them is not mapped (any more).
        """
        with self._changed:
            return {key[0]: self._usable(key).region.address for key in regions}

    def acquire(self, regions: Iterable[Key], stop: Callable[[], None]) -> None:
        """Keep regions mapped until `release`; ``stop`` is called if one of them is revoked meanwhile.

        Raises:
            RevokedError: one of them is not mapped (any more); none was acquired.
        """
        with self._changed:
            for held in [self._usable(key) for key in regions]:
                held.users += 1
                held.stops.append(stop)

    def release(self, regions: Iterable[Key], stop: Callable[[], None]) -> bool:
        """Undo `acquire`; return whether a region was revoked meanwhile."""
        with self._changed:
            torn = False
            for key in regions:
                held = self._held[key]
                held.users -= 1
                held.stops.remove(stop)
                torn |= held.revoked
                if held.revoked and not held.users:
                    self._unmap(key)
            return torn

    def close(self) -> None:
        """Unmap everything and hang up; regions in use by a transfer are unmapped when it ends."""
        with self._changed:
            self._closed = True
            for key in list(self._held):
                self._end(key)
            self._changed.notify_all()
        self._loop.forget(self._sock)
        self._sock.close()
        self._inbox.close()

    def _usable(self, key: Key) -> _Held:
        held = self._held.get(key)
        if held is None or held.revoked:
            newer = sorted(k[1] for k, h in self._held.items() if k[0] == key[0] and not h.revoked)
            raise RevokedError(
                f"region {key[0]} of {self._peer.name} is not readable any more",
                expected=f"generation {newer or 'none'}",
                found=f"generation {key[1]}",
                hint="link the newest binding's regions, and rebind the program",
            )
        return held

    def _end(self, key: Key) -> None:
        held = self._held[key]
        held.revoked = True
        for stop in held.stops:
            stop()
        if not held.users:
            self._unmap(key)

    def _unmap(self, key: Key) -> None:
        self._held.pop(key).region.close()
        if self.alive:
            self._send(frames.Released(*key))

    def _readable(self) -> None:
        try:
            data, descriptors = frames.receive(self._sock, descriptors=True)
        except ConnectionError as error:
            self._fail(error)
            return
        if not data:
            self._fail(PeerLostError(f"{self._peer} closed its connection"))
            self._loop.forget(self._sock)
            return
        for message, descriptor in self._inbox.feed(data, descriptors):
            with self._changed:
                self._take(message, descriptor)
                self._changed.notify_all()

    def _take(self, message: frames.Message, descriptor: int) -> None:
        if isinstance(message, frames.Welcome):
            self._welcome = True
        elif isinstance(message, frames.Segment):
            self._map(message, descriptor)
        elif isinstance(message, frames.Denied):
            error = from_wire(message.error)
            if message.region < 0:
                self._refused = error
            else:
                self._denied[message.region, message.generation] = error
        elif isinstance(message, frames.Revoke):
            key = (message.region, message.generation)
            if key in self._held:
                self._end(key)
            elif self.alive:
                self._send(frames.Released(*key))

    def _map(self, segment: frames.Segment, descriptor: int) -> None:
        key = (segment.region, segment.generation)
        try:
            if self._wanted.pop(key, -1) != segment.nbytes:
                raise TransportError(
                    "a writer sent memory that nobody asked for", found=segment, rank=self._peer.name
                )
            described = Region(segment.region, 0, segment.nbytes, Kind(segment.kind), segment.generation)
            region = self._open(descriptor, described)
        except SynclineError as error:
            self._denied[key] = error
            return
        except ValueError as error:  # a kind that this version does not know
            self._denied[key] = TransportError(f"region {key[0]} cannot be mapped", found=error)
            return
        finally:
            os.close(descriptor)
        self._held[key] = _Held(region)
        self.opened += 1

    def _open(self, descriptor: int, described: Region) -> OpenRegion:
        """Map what the writer handed over; called by the thread that reads the connection."""
        return MappedRegion(descriptor, described)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._lost = self._lost or error
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], deadline: Deadline) -> None:
        with self._changed:
            over = self._changed.wait_for(lambda: ready() or self._gone(), deadline.left)
            if ready():
                return
            if self._refused is not None:
                raise self._refused
            if not over:
                raise DeadlineError(f"{self._peer} did not answer", expected=f"within {deadline.seconds:g} s")
            raise PeerLostError(f"{self._peer} is gone", found=self._lost or "link closed")

    def _gone(self) -> bool:
        return self._lost is not None or self._closed or self._refused is not None

    def _send(self, message: frames.Message) -> None:
        try:
            frames.send(self._sock, message)
        except (BrokenPipeError, ConnectionResetError):
            # The other end hung up. What it said last (a refusal, with its reason) may still wait to be
            # read: the thread that reads takes that first, and ends the link at the end of the stream.
            return
        except OSError as error:
            self._fail(error)
