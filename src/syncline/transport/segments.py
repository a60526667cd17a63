"""Hands read-only descriptors of this process's memory to processes of the same user and job.

A peer connects to a Unix socket; the kernel says which user it is. It names its job and the very server it
means,
then asks for regions by ticket, and keeps the connection for as long as it has any of them mapped: that is
how the server knows, when a ticket is revoked, whether memory is still in use, also by a peer that died.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncline.errors import (
    AuthError,
    FencedError,
    RevokedError,
    SynclineError,
    TransportError,
    WireVersionError,
    to_wire,
)
from syncline.faults import point
from syncline.transport import frames
from syncline.transport.base import Drained, Wedged
from syncline.transport.sockets import bind

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from syncline.memory.region import Region
    from syncline.transport.base import Ticket
    from syncline.transport.loop import Loop

Key = tuple[int, int, int]  # region, generation, epoch
_HELLO_SECONDS = 5.0
_BACKLOG = 512


@dataclass(eq=False)
class _Peer:
    sock: socket.socket
    until: float  # monotonic: no `Hello` by then, no connection
    inbox: frames.Inbox = field(default_factory=frames.Inbox)
    name: str = ""
    held: set[Key] = field(default_factory=set)


@dataclass(frozen=True)
class _Segment:
    descriptor: int
    region: Region


class SegmentServer:
    """Serves the regions that were exported, on the Unix socket ``path``.

    Args:
        path: where to listen; must not exist. Its directory decides who may reach it.
        job: name of the job; peers of another are refused.
        server_id: this process's `Endpoint.id`; peers that mean another process are refused.
        loop: the thread that serves; owned by the caller.
        uid: the only user that is served.

    Raises:
        TransportError: the socket cannot be made.
    """

    def __init__(self, path: Path, job: str, server_id: str, loop: Loop, uid: int | None = None) -> None:
        self.path, self._job, self._id, self._loop = path, job, server_id, loop
        self._uid = os.geteuid() if uid is None else uid
        self._changed = threading.Condition()
        self._segments: dict[Key, _Segment] = {}
        self._peers: set[_Peer] = set()
        self._pid = os.getpid()
        self._sock: socket.socket | None = bind(path, _BACKLOG)
        loop.every(self._drop_silent)
        loop.watch(self._sock, self._accept, self._listener_failed)

    def export(self, region: Region, epoch: int, descriptor: int) -> None:
        """Serve a region of a file from its offset 0; older generations of it are revoked at once.

        Args:
            region: its file is at least as long.
            epoch: of the exporter; tickets of another epoch are refused.
            descriptor: of the file, any access mode; a read-only one of the server's own is handed out.
        """
        key = (region.id, region.generation, epoch)
        with self._changed:
            if self._sock is None:
                raise TransportError("the segment server is closed")
            if key in self._segments:
                return
            self._segments[key] = _Segment(self._keep(descriptor, region), region)
        self.withdraw_before(region.id, region.generation)

    def withdraw_before(self, region: int, generation: int) -> None:
        """Revoke every generation of a region before ``generation``, without waiting for its holders."""
        with self._changed:
            for old in [k for k in self._segments if k[0] == region and k[1] < generation]:
                self._withdraw(old)

    def revoke(self, ticket: Ticket, deadline: float) -> Drained | Wedged:
        """Serve the ticket's region no more, tell its holders, and wait until none of them has it mapped."""
        key = (ticket.region, ticket.generation, ticket.fence.epoch)
        with self._changed:
            self._withdraw(key)
            if self._changed.wait_for(lambda: not self._holders(key), deadline):
                return Drained()
            return Wedged(
                tuple(self._holders(key)), f"region {key[0]} was not released within {deadline:g} s"
            )

    def close(self) -> None:
        """Stop listening, drop peers and descriptors, remove the socket; mappings of peers stay readable."""
        with self._changed:
            sock, self._sock = self._sock, None
            peers, self._peers = list(self._peers), set()
            segments, self._segments = list(self._segments.values()), {}
        if sock is not None:
            self._loop.forget(sock)
            sock.close()
            if self._pid == os.getpid():
                self.path.unlink(missing_ok=True)
        for peer in peers:
            self._loop.forget(peer.sock)
            peer.sock.close()
        for segment in segments:
            _close(segment.descriptor)

    @property
    def peers(self) -> int:
        """Number of connected peers."""
        with self._changed:
            return len(self._peers)

    def _withdraw(self, key: Key) -> None:
        segment = self._segments.pop(key, None)
        if segment is None:
            return
        _close(segment.descriptor)
        for peer in [p for p in self._peers if key in p.held]:
            self._tell(peer, frames.Revoke(key[0], key[1]))

    def _holders(self, key: Key) -> list[str]:
        return sorted(p.name for p in self._peers if key in p.held)

    def _accept(self) -> None:
        listener = self._sock
        if listener is None:
            return
        sock, _ = listener.accept()
        sock.setblocking(False)
        peer = _Peer(sock, time.monotonic() + _HELLO_SECONDS)
        uid = frames.peer_uid(sock)
        if uid != self._uid:
            error = AuthError(
                "a process of another user asked for memory", expected=f"uid {self._uid}", found=f"uid {uid}"
            )
            self._tell(peer, frames.Denied(error.to_wire()))
            sock.close()
            return
        with self._changed:
            self._peers.add(peer)
        self._loop.watch(sock, lambda: self._readable(peer), lambda _error: self._drop(peer))

    def _listener_failed(self, error: BaseException) -> None:
        """Keep listening after a failed accept (no descriptors left, say): the next may have more luck."""
        with self._changed:
            sock = self._sock
        if sock is not None and isinstance(error, OSError):
            time.sleep(0.01)
            self._loop.watch(sock, self._accept, self._listener_failed)

    def _readable(self, peer: _Peer) -> None:
        data, _ = frames.receive(peer.sock, descriptors=False)
        if not data:
            self._drop(peer)
            return
        for message, _ in peer.inbox.feed(data, []):
            with self._changed:
                self._answer(peer, message)

    def _answer(self, peer: _Peer, message: frames.Message) -> None:
        try:
            if isinstance(message, frames.Hello):
                self._greet(peer, message)
            elif not peer.name:
                raise AuthError(
                    "a peer that did not say who it is", expected="hello", found=type(message).__name__
                )
            elif isinstance(message, frames.Fetch):
                self._serve(peer, message)
            elif isinstance(message, frames.Released):
                peer.held -= {k for k in peer.held if k[:2] == (message.region, message.generation)}
                self._changed.notify_all()
        except SynclineError as error:
            about = (message.region, message.generation) if isinstance(message, frames.Fetch) else (-1, -1)
            self._tell(peer, frames.Denied(to_wire(error), *about))

    def _greet(self, peer: _Peer, hello: frames.Hello) -> None:
        if hello.version != frames.VERSION:
            raise WireVersionError(
                "another version of segment frames", expected=frames.VERSION, found=hello.version
            )
        if hello.job != self._job:
            raise AuthError("a peer of another job", expected=self._job, found=hello.job)
        if hello.server != self._id:
            raise FencedError(
                "the process that was meant is gone and its address is another's now",
                expected=hello.server,
                found=self._id,
            )
        peer.name = hello.name or "an unnamed peer"
        self._tell(peer, frames.Welcome())

    def _serve(self, peer: _Peer, fetch: frames.Fetch) -> None:
        point("shm.before_descriptor")
        key = (fetch.region, fetch.generation, fetch.fence.epoch)
        segment = self._segments.get(key)
        if fetch.fence.job != self._job or segment is None:
            raise self._refusal(fetch)
        if fetch.nbytes != segment.region.nbytes:
            raise TransportError(
                "a ticket that lies about its region's size",
                expected=segment.region.nbytes,
                found=fetch.nbytes,
            )
        peer.held.add(key)
        answer = frames.Segment(fetch.region, fetch.generation, fetch.nbytes, int(segment.region.kind))
        self._hand_over(peer, answer, segment)

    def _keep(self, descriptor: int, region: Region) -> int:
        """Return what is kept to hand a region out, or -1 for nothing."""
        return _read_only(descriptor, region.nbytes)

    def _hand_over(self, peer: _Peer, answer: frames.Segment, segment: _Segment) -> None:
        self._tell(peer, answer, segment.descriptor)

    def _refusal(self, fetch: frames.Fetch) -> SynclineError:
        same = [k for k in self._segments if k[0] == fetch.region]
        epochs = sorted({k[2] for k in self._segments})
        if epochs and fetch.fence.epoch not in epochs:
            return FencedError(
                "a ticket of another epoch", expected=f"one of {epochs}", found=fetch.fence.epoch
            )
        generations = [k[1] for k in same] or "none"
        return RevokedError(
            f"region {fetch.region} is not handed out (any more)",
            expected=f"generation {generations}",
            found=f"generation {fetch.generation}",
            hint="ask the MetaServer for the newest binding",
        )

    def _tell(self, peer: _Peer, message: frames.Message, descriptor: int = -1) -> None:
        # A peer that is gone is dropped when its connection ends; one that does not read stays a holder.
        with contextlib.suppress(OSError):
            frames.send(peer.sock, message, descriptor)

    def _drop(self, peer: _Peer) -> None:
        self._loop.forget(peer.sock)
        with self._changed:
            self._peers.discard(peer)
            self._changed.notify_all()
        peer.inbox.close()
        peer.sock.close()

    def _drop_silent(self, now: float) -> None:
        with self._changed:
            late = [p for p in self._peers if not p.name and now > p.until]
        for peer in late:
            self._drop(peer)


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def _read_only(descriptor: int, nbytes: int) -> int:
    """Return a read-only descriptor of the same file, which nobody can map writable."""
    size = os.fstat(descriptor).st_size
    if size < nbytes:
        raise TransportError("a region longer than its file", expected=f"at least {nbytes} bytes", found=size)
    copy = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    if fcntl.fcntl(copy, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
        os.close(copy)
        raise TransportError("a descriptor that is not read-only would have been handed out")
    return copy
