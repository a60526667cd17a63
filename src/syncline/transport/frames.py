"""What a segment server and its peers say: bounded frames of msgpack over a Unix stream socket.

A frame is a little-endian u32 length, then that many bytes of one tagged message. A `Segment` frame carries
exactly one descriptor (SCM_RIGHTS) with its first byte.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque

import msgspec

from syncline.errors import TransportError
from syncline.protocol.ids import Fence  # noqa: TC001 - msgspec reads the annotations at run time

VERSION = 1
MAX_FRAME = 1 << 16
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_MAX_DESCRIPTORS = 64


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First frame of a peer: its version, its job, who it is, and whom it means to talk to."""

    version: int
    job: str
    name: str
    server: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to a good `Hello`."""


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Ask for the descriptor behind a ticket."""

    region: int
    generation: int
    nbytes: int
    fence: Fence


class Segment(msgspec.Struct, frozen=True, tag="segment"):
    """Answer to `Fetch`, with one read-only descriptor; ``kind`` is a `memory.region.Kind`."""

    region: int
    generation: int
    nbytes: int
    kind: int


class Denied(msgspec.Struct, frozen=True, tag="denied"):
    """Answer to a `Hello` or `Fetch` that is refused: the error, and which region it was about."""

    error: dict[str, str | None]
    region: int = -1
    generation: int = -1


class Revoke(msgspec.Struct, frozen=True, tag="revoke"):
    """Server to peer: stop using this region and unmap it."""

    region: int
    generation: int


class Released(msgspec.Struct, frozen=True, tag="released"):
    """Peer to server: this region is not mapped here any more."""

    region: int
    generation: int


Message = Hello | Welcome | Fetch | Segment | Denied | Revoke | Released
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return one frame."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise TransportError(
            "a frame too long to send", expected=f"at most {MAX_FRAME} bytes", found=len(body)
        )
    return _LENGTH.pack(len(body)) + body


class Inbox:
    """Cuts a byte stream into messages, and pairs each `Segment` with its descriptor.

    Descriptors that no message claimed are closed by `close`.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._descriptors: deque[int] = deque()

    def feed(self, data: bytes, descriptors: list[int]) -> list[tuple[Message, int]]:
        """Return the messages that ``data`` completes, each with its descriptor or -1.

        Raises:
            TransportError: a frame too long, not a message, or a `Segment` without descriptor.
        """
        self._bytes += data
        self._descriptors.extend(descriptors)
        found: list[tuple[Message, int]] = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > MAX_FRAME:
                raise TransportError(
                    "a frame too long to read", expected=f"at most {MAX_FRAME} bytes", found=length
                )
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                break
            found.append(self._message(bytes(self._bytes[_LENGTH.size : end])))
            del self._bytes[:end]
        return found

    def _message(self, body: bytes) -> tuple[Message, int]:
        try:
            message = _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise TransportError("a frame that is no message", found=error) from error
        if not isinstance(message, Segment):
            return message, -1
        if not self._descriptors:
            raise TransportError("a segment came without its descriptor", found=message)
        return message, self._descriptors.popleft()

    def close(self) -> None:
        """Close descriptors that nobody claimed."""
        while self._descriptors:
            os.close(self._descriptors.popleft())


def receive(sock: socket.socket, *, descriptors: bool) -> tuple[bytes, list[int]]:
    """Read what a readable socket holds; empty bytes mean that the peer is gone.

    Args:
        sock: non-blocking.
        descriptors: whether to accept descriptors; otherwise the kernel drops them.

    Raises:
        BlockingIOError: nothing to read after all.
        OSError: the connection broke.
    """
    if not descriptors:
        return sock.recv(MAX_FRAME), []
    size = array.array("i").itemsize
    data, ancillary, flags, _ = sock.recvmsg(
        MAX_FRAME, socket.CMSG_SPACE(_MAX_DESCRIPTORS * size), socket.MSG_CMSG_CLOEXEC
    )
    received = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(payload[: len(payload) - len(payload) % size])
    if flags & socket.MSG_CTRUNC:
        for descriptor in received:
            os.close(descriptor)
        raise TransportError(
            "descriptors were lost on the way",
            hint="this process has no descriptors left: raise `ulimit -n`, or close files",
        )
    return data, received.tolist()


def send(sock: socket.socket, message: Message, descriptor: int = -1) -> None:
    """Send one frame whole; frames are small: a socket that does not take it has a peer that does not read.

    Raises:
        BlockingIOError: the peer does not read.
        OSError: the connection broke.
    """
    frame = encode(message)
    rights = []
    if descriptor >= 0:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    sent = sock.sendmsg([frame], rights, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
    if sent != len(frame):
        raise BlockingIOError("a peer that does not read")


def peer_uid(sock: socket.socket) -> int:
    """Return the user of the process at the other end, as the kernel saw it connect."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)[1]
