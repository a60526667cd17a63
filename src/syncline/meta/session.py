"""A client's I/O thread: one connection at a time, the requests in flight, refills, heartbeats.

Everything runs in that thread, except `Session.submit` and `Session.stop`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import zmq

from syncline.errors import DeadlineError, ProtocolError, SynclineError
from syncline.meta import wire
from syncline.meta.link import Link, LinkState
from syncline.meta.refill import across_restart
from syncline.meta.versions import library_version
from syncline.protocol import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncline.meta.discovery import Discovery
    from syncline.meta.roster import Answer, Roster

logger = logging.getLogger(__name__)

_LOOK_AGAIN = 0.02  # between two looks for a server that is not there yet
_SEARCH_TICK, _READY_TICK = 0.1, 1.0
_REFUSED_PAUSE = 0.5  # before a server that refused us is asked again
_GRACE = 0.5  # the server's own deadline error says more: it gets this long to arrive


@dataclass(slots=True)
class Call:
    """One request on its way.

    Attributes:
        deadline: absolute, monotonic; infinity for the session's own requests, which end with a connection.
        seconds: the deadline as the caller gave it.
        done: gets the reply or the error, in the I/O thread.
        boot: the server that it is meant for, which may have received it; 0 if none was known.
        under_way: whether it was sent on the connection that stands.
    """

    message: m.Message
    deadline: float
    seconds: float
    done: Callable[[Answer], None]
    boot: int = 0
    under_way: bool = False

    @property
    def own(self) -> bool:
        """Whether the session made the request: the roster's, which knows it."""
        return self.deadline == math.inf

    @property
    def waits(self) -> bool:
        """Whether the server may defer the answer, and ends the wait itself."""
        return hasattr(self.message, "deadline")


