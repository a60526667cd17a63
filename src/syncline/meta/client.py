"""A member's way to the MetaServer: requests from any thread, answered or failed by their deadline."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Self

import msgspec

from syncline.errors import ManifestError, ProtocolError, SynclineError
from syncline.layout import Manifest
from syncline.meta.discovery import Discovery
from syncline.meta.roster import Roster
from syncline.meta.session import Session
from syncline.meta.versions import library_version
from syncline.options import Options
from syncline.protocol import messages as m
from syncline.protocol.ids import blob_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

    from syncline.protocol.ids import Fence, VersionKey

_CACHED_MANIFESTS = 64
_WATCH_ROUND = 5.0
_TURN = 5.0  # in a process that goes on after a stop all clocks have run out, also that of the I/O thread
_SLACK = 5.0  # a future that outlives its deadline by this much means that the I/O thread itself is stuck


class MetaClient:
    """Talks to the MetaServer of ``job``, wherever and whichever it is by now.

    It can be made before the server exists: requests wait for one until their deadline. One I/O thread owns
    the sockets and sends heartbeats for every registration made through `request` or `register`. When a new
    server takes over, the thread registers them again, puts again what they offer, and sends again what was
    under way; fences given by an earlier server stay usable, since every request leaves with its sender's
    newest one.

    Args:
        job: the job's name.
        options: deadlines, heartbeat interval, largest frame.
        progress: returns the running count of bytes moved by this process, for its heartbeats; called from
            the I/O thread, so it must not block.
        root: directory of the run directories; `run_root` by default.

    Attributes:
        process: random text that names this process in registrations.
    """

    def __init__(
        self,
        job: str,
        options: Options | None = None,
        *,
        progress: Callable[[], int] | None = None,
        root: Path | None = None,
    ) -> None:
        self.job = job
        self.process = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
        self._options = options or Options.from_environment()
        self._discovery = Discovery(job, root)
        self._roster = Roster(self._options.heartbeat, progress)
        self._session = Session(self._discovery, self._roster, self.process, self._options.max_frame)
        self._owner = os.getpid()
        self._closing, self._closed = threading.Lock(), False
        self._cache: OrderedDict[bytes, Manifest] = OrderedDict()

    @property
    def boot(self) -> int:
        """Boot number of the server that was met last; 0 before the first."""
        return self._session.boot

    @property
    def endpoint(self) -> str:
        """Address of the server that was looked for last; empty before one was found."""
        return self._session.endpoint

    # --- requests

    def connect(self, deadline: float | None = None) -> None:
        """Wait until the server has taken this client in; ``deadline`` in seconds, else ``connect_timeout``.

        Raises:
            AuthError: no key, or not this job's.
            WireVersionError: the server speaks another version.
            DeadlineError: no server within the deadline; the message names its endpoint.
        """
        self.request(m.StatusQuery(table=""), deadline)

    def request(self, message: m.Message, deadline: float | None = None) -> Any:
        """Send one request of `syncline.protocol.messages` and return its reply.

        Args:
            message: the request; its fence may be any that its member ever had.
            deadline: seconds until the answer at the latest. By default that of the message, if it has one,
                else ``Options.connect_timeout``. A message's own deadline is cut to this one.

        Raises:
            SynclineError: what the server answered, by its class.
            AuthError, WireVersionError: it did not take this client in.
            DeadlineError: no answer in time; names the endpoint and what is known of it.
            RevokedError: the server was restarted during the update attempt that the request belongs to.
        """
        seconds = self._seconds(message, deadline)
        answer = self.submit(message, seconds)
        try:
            return _waited(answer, seconds + _SLACK)
        except TimeoutError:
            raise SynclineError(f"the I/O thread of the MetaClient of job {self.job!r} is stuck") from None
        except SynclineError as error:
            raise _fresh(error) from None

    def submit(self, message: m.Message, deadline: float | None = None) -> Future[m.Message]:
        """Send one request; the future gets what `request` returns or raises."""
        if self._owner != os.getpid():
            raise ProtocolError("this MetaClient was made before a fork", hint="make one in the child")
        if self._closed:
            raise ProtocolError("the MetaClient was closed", hint="make another one")
        if isinstance(message, m.RegisterWriter | m.RegisterReader):
            options = {"syncline": library_version()} | message.options
            message = msgspec.structs.replace(
                message, process=message.process or self.process, options=options
            )
        return self._session.submit(message, self._seconds(message, deadline))

    def _seconds(self, message: m.Message, deadline: float | None) -> float:
        if deadline is not None:
            return deadline
        return getattr(message, "deadline", self._options.connect_timeout)

    # --- members

    def register(
        self,
        message: m.RegisterWriter | m.RegisterReader,
        manifest: Manifest | None = None,
        deadline: float | None = None,
    ) -> m.Registered:
        """Register, and give the server the manifest if it lacks it; raises as `request`.

        An empty ``process`` in the message stands for this client's. The version of syncline is added to
        ``options``; all that two members both name must agree.
        """
        seconds = self._seconds(message, deadline)
        give_up = time.monotonic() + seconds
        registered: m.Registered = self.request(message, seconds)
        if manifest is not None:
            self._roster.manifests[manifest.fingerprint] = manifest
            if manifest.fingerprint in registered.missing:
                left = max(0.0, give_up - time.monotonic())
                self.put_manifest(registered.fence, manifest, left)
        return registered

    def fence(self, fence: Fence) -> Fence:
        """Return the newest fence of the member that ``fence`` belongs to.

        Raises:
            SynclineError: why its membership is over.
        """
        membership = self._roster.find(fence)
        if membership is None:
            return fence
        if membership.error is not None:
            raise _fresh(membership.error)
        return membership.fence.at(fence.attempt)

    def note(self, fence: Fence, *, committed: VersionKey | None, dirty: bool) -> None:
        """Say what a reader rank's live parameters hold, for the claims of a refill.

        Without it the client infers: dirty from the first reported byte of an attempt (right for in-place
        updates, too careful for staged ones), clean at `Applied`. An owner that calls this once tells every
        change itself, *before* it touches live memory.
        """
        membership = self._roster.find(fence)
        if membership is None:
            raise ProtocolError("no member of this client has this fence", found=fence)
        membership.note(committed=committed, dirty=dirty)

    def count_progress(self, fence: Fence, progress: Callable[[], int]) -> None:
        """Use ``progress`` (bytes moved so far; must not block) for the heartbeats of one member."""
        membership = self._roster.find(fence)
        if membership is None:
            raise ProtocolError("no member of this client has this fence", found=fence)
        membership.progress = progress

    # --- manifests

    def put_manifest(self, fence: Fence, manifest: Manifest, deadline: float | None = None) -> None:
        """Store a manifest at the server, under its fingerprint; raises as `request`."""
        self.request(m.PutManifest(fence, manifest.fingerprint, manifest.encode()), deadline)
        self._roster.manifests[manifest.fingerprint] = manifest

    def get_manifest(self, fence: Fence, fingerprint: bytes, deadline: float | None = None) -> Manifest:
        """Return the manifest of this fingerprint, waiting for its owner to put it; cached.

        Raises:
            DeadlineError: nobody put it; the message names its owners.
            ManifestError: what came is not what the fingerprint names.
        """
        known = self._cache.get(fingerprint) or self._roster.manifests.get(fingerprint)
        if isinstance(known, Manifest):
            return known
        seconds = self._options.connect_timeout if deadline is None else deadline
        reply: m.ManifestBlob = self.request(m.GetManifest(fence, fingerprint, seconds), seconds)
        manifest = Manifest.decode(reply.blob, max_bytes=self._options.max_frame)
        if manifest.fingerprint != fingerprint:
            raise ManifestError(
                "the MetaServer sent another manifest than was asked for",
                expected=fingerprint.hex(),
                found=manifest.fingerprint.hex(),
            )
        self._cache[fingerprint] = manifest
        while len(self._cache) > _CACHED_MANIFESTS:
            self._cache.popitem(last=False)
        return manifest

    # --- bindings

    def put_binding(self, fence: Fence, blob: bytes, deadline: float | None = None) -> bytes:
        """Store a writer's encoded binding at the server; return its hash, by which puts name it."""
        name = blob_name(blob)
        self.request(m.PutBinding(fence, name, blob), deadline)
        return name

    def get_binding(self, fence: Fence, name: bytes, deadline: float | None = None) -> bytes:
        """Return a writer's encoded binding by its hash, waiting for the writer to store it.

        Raises:
            DeadlineError: nobody stored it.
            ManifestError: what came is not what the hash names.
        """
        seconds = self._options.connect_timeout if deadline is None else deadline
        reply: m.BindingBlob = self.request(m.GetBinding(fence, name, seconds), seconds)
        if blob_name(reply.blob) != name:
            raise ManifestError("the MetaServer sent another binding than was asked for", expected=name.hex())
        return reply.blob

    # --- events

    def watch(self, deadline: float, since: int = 0) -> Iterator[m.Event]:
        """Yield the job's events after number ``since`` as they happen, for ``deadline`` seconds.

        When a new server takes over, or events were dropped before they could be sent, an event of kind
        ``restarted`` or ``lost`` comes first, with ``seq`` 0: what was seen before may be out of date.
        """
        give_up = time.monotonic() + deadline
        boot = self.boot
        while (left := give_up - time.monotonic()) > 0:
            reply: m.Events = self.request(m.Watch(since, min(left, _WATCH_ROUND)))
            if boot not in (0, self.boot):
                yield m.Event(0, "restarted", "", detail=f"boot {self.boot}")
                since, boot = 0, self.boot
                continue
            boot = self.boot
            if reply.lost:
                yield m.Event(0, "lost", "", detail="older events are gone")
            for event in reply.events:
                since = event.seq
                yield event

    # --- end

    def close(self, reason: str = "", deadline: float = 2.0) -> None:
        """Take leave of the server if it is there, and free thread, sockets and locks; again, do nothing.

        Args:
            reason: told to whoever waits for this process.
            deadline: seconds for the farewell.
        """
        with self._closing:
            if self._closed or self._owner != os.getpid():
                return
            self._closed = True
        if self._session.ready.is_set():
            fences = [one.fence for one in self._roster.members() if one.error is None]
            farewells = [self._session.submit(m.Deregister(fence, reason), deadline) for fence in fences]
            wait(farewells, deadline)
        self._session.stop(_SLACK)
        self._discovery.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(reason="" if error is None else f"{type(error).__name__}: {error}")


def _waited(answer: Future[m.Message], seconds: float) -> m.Message:
    """Return an answer; a process that was stopped for that long lets its I/O thread look for it first."""
    try:
        return answer.result(seconds)
    except TimeoutError:
        return answer.result(_TURN)


def _fresh(error: SynclineError) -> SynclineError:
    """Return a copy to raise: one error may fail many calls, and each has its own traceback."""
    copy = type(error)(
        error.what,
        expected=error.expected,
        found=error.found,
        rank=error.rank,
        tensor=error.tensor,
        hint=error.hint,
    )
    for note in getattr(error, "__notes__", ()):
        copy.add_note(note)
    return copy
