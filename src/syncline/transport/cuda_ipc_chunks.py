"""Descriptors of virtual memory, handed over a Unix socket of their own, a batch at a time.

Ordinary allocations need one handle of 64 bytes. A range of virtual memory is made of many pieces, each
with a descriptor: they are made when asked for and closed when sent, so that neither side ever holds more
than a batch. One packet asks, one answers.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from typing import TYPE_CHECKING, TypeVar

import msgspec

from syncline.errors import SynclineError, TransportError, from_wire, to_wire
from syncline.transport import frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from syncline.transport.loop import Loop

BATCH = 64
"""Descriptors in one packet; the kernel allows 253."""
_PACKET = 1 << 14
_T = TypeVar("_T")


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """Which pieces are wanted: ``secret`` is the region's, from its description."""

    secret: bytes
    first: int


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """How many descriptors come with the packet, or why none do."""

    count: int
    error: dict[str, str | None] | None = None


class ChunkServer:
    """Answers peers of the same user.

    Args:
        path: of the socket; must not exist.
        loop: the thread that serves; owned by the caller.
        export: returns new descriptors of pieces ``first`` to ``first + count`` of the region with a secret.
    """

    def __init__(self, path: Path, loop: Loop, export: Callable[[bytes, int, int], list[int]]) -> None:
        self._path, self._loop, self._export = path, loop, export
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._peers: set[socket.socket] = set()
        try:
            with _short(path) as name:
                self._sock.bind(name)
            path.chmod(0o600)
            self._sock.listen(64)
            self._sock.setblocking(False)
        except OSError as error:
            self._sock.close()
            raise TransportError(f"cannot listen at {path}", found=error) from error
        loop.watch(self._sock, self._accept, lambda _error: None)

    def close(self) -> None:
        """Stop listening, hang up, remove the socket."""
        for sock in (self._sock, *self._peers):
            self._loop.forget(sock)
            sock.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        sock, _ = self._sock.accept()
        if frames.peer_uid(sock) != os.geteuid():
            sock.close()
            return
        sock.setblocking(False)
        self._peers.add(sock)
        self._loop.watch(sock, lambda: self._answer(sock), lambda _error: self._drop(sock))

    def _drop(self, sock: socket.socket) -> None:
        self._loop.forget(sock)
        self._peers.discard(sock)
        sock.close()

    def _answer(self, sock: socket.socket) -> None:
        data = sock.recv(_PACKET)
        if not data:
            self._drop(sock)
            return
        descriptors: list[int] = []
        try:
            ask = _decoded(data, Ask)
            descriptors = self._export(ask.secret, ask.first, BATCH)
            answer = Answer(len(descriptors))
        except SynclineError as error:
            answer = Answer(0, to_wire(error))
        try:
            _send(sock, answer, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


class Chunks:
    """A peer's pieces, fetched in order.

    Args:
        path: of its `ChunkServer`.
        deadline: seconds for each packet.
    """

    def __init__(self, path: Path, deadline: float) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._sock.settimeout(deadline)
        try:
            with _short(path) as name:
                self._sock.connect(name)
        except OSError as error:
            self._sock.close()
            raise TransportError("a peer's virtual memory cannot be asked for", found=error) from error

    def fetch(self, secret: bytes, count: int) -> Iterator[int]:
        """Yield ``count`` descriptors; each is closed when the next is asked for.

        Raises:
            TransportError: the peer refused, or did not answer.
        """
        first = 0
        while first < count:
            batch = self._batch(secret, first)
            try:
                for descriptor in batch[: count - first]:
                    yield descriptor
            finally:
                for descriptor in batch:
                    os.close(descriptor)
            first += len(batch)

    def close(self) -> None:
        """Hang up."""
        self._sock.close()

    def _batch(self, secret: bytes, first: int) -> list[int]:
        size = array.array("i").itemsize
        space = socket.CMSG_SPACE(BATCH * size)
        try:
            _send(self._sock, Ask(secret, first), [])
            data, ancillary, flags, _ = self._sock.recvmsg(_PACKET, space, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise TransportError("a peer did not hand over its virtual memory", found=error) from error
        received = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received.frombytes(payload[: len(payload) - len(payload) % size])
        descriptors = received.tolist()
        answer = _decoded(data, Answer) if data else Answer(0)
        whole = not flags & socket.MSG_CTRUNC and answer.count == len(descriptors) > 0
        if answer.error is None and whole:
            return descriptors
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        if answer.error is not None:
            raise from_wire(answer.error)
        raise TransportError(
            "descriptors were lost on the way", expected=answer.count, found=len(descriptors)
        )


def _decoded(data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise TransportError("a packet that is none of ours", found=error) from error


def _send(sock: socket.socket, message: msgspec.Struct, descriptors: list[int]) -> None:
    rights = []
    if descriptors:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    sock.sendmsg([msgspec.msgpack.encode(message)], rights, socket.MSG_NOSIGNAL)


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a name of the socket short enough for an address: by way of its directory."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
