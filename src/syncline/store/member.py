"""One process of a job: its run directory, its way to the MetaServer, its transports, its endpoint."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import msgspec

from syncline.errors import ProtocolError, TransportError
from syncline.meta import JobDir, MetaClient, MetaServer
from syncline.options import Options
from syncline.store.plans import PlanBook
from syncline.transport.host import endpoint, host_id, new_id
from syncline.transport.shm import ShmTransport

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from syncline.layout import Manifest
    from syncline.protocol.ids import Fence
    from syncline.protocol.messages import Message
    from syncline.transport.base import Endpoint, Transport

logger = logging.getLogger(__name__)

_FAREWELL = 2.0  # seconds for each thing that is put away at the end
_MEET_SECONDS = 60.0
_INTERFACE = "127.0.0.1"


class Member:
    """What every face of the store stands on. Closing it leaves nothing behind.

    Args:
        job: the job's name; trainers and engines of one job use the same.
        name: who this process is, in messages: ``"writer 0"``.
        options: deadlines and bounds; from the environment if left out.
        serve: run the job's MetaServer in this process, unless the job has a live one.
        exports: whether peers may map memory of this process.
        progress: running count of bytes moved, for heartbeats.

    Attributes:
        serves: whether the job's MetaServer runs in this process.
    """

    def __init__(
        self,
        job: str,
        name: str,
        options: Options | None = None,
        *,
        serve: bool = False,
        exports: bool = False,
        progress: Callable[[], int] | None = None,
    ) -> None:
        self.job, self.name = job, name
        self.options = options or Options.from_environment()
        self.process_id = new_id()
        self.serves = False
        with contextlib.ExitStack() as opening:
            self.directory = JobDir.create(job)
            if serve:
                self._start_server(opening)
            hold = self.directory.hold_sockets()
            opening.callback(hold.release)
            path = hold.path(f"{self.process_id}.shm") if exports else None
            self.shm = ShmTransport(job, path, self.process_id)
            opening.callback(self.shm.close, _FAREWELL)
            self.client = MetaClient(job, self.options, progress=progress)
            self._closing = opening.pop_all()
        self._reason = ""

    @cached_property
    def gloo(self) -> Transport:
        """The two-sided transport; made when a plan first needs it."""
        from syncline.transport.gloo import GlooTransport  # noqa: PLC0415 - torch.distributed, only if needed

        made = GlooTransport(self.job, self._meet, self.process_id, _INTERFACE)
        self._closing.callback(made.close, _FAREWELL)
        return made

    @property
    def endpoint(self) -> Endpoint:
        """Where peers meet this process."""
        found = endpoint(self.job, self.name, self.process_id, [self.shm])
        return msgspec.structs.replace(found, addresses=found.addresses | {"gloo": _INTERFACE})

    @property
    def host(self) -> str:
        """Name of this host, as the planner compares it."""
        return host_id()

    def transport(self, name: str) -> Transport:
        """Return a transport of this process by name."""
        if name == "shm":
            return self.shm
        if name == "gloo":
            return self.gloo
        raise TransportError("no such transport", expected="shm or gloo", found=name)

    def ask(self, request: Message, deadline: float | None = None) -> Any:
        """Send a request to the MetaServer and return its answer; see `MetaClient.request`."""
        return self.client.request(request, deadline)

    def plans(self, fence: Fence) -> PlanBook:
        """Return a book of plans that fetches manifests as this member."""
        return PlanBook(lambda fingerprint: self._manifest(fence, fingerprint))

    def fail(self, error: BaseException) -> None:
        """Remember why this process leaves: it is told to whoever waits for it."""
        self._reason = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Take leave, and free threads, sockets, mappings; again, do nothing."""
        self.client.close(self._reason)
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def _manifest(self, fence: Fence, fingerprint: bytes) -> Manifest:
        return self.client.get_manifest(fence, fingerprint)

    def _start_server(self, opening: contextlib.ExitStack) -> None:
        server = MetaServer(self.job, options=self.options)
        try:
            server.start()
        except ProtocolError:
            logger.info("job %s has a MetaServer already; using that one", self.job)
            return
        opening.callback(server.stop)
        self.serves = True

    def _meet(self, name: str) -> Any:
        """Return a store in which two processes of this host find each other under a name that both know."""
        from torch._C._distributed_c10d import FileStore  # noqa: PLC0415 - only for two-sided transports

        place = self.directory.path / "meet"
        place.mkdir(mode=0o700, exist_ok=True)
        store = FileStore(str(place / hashlib.blake2b(name.encode(), digest_size=16).hexdigest()), 2)
        store.set_timeout(timedelta(seconds=_MEET_SECONDS))
        return store
