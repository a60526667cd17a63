"""The job's MetaServer: sockets, frames and files around one `JobState`, in one thread.

The thread answers each request as it comes, sends deferred answers as soon as they are decided, and wakes up
for the next lease, stall or deadline. It holds nothing that its clients cannot tell its successor, except the
boot number and the epochs, which are on disk before an answer that shows them leaves.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import traceback
from typing import TYPE_CHECKING, Self

import msgspec
import zmq

from syncline.errors import DeadlineError, ProtocolError, SynclineError, to_wire
from syncline.faults import point
from syncline.meta import address, wire
from syncline.meta.blobs import check_binding, check_manifest
from syncline.meta.keys import JobKeys
from syncline.meta.rundir import JobDir, ServerState
from syncline.meta.versions import library_version
from syncline.meta.zap import DOMAIN, Gatekeeper
from syncline.options import Options
from syncline.protocol import messages as m
from syncline.protocol.job import Deferred, JobState, Timing

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from syncline.meta.locks import FileLock

logger = logging.getLogger(__name__)

_IDLE_WAIT = 1.0
_SHORTEST_WAIT = 0.002
_BATCH = 256  # requests handled before deferred answers and deadlines get their turn
_STOP_PATIENCE = 10.0
_DEAF = 0.25  # seconds; a longer pause does not count for leases and deadlines


class ListeningClock:
    """Monotonic seconds that count only while the server listens.

    Heartbeats that lie unread while it is suspended, or busy with one long request, must not cost their
    senders the lease. The time is therefore that of the last `look`, and stands still between two of them:
    wherever a suspension strikes, the next look leaves it out.
    """

    def __init__(self) -> None:
        self._lost = 0.0
        self._seen = time.monotonic()

    def look(self, planned: float = 0.0) -> float:
        """Return the time; what passed since the last look counts if not much over ``planned`` seconds."""
        now = time.monotonic() - self._lost
        passed = now - self._seen
        if passed > planned + _DEAF:
            self._lost += passed
        else:
            self._seen = now
        return self._seen


class MetaServer:
    """Serve one job until `stop`.

    Args:
        job: the job's name.
        bind: address or host name to listen at; loopback unless told otherwise. A wildcard (``0.0.0.0``,
            ``::``) is advertised as an address of this host.
        port: TCP port; 0 takes the port of the server before it if that is free, else any.
        options: leases, stalls, bounds.
        recovery: seconds that a restarted server waits for the writers of before.
        root: directory of the run directories; `run_root` by default.

    Attributes:
        endpoint: where clients connect; valid after `start`.
        boot: boot number; valid after `start`.
        rejected: frames and handshakes refused so far.
    """

    def __init__(
        self,
        job: str,
        bind: str = "127.0.0.1",
        port: int = 0,
        *,
        options: Options | None = None,
        recovery: float = 30.0,
        root: Path | None = None,
    ) -> None:
        self.job, self.endpoint, self.boot = job, "", 0
        self._bind, self._port, self._root = bind, port, root
        self._options = options or Options.from_environment()
        self._recovery = recovery
        self._clock = ListeningClock()
        self._bad_frames = 0
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._failure: BaseException | None = None

    # --- start and stop, in the caller's thread

    def start(self) -> Self:
        """Take the job's lock, a new boot number and a port, and serve in a thread of its own.

        Raises:
            ProtocolError: the job has a live MetaServer; the message names its process.
            AuthError: the run directory is not safely ours, or the token is too short.
            SynclineError: the port is taken; the message names it and the option.
        """
        if self._thread is not None:
            raise ProtocolError("this MetaServer was started already")
        self._dir, self._lock = _claim(self.job, self._root)
        try:
            self._dir.sweep()
            before = self._dir.load_state()
            keys = JobKeys.derive(self._dir.token(), self.job)
            self._open(keys, before.port)
        except BaseException:
            self._lock.release()
            raise
        self.boot = before.boot + 1
        self._record = ServerState(self.boot, before.epochs, self._bound_port)
        try:
            self._dir.store_state(self._record)
            timing = Timing(lease=self._options.lease, stall=self._options.stall, recovery=self._recovery)
            self._state = JobState(
                self.job, boot=self.boot, epochs=before.epochs, timing=timing, now=self._clock.look()
            )
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            self._close_sockets()
            self._lock.release()
            raise
        self._waiting: dict[int, tuple[bytes, int]] = {}
        self._tickets: dict[tuple[bytes, int], int] = {}
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"syncline-meta-{self.job}", daemon=True)
        self._thread.start()
        self._dir.publish_endpoint(self.endpoint, self.boot)
        return self

    def stop(self) -> None:
        """Stop serving and leave nothing behind; a second call does nothing.

        Clients keep what they know and refill the next server.

        Raises:
            DeadlineError: the thread does not end.
        """
        if self._thread is None or self._stopping.is_set() or self._owner != os.getpid():
            return
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join(_STOP_PATIENCE)
        if self._thread.is_alive():
            raise DeadlineError(f"the MetaServer's thread did not end within {_STOP_PATIENCE:g} s")
        os.close(self._wake)
        self._dir.withdraw_endpoint()
        self._lock.release()

    def wait(self, deadline: float) -> bool:
        """Wait ``deadline`` seconds for the thread to end; say whether it did.

        Raises:
            SynclineError: it ended by a failure of its own.
        """
        if self._thread is None:
            raise ProtocolError("this MetaServer was not started")
        self._thread.join(deadline)
        if self._failure is not None:
            raise SynclineError("the MetaServer failed", found=self._failure) from self._failure
        return not self._thread.is_alive()

    @property
    def rejected(self) -> int:
        """Frames and handshakes refused so far."""
        return self._bad_frames + self._gate.refused

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _open(self, keys: JobKeys, former_port: int) -> None:
        host = address.resolve(self._bind)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._gate = Gatekeeper(self._context, keys.client.public)
        self._router = self._context.socket(zmq.ROUTER)
        options = {
            zmq.LINGER: 0,
            zmq.IPV6: int(":" in host),
            zmq.ROUTER_MANDATORY: 1,
            zmq.ROUTER_HANDOVER: 1,  # a client that reconnects keeps its name, and the answers it waits for
            zmq.MAXMSGSIZE: self._options.max_frame,
            zmq.HANDSHAKE_IVL: 5000,
            zmq.CURVE_SERVER: 1,
            zmq.CURVE_SECRETKEY: keys.server.secret,
            zmq.ZAP_DOMAIN: DOMAIN,
        }
        for option, value in options.items():
            self._router.setsockopt(option, value)
        try:
            self._bind_port(host, former_port)
        except BaseException:
            self._close_sockets()
            raise
        self._bound_port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.endpoint = address.endpoint(address.connectable(host), self._bound_port)

    def _bind_port(self, host: str, former_port: int) -> None:
        if self._port == 0 and former_port:
            try:
                self._router.bind(address.endpoint(host, former_port))
            except zmq.ZMQError:
                logger.info("port %d of the former MetaServer is taken; choosing another", former_port)
            else:
                return
        try:
            self._router.bind(address.endpoint(host, self._port or "*"))
        except zmq.ZMQError as error:
            raise SynclineError(
                f"cannot listen at {address.endpoint(host, self._port)}",
                found=error,
                hint=f"port {self._port} (option port=, --port) is taken, or bind={self._bind!r} is not an"
                " address of this host; port 0 takes a free port",
            ) from error

    def _close_sockets(self) -> None:
        self._router.close(0)
        self._gate.close()
        self._context.term()

    # --- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._gate.socket, self._router, self._wake):
            poller.register(source, zmq.POLLIN)
        longest = min(_IDLE_WAIT, self._options.lease / 4)  # as much of a suspension may count
        try:
            while not self._stopping.is_set():
                wake = self._state.next_wake(self._clock.look())
                pause = max(min(wake, longest), _SHORTEST_WAIT)
                awake = {source for source, _ in poller.poll(math.ceil(pause * 1e3))}
                self._clock.look(pause)
                if self._gate.socket in awake:
                    self._admit()
                if self._router in awake:
                    self._serve()
                else:
                    self._state.tick(self._clock.look())
                    self._after()
        except BaseException as error:
            self._failure = error
            logger.exception("the MetaServer of job %s failed", self.job)
        finally:
            self._close_sockets()

    def _admit(self) -> None:
        while self._gate.socket.poll(0):
            self._gate.answer()

    def _serve(self) -> None:
        for _ in range(_BATCH):
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) == 2:
                self._take(*parts)
            else:
                self._bad_frames += 1

    def _take(self, client: bytes, data: bytes) -> None:
        try:
            frame = wire.unpack(data)
        except ProtocolError:
            self._bad_frames += 1  # nothing in it says what to answer to
            return
        try:
            wire.check_version(frame, "this client")
            answer = self._answer(client, frame)
        except SynclineError as error:
            self._send(client, wire.Kind.ERROR, frame.request, error)
        except Exception as error:
            logger.exception("a request failed in the MetaServer")
            fields = to_wire(error, traceback.format_exc())
            failure = SynclineError(
                fields["what"] or "", found=fields["found"], hint="this is a bug of the MetaServer"
            )
            self._send(client, wire.Kind.ERROR, frame.request, failure)
        else:
            if answer is not None:
                self._send(client, *answer)
        self._after()

    def _answer(self, client: bytes, frame: wire.Frame) -> tuple[wire.Kind, int, msgspec.Struct] | None:
        if frame.kind == wire.Kind.HELLO:
            self._greet(wire.decode_hello(frame.payload))
            welcome = wire.Welcome(self.job, library_version(), self._options.max_frame)
            return wire.Kind.WELCOME, frame.request, welcome
        if frame.kind != wire.Kind.REQUEST:
            self._bad_frames += 1
            raise ProtocolError("not a frame for a server", found=f"kind {frame.kind}")
        if frame.boot != self.boot or (client, frame.request) in self._tickets:
            # Meant for the server before this one: its sender will greet, refill and ask again. Or sent again
            # after a reconnection, and the answer is still to come.
            return None
        try:
            request = wire.decode_request(frame.payload)
        except ProtocolError:
            self._bad_frames += 1
            raise
        if isinstance(request, m.PutManifest):
            check_manifest(self._state.core.manifests, request, self._options.max_frame)
        if isinstance(request, m.PutBinding):
            check_binding([len(one.blob) for one in self._state.core.bindings.values()], request)
        point("meta.before_handle")
        reply = self._state.handle(request, self._clock.look())
        if self._state.epochs != self._record.epochs:
            record = msgspec.structs.replace(self._record, epochs=self._state.epochs)
            self._dir.store_state(record)
            self._record = record
        point("meta.before_reply")
        if isinstance(reply, Deferred):
            self._waiting[reply.ticket] = (client, frame.request)
            self._tickets[client, frame.request] = reply.ticket
            return None
        return wire.Kind.REPLY, frame.request, reply

    def _greet(self, hello: wire.Hello) -> None:
        if hello.job != self.job:
            raise ProtocolError("this MetaServer serves another job", expected=self.job, found=hello.job)

    def _after(self) -> None:
        """Send what has been decided meanwhile."""
        for done in self._state.pending():
            client, request = self._waiting.pop(done.ticket)
            del self._tickets[client, request]
            if done.error is not None:
                self._send(client, wire.Kind.ERROR, request, done.error)
            elif done.reply is not None:
                self._send(client, wire.Kind.REPLY, request, done.reply)

    def _send(
        self, client: bytes, kind: wire.Kind, request: int, payload: msgspec.Struct | SynclineError
    ) -> None:
        frame = wire.pack(kind, request, self.boot, payload)
        try:
            self._router.send_multipart([client, frame], zmq.NOBLOCK, copy=len(frame) < wire.LARGE)
        except zmq.ZMQError as error:
            # Gone, or not reading: the client asks again when it is back.
            logger.debug("an answer could not be sent: %s", error)


def _claim(job: str, root: Path | None) -> tuple[JobDir, FileLock]:
    """Create the job's directory and lock it, again if a clean took it away in between."""
    for _ in range(8):
        directory = JobDir.create(job, root)
        try:
            return directory, directory.claim_server()
        except FileNotFoundError:
            continue
    raise SynclineError(f"the run directory of job {job!r} keeps disappearing", hint="who cleans it?")