class Session:
    """The state of one client's conversation with whichever server serves the job, and its thread.

    Attributes:
        boot: boot number of the server that was met last, 0 before; read by other threads.
        endpoint: its address.
        ready: set while requests can be sent: greeted, and refilled if it is a new server.
    """

    def __init__(self, discovery: Discovery, roster: Roster, process: str, max_frame: int) -> None:
        self._discovery, self._roster, self._process, self._max_frame = discovery, roster, process, max_frame
        self.boot, self.endpoint = 0, ""
        self.ready = threading.Event()
        self._identity = b"c" + os.urandom(15)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._link: Link | None = None
        self._refusal: SynclineError | None = None
        self._reopen_at = 0.0
        self._calls: dict[int, Call] = {}
        self._inbox: deque[Call] = deque()
        self._last_id = self._hello = 0
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="syncline-meta-client", daemon=True)
        self._thread.start()

    # --- from other threads

    def submit(self, message: m.Message, seconds: float) -> Future[m.Message]:
        """Send a request; the future ends after ``seconds`` and a moment at the latest."""
        future: Future[m.Message] = Future()

        def done(answer: Answer) -> None:
            try:
                if isinstance(answer, SynclineError):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
            except InvalidStateError:
                logger.debug("the answer to %s was cancelled", type(message).__name__)

        self._inbox.append(Call(message, time.monotonic() + seconds, seconds, done, self.boot))
        if self._stopping and not self._thread.is_alive():
            self._fail_all(_closed())
        else:
            os.eventfd_write(self._wake, 1)
        return future

    def stop(self, deadline: float) -> None:
        """End the thread and whatever is in flight, and free sockets and descriptors.

        Raises:
            DeadlineError: the thread does not end.
        """
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(deadline)
        if self._thread.is_alive():
            raise DeadlineError(f"the MetaClient's thread did not end within {deadline:g} s")
        self._fail_all(_closed())
        os.close(self._wake)

    # --- the thread

    def _run(self) -> None:
        error = _closed()
        try:
            while not self._stopping:
                self._turn()
        except BaseException as failure:
            logger.exception("the MetaClient's thread failed")
            error = SynclineError("the MetaClient's thread failed", found=failure)
        finally:
            self._stopping = True
            self._drop_link()
            self._fail_all(error)
            self._context.term()

    def _turn(self) -> None:
        now = time.monotonic()
        if self._link is None and now >= self._reopen_at:
            self._open(now)
        awake = {source for source, _ in self._poller.poll(math.ceil(self._pause(now) * 1e3))}
        if self._wake in awake:
            self._take_calls()
        link = self._link
        if link is not None and (link.monitor in awake or not self.ready.is_set()):
            self._watch(link)
        if link is not None and link.socket in awake:
            self._receive(link)
        now = time.monotonic()
        self._expire(now)
        if self.ready.is_set():
            self._roster.beat(now, self._ask)

    def _pause(self, now: float) -> float:
        ready = self.ready.is_set()
        times = [now + (_READY_TICK if ready else _SEARCH_TICK)]
        times += [self._end(call) for call in self._calls.values()]
        times += [self._roster.next_beat()] if ready else []
        times += [self._reopen_at] if self._link is None else []
        return max(0.0, min(times) - now)

    def _take_calls(self) -> None:
        os.eventfd_read(self._wake)
        while self._inbox:
            call = self._inbox.popleft()
            if self._refusal is not None:
                call.done(self._refusal)
            else:
                self._enter(call)

    def _enter(self, call: Call) -> None:
        self._last_id += 1
        self._calls[self._last_id] = call
        if self.ready.is_set() or call.own:
            self._send(self._last_id, call)

    def _ask(self, message: m.Message, done: Callable[[Answer], None]) -> None:
        """Send a request of the session's own."""
        self._enter(Call(message, math.inf, math.inf, done))

    # --- connection

    def _open(self, now: float) -> None:
        try:
            found = self._discovery.look()
        except SynclineError as error:
            self._refuse(error)
            return
        if found is None:
            self._reopen_at = now + _LOOK_AGAIN
            return
        self.endpoint = found.endpoint
        try:
            self._link = Link(self._context, found.endpoint, found.keys, self._identity, self._max_frame)
        except zmq.ZMQError as error:
            self._refuse(SynclineError(f"cannot connect to {found.endpoint}", found=error))
            return
        self._poller.register(self._link.monitor, zmq.POLLIN)
        self._poller.register(self._link.socket, zmq.POLLIN)

    def _drop_link(self) -> None:
        self.ready.clear()
        link, self._link = self._link, None
        if link is not None:
            self._poller.unregister(link.monitor)
            self._poller.unregister(link.socket)
            link.close()
        self._hello = 0
        self._calls = {number: call for number, call in self._calls.items() if not call.own}
        for call in self._calls.values():
            call.under_way = False
        self._roster.disconnected()

    def _refuse(self, error: SynclineError) -> None:
        """Fail what waits, and what comes until a server takes us in."""
        self._drop_link()
        self._refusal, self._reopen_at = error, time.monotonic() + _REFUSED_PAUSE
        self._fail_all(error)

    def _watch(self, link: Link) -> None:
        link.watch()
        if link.state is LinkState.REFUSED and link.refusal is not None:
            self._refuse(link.refusal)
        elif link.state is LinkState.LOST:
            self._drop_link()
            self._reopen_at = time.monotonic() + _LOOK_AGAIN
        elif link.state is LinkState.OPEN and not self._hello:
            self._last_id += 1
            self._hello = self._last_id
            self._write(wire.Kind.HELLO, self._hello, self._greeting())
        elif not self.ready.is_set():
            self._look_for_another(link)

    def _look_for_another(self, link: Link) -> None:
        """Give up a server that does not take us in once the job has one at another address."""
        try:
            moved = self._discovery.moved(link.endpoint)
        except SynclineError as error:
            self._refuse(error)
            return
        if moved:
            self._drop_link()

    def _greeting(self) -> wire.Hello:
        return wire.Hello(self._discovery.job, self._process, library_version())

    def _welcome(self, boot: int) -> None:
        """Go on with the server we had, or refill a new one first."""
        if self.boot not in (0, boot):
            logger.info("the MetaServer at %s was restarted: boot %d", self.endpoint, boot)
        self.boot, self._refusal = boot, None
        self._roster.refill(boot, self._ask, self._resume)

    def _resume(self) -> None:
        self.ready.set()
        for number, call in list(self._calls.items()):
            if not call.under_way:
                self._send(number, call)

    # --- frames

    def _send(self, number: int, call: Call) -> None:
        try:
            if call.boot not in (0, self.boot):
                call.message = across_restart(call.message)
            message = self._roster.current(call.message)
            left = call.deadline - time.monotonic()
            if call.waits and left < message.deadline:  # pyright: ignore[reportAttributeAccessIssue]
                message = msgspec.structs.replace(message, deadline=max(0.0, left))
            self._roster.sent(message)
            self._write(wire.Kind.REQUEST, number, message)
        except SynclineError as error:
            del self._calls[number]
            call.done(error)
        else:
            call.boot, call.under_way = self.boot, True

    def _write(self, kind: wire.Kind, number: int, payload: msgspec.Struct) -> None:
        frame = wire.pack(kind, number, self.boot, payload)
        wire.check_size(len(frame), self._max_frame, type(payload).__name__)
        if self._link is not None:
            self._link.socket.send(frame, zmq.NOBLOCK, copy=len(frame) < wire.LARGE)

    def _receive(self, link: Link) -> None:
        while self._link is link:
            try:
                data = link.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(data)

    def _take(self, data: bytes) -> None:
        try:
            frame = wire.unpack(data)
            answer = self._decode(frame)
        except SynclineError as error:
            self._refuse(error)
            return
        if isinstance(answer, wire.Welcome):
            self._welcome(frame.boot)
            return
        if frame.request == self._hello and isinstance(answer, SynclineError):
            self._refuse(answer)
            return
        call = self._calls.pop(frame.request, None)
        if call is None:
            logger.debug("an answer came for request %d, which nobody waits for", frame.request)
            return
        if isinstance(answer, m.Message) and not call.own:
            self._roster.answered(call.message, answer)
        call.done(answer)

    def _decode(self, frame: wire.Frame) -> Answer | wire.Welcome:
        if frame.kind == wire.Kind.ERROR:
            return wire.decode_error(frame.payload)  # readable in any version: it may say which is wrong
        wire.check_version(frame, f"the MetaServer at {self.endpoint}")
        if frame.kind == wire.Kind.WELCOME:
            return wire.decode_welcome(frame.payload)
        if frame.kind == wire.Kind.REPLY:
            return wire.decode_reply(frame.payload)
        raise ProtocolError("not a frame for a client", found=f"kind {frame.kind}")

    # --- ends

    def _end(self, call: Call) -> float:
        return call.deadline + (_GRACE if call.waits and call.under_way else 0.0)

    def _expire(self, now: float) -> None:
        for number in [number for number, call in self._calls.items() if self._end(call) <= now]:
            call = self._calls.pop(number)
            call.done(self._late(call))

    def _late(self, call: Call) -> DeadlineError:
        what, seconds = type(call.message).__name__, f"{call.seconds:g} s"
        if self._link is None and not self.endpoint:
            return DeadlineError(
                f"{what}: job {self._discovery.job!r} has no MetaServer after {seconds}",
                expected=self._discovery.place,
                found="neither",
                hint="start the trainer or `syncline serve` with the same job name and SYNCLINE_RUN_DIR",
            )
        found = self._link.found if self._link is not None else "the connection was lost"
        return DeadlineError(
            f"the MetaServer at {self.endpoint} did not answer {what} within {seconds}",
            found=f"boot {self.boot}, no answer yet" if self.ready.is_set() else found,
            hint="the embedded MetaServer ends with trainer rank 0; `syncline serve` outlives its trainers",
        )

    def _fail_all(self, error: SynclineError) -> None:
        calls, self._calls = self._calls, {}
        for call in [*calls.values(), *self._drain()]:
            call.done(error)

    def _drain(self) -> list[Call]:
        found = []
        while self._inbox:
            found.append(self._inbox.popleft())
        return found


def _closed() -> ProtocolError:
    return ProtocolError("the MetaClient was closed", hint="make another one")
