"""One client's connection: a DEALER socket and what its monitor says. Used by one thread."""

from __future__ import annotations

import struct
from enum import Enum, auto
from typing import TYPE_CHECKING

import zmq

from syncline.errors import AuthError

if TYPE_CHECKING:
    from syncline.errors import SynclineError
    from syncline.meta.keys import JobKeys

# A server that cannot read our first CURVE command (another token) hangs up without a word; so does one that
# dies in that moment. The former does it every time.
_SILENT_REFUSALS = 3
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 2000, 8000
_HANDSHAKE_MS = 2000
_RECONNECT_MS, _RECONNECT_MAX_MS = 30, 500

_EVENT = struct.Struct("=HI")  # event and value, as zmq_socket_monitor(3) has them

_CONNECTED = zmq.Event.CONNECTED
_OPEN = zmq.Event.HANDSHAKE_SUCCEEDED
_REFUSED = zmq.Event.HANDSHAKE_FAILED_AUTH
_MISMATCH = zmq.Event.HANDSHAKE_FAILED_PROTOCOL
_SILENT = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
_LOST = zmq.Event.DISCONNECTED
_RETRIED = zmq.Event.CONNECT_RETRIED


class LinkState(Enum):
    """Where a connection stands."""

    CONNECTING = auto()
    OPEN = auto()
    LOST = auto()
    REFUSED = auto()


class Link:
    """One attempt at a connection: a link that was lost or refused is closed, and another one made.

    Attributes:
        endpoint: the server's address.
        state: as the monitor's events tell; `watch` brings it up to date.
        refusal: why, where ``state`` is REFUSED.
        found: the state in words, for errors about waits.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: JobKeys,
        identity: bytes,
        max_frame: int,
    ) -> None:
        self.endpoint = endpoint
        self.state = LinkState.CONNECTING
        self.refusal: SynclineError | None = None
        self.found = "connecting"
        self._silent = 0
        self.socket = context.socket(zmq.DEALER)
        options = {
            zmq.LINGER: 0,
            zmq.IPV6: int("[" in endpoint),
            zmq.ROUTING_ID: identity,
            zmq.MAXMSGSIZE: max_frame,
            zmq.SNDHWM: 0,
            zmq.RCVHWM: 0,
            zmq.CURVE_SERVERKEY: keys.server.public,
            zmq.CURVE_PUBLICKEY: keys.client.public,
            zmq.CURVE_SECRETKEY: keys.client.secret,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
            zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: _HEARTBEAT_TIMEOUT_MS,
            zmq.RECONNECT_IVL: _RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: _RECONNECT_MAX_MS,
        }
        for option, value in options.items():
            self.socket.setsockopt(option, value)
        events = _CONNECTED | _OPEN | _REFUSED | _MISMATCH | _SILENT | _LOST | _RETRIED
        self.monitor = self.socket.get_monitor_socket(events)
        self.monitor.linger = 0
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def watch(self) -> None:
        """Take in what the monitor has to say."""
        while self.monitor.poll(0):
            event, _address = self.monitor.recv_multipart(zmq.NOBLOCK)
            self._take(zmq.Event(_EVENT.unpack(event)[0]))

    def _take(self, event: zmq.Event) -> None:
        if event == _OPEN:
            self.state, self.found, self._silent = LinkState.OPEN, "connected, no answer yet", 0
        elif event == _CONNECTED:
            self.found = "the connection is accepted, but the handshake does not end"
        elif event == _REFUSED:
            self._refuse("the MetaServer refused this process's key")
        elif event == _MISMATCH:
            self._refuse("no MetaServer with a job key answers here")
        elif event == _SILENT:
            self._silent += 1
            if self._silent >= _SILENT_REFUSALS:
                self._refuse("the MetaServer hung up on this process's key")
        elif event == _LOST and self.state is LinkState.OPEN:
            self.state, self.found = LinkState.LOST, "the connection was lost"
        elif event == _RETRIED and self._silent == 0:
            self.found = "nobody listens there"

    def _refuse(self, what: str) -> None:
        self.state = LinkState.REFUSED
        self.found = what
        self.refusal = AuthError(
            f"{what} ({self.endpoint})",
            expected="a key derived from the job's token",
            found="a key of another token or job",
            hint="give all processes of a job the same SYNCLINE_JOB_TOKEN (or run directory) and job name",
        )

    def close(self) -> None:
        """Close both sockets; nothing queued is sent."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)
