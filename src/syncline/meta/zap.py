"""Who may take part: the ZeroMQ authentication protocol (RFC 27), answered in the server's own thread."""

from __future__ import annotations

import zmq
from zmq.utils import z85

DOMAIN = b"syncline"
_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_PARTS = 7  # version, request id, domain, address, identity, mechanism, the client's public key


class Gatekeeper:
    """Lets in the one public key that is derived from the job's token.

    libzmq asks it within ``context`` about every CURVE handshake; it must be made before any socket is bound.

    Attributes:
        socket: to be polled; `answer` when it is readable.
        refused: handshakes refused so far.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], client_public: bytes) -> None:
        self._allowed = z85.decode(client_public)
        self.refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)

    def answer(self) -> None:
        """Answer one waiting question."""
        parts = self.socket.recv_multipart(zmq.NOBLOCK)
        good = len(parts) == _PARTS and parts[0] == _VERSION
        good = good and parts[5] == b"CURVE" and parts[6] == self._allowed
        self.refused += not good
        request = parts[1] if len(parts) > 1 else b""
        verdict = (b"200", b"OK", b"member") if good else (b"400", b"not a key of this job", b"")
        self.socket.send_multipart([_VERSION, request, *verdict, b""])

    def close(self) -> None:
        """Close the socket."""
        self.socket.close(0)
