"""Frames between a MetaServer and its clients.

A frame is one ZeroMQ message part: a prologue of 24 bytes, little-endian, that stays as it is in every wire
version, then a payload in MessagePack::

    4 bytes  magic "SYNM"
    u16      wire version
    u16      kind
    u64      id of the request that the frame is, or answers
    u64      boot number of the server: of the sender's, or the one that a client means; 0 before it knows

Payloads are typed structs; nothing that arrives can name code to run. A declared length beyond the bytes that
are there fails to decode without an allocation; the size of a frame is bounded by ``Options.max_frame``,
which the sockets enforce before they read one.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from syncline.errors import ProtocolError, SynclineError, WireVersionError, from_wire, to_wire
from syncline.protocol.messages import Reply, Request

WIRE_VERSION = 1
LARGE = 64 << 10  # from this many bytes on, a frame is handed to ZeroMQ without a copy
_MAGIC = b"SYNM"
_PROLOGUE = struct.Struct("<4sHHQQ")
PROLOGUE_NBYTES = _PROLOGUE.size


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    WELCOME = 2
    REQUEST = 3
    REPLY = 4
    ERROR = 5


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A client's first frame on a connection."""

    job: str
    process: str
    library: str


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The server's answer: who it is, and the largest frame that it reads."""

    job: str
    library: str
    max_frame: int


class Frame(NamedTuple):
    """A frame taken apart; the payload is not decoded yet."""

    version: int
    kind: int
    request: int
    boot: int
    payload: memoryview


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)
_hello = msgspec.msgpack.Decoder(Hello)
_welcome = msgspec.msgpack.Decoder(Welcome)
_errors = msgspec.msgpack.Decoder(dict[str, str | None])


def pack(kind: Kind, request: int, boot: int, payload: msgspec.Struct | SynclineError) -> bytes:
    """Return the frame that carries ``payload``."""
    head = bytearray(_PROLOGUE.pack(_MAGIC, WIRE_VERSION, kind, request, boot))
    body = to_wire(payload) if isinstance(payload, BaseException) else payload
    _encoder.encode_into(body, head, PROLOGUE_NBYTES)
    return bytes(head)


def unpack(data: bytes | bytearray | memoryview) -> Frame:
    """Take a frame apart; its payload stays encoded.

    Raises:
        ProtocolError: not a frame of ours, whatever its version.
    """
    view = memoryview(data)
    if len(view) < PROLOGUE_NBYTES:
        raise ProtocolError("not a frame", expected=f"at least {PROLOGUE_NBYTES} bytes", found=len(view))
    magic, version, kind, request, boot = _PROLOGUE.unpack_from(view)
    if magic != _MAGIC:
        raise ProtocolError("not a frame", expected=f"magic {_MAGIC!r}", found=repr(magic))
    return Frame(version, kind, request, boot, view[PROLOGUE_NBYTES:])


def check_version(frame: Frame, sender: str) -> None:
    """Refuse a frame of another wire version.

    Raises:
        WireVersionError: naming both versions.
    """
    if frame.version != WIRE_VERSION:
        raise WireVersionError(
            f"{sender} speaks another version of the wire format",
            expected=WIRE_VERSION,
            found=frame.version,
            hint="install the same syncline for all processes of the job",
        )


def decode_request(payload: memoryview) -> Request:
    """Return the request in a REQUEST frame.

    Raises:
        ProtocolError: damaged, of unknown type, or with fields of a wrong type.
    """
    return _decode(_requests, payload)


def decode_reply(payload: memoryview) -> Reply:
    """Return the reply in a REPLY frame; raises as `decode_request`."""
    return _decode(_replies, payload)


def decode_hello(payload: memoryview) -> Hello:
    """Return what a HELLO frame says; raises as `decode_request`."""
    return _decode(_hello, payload)


def decode_welcome(payload: memoryview) -> Welcome:
    """Return what a WELCOME frame says; raises as `decode_request`."""
    return _decode(_welcome, payload)


def decode_error(payload: memoryview) -> SynclineError:
    """Return the error in an ERROR frame, of its own class if known here; raises as `decode_request`."""
    return from_wire(_decode(_errors, payload))


def check_size(nbytes: int, limit: int, what: str) -> None:
    """Refuse a frame that the other side would not read.

    Raises:
        ProtocolError: naming what is too large, and the option.
    """
    if nbytes > limit:
        raise ProtocolError(
            f"{what} is too large for one frame",
            expected=f"at most {limit} bytes",
            found=f"{nbytes} bytes",
            hint="raise Options.max_frame (SYNCLINE_MAX_FRAME) in all processes of the job",
        )


def _decode(decoder: msgspec.msgpack.Decoder[Any], payload: memoryview) -> Any:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(
            "a frame's payload cannot be decoded",
            found=str(error) or type(error).__name__,
            hint="sender and receiver run different versions, or the sender is not syncline",
        ) from error
