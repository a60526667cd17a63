"""The one contract of all transports.

The lifetimes, from the longest to the shortest: a *registration* names memory of this process; a *ticket*
lets a peer reach it, under a fence, until it is revoked; a *link* is this process's way to one peer and holds
what the tickets gave it (descriptors, mappings, sockets); a *program* is one side's half of a plan, compiled
once and rebound whenever addresses change; a *transfer* is one run of a program. What is longer-lived never
depends on what is shorter-lived, and closing in the reverse order leaves nothing behind.

Every ``deadline`` here is a duration: seconds from the call. Nothing waits longer, and whoever gave up says
for whom it waited.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, TypeVar, runtime_checkable

import msgspec

from syncline.errors import TransportError
from syncline.protocol.ids import Fence  # noqa: TC001 - msgspec reads the annotations at run time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from syncline.memory.binding import Binding
    from syncline.memory.region import Region
    from syncline.plan import Hops, Plan

_T = TypeVar("_T")

MAX_TEXT = 1 << 16
"""Longest encoded endpoint or ticket that is decoded, in bytes."""


class Side(enum.StrEnum):
    """Which half of a plan a program is."""

    SOURCE = "source"
    DESTINATION = "destination"


class Initiator(enum.StrEnum):
    """Who decides when bytes move."""

    READER = "reader"
    WRITER = "writer"
    BOTH = "both"
    """Two-sided: neither can alone."""


class Reach(enum.IntEnum):
    """How far apart two peers may be."""

    PROCESS = 0
    HOST = 1
    FABRIC = 2
    ANY = 3


class Rights(enum.IntFlag):
    """What a ticket allows."""

    READ = 1
    WRITE = 2


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where one process of a job can be met.

    Attributes:
        job: name of the job.
        id: made at random by each process for itself, so that an address used again is never mistaken.
        name: who it is, for messages: ``"writer 1"``, ``"instance b, rank 2"``.
        host: identity of its host; equal for two processes only where they share memory and sockets.
        uid: user it runs as.
        addresses: by transport name, what that transport's `link` needs.
    """

    job: str
    id: str
    name: str
    host: str
    uid: int
    addresses: dict[str, str] = {}

    def to_text(self) -> str:
        """Return the endpoint as JSON text, for a registration at the MetaServer."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Decode `to_text`.

        Raises:
            TransportError: not an endpoint, or longer than `MAX_TEXT`.
        """
        return _decoded(msgspec.json.Decoder(cls), text.encode(), "an endpoint")

    def __str__(self) -> str:
        return f"{self.name} on {self.host}"


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """The right to reach one region of its exporter, until revoked.

    Attributes:
        transport: name of the transport that issued it.
        region: the exporter's region id.
        generation: the region's generation; a ticket never reaches a later one.
        nbytes: size of the region in bytes.
        rights: `Rights` as a number.
        fence: the exporter's fence: who gave the right, and in which epoch.
        blob: what the transport itself adds; opaque to everybody else.
    """

    transport: str
    region: int
    generation: int
    nbytes: int
    rights: int
    fence: Fence
    blob: bytes = b""

    def encode(self) -> bytes:
        """Return the ticket as msgpack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode `encode`.

        Raises:
            TransportError: not a ticket, or longer than `MAX_TEXT`.
        """
        return _decoded(msgspec.msgpack.Decoder(cls), data, "a ticket")


def _decoded(decoder: msgspec.json.Decoder[_T] | msgspec.msgpack.Decoder[_T], data: bytes, what: str) -> _T:
    if len(data) > MAX_TEXT:
        raise TransportError(f"too long for {what}", expected=f"at most {MAX_TEXT} bytes", found=len(data))
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise TransportError(f"not {what}", found=error) from error


@dataclass(frozen=True, slots=True)
class Caps:
    """What a transport can do between two endpoints.

    Attributes:
        initiator: who decides when bytes move.
        revocable: whether the owner of the destination can stop a transfer with certainty; one that cannot be
            stopped must never be aimed at live memory.
        strided: whether it moves strided runs without packing.
        min_run: runs shorter than this many bytes are packed first; 0: none are.
        reach: how far apart the two may be.
    """

    initiator: Initiator
    revocable: bool
    strided: bool
    min_run: int
    reach: Reach


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a transport cannot serve two endpoints."""

    transport: str
    reason: str


@dataclass(frozen=True, slots=True)
class Registration:
    """Memory of this process that a transport knows, until the region's next generation."""

    transport: str
    region: Region


@dataclass(frozen=True, slots=True)
class Drained:
    """Nobody touches the memory concerned any more."""

    drained: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Wedged:
    """Somebody may still touch it: it must not be freed, unmapped or reused.

    Attributes:
        peers: whom the wait was for.
        reason: what they did not do.
    """

    peers: tuple[str, ...]
    reason: str
    drained: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a transfer came. Grows only, and ends at the totals: success means every planned byte moved.

    Attributes:
        nbytes: wire bytes moved.
        total_nbytes: wire bytes planned.
        hops: hops finished.
        total_hops: hops planned.
        done: whether the transfer ended, well or not.
    """

    nbytes: int
    total_nbytes: int
    hops: int
    total_hops: int
    done: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one transfer.

    Attributes:
        deadline: seconds from `Transport.start` until a transfer that has not finished fails.
        threads: copy and digest threads.
        sms: multiprocessors that a device's kernels may occupy; None: all.
    """

    deadline: float = 120.0
    threads: int = 1
    sms: int | None = None


@dataclass(frozen=True, slots=True)
class Staging:
    """Bounds on packed memory; both sides of a two-sided transfer must use the same.

    Attributes:
        bucket: bytes of one bucket; a larger tensor is sliced.
        inflight: buckets of one peer under way at a time.
    """

    bucket: int = 16 << 20
    inflight: int = 2


class Link(Protocol):
    """A way to one peer. Only one-sided transfers that run at the same time may share it."""

    @property
    def peer(self) -> Endpoint:
        """Whom it reaches."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the peer is still there, as far as known. A dead link is replaced, never revived."""
        ...

    def close(self) -> None:
        """Give back what the link holds; a second call does nothing. No transfer of it may be running."""
        ...


@dataclass(frozen=True, slots=True)
class Remote:
    """A program's other end: how to reach it and, for one-sided transports, where its storages lie.

    Attributes:
        link: the way there.
        binding: the peer's binding as it came over the wire; None where the peer resolves its own addresses.
    """

    link: Link
    binding: Binding | None = field(default=None)


@runtime_checkable
class Program(Protocol):
    """One side's half of a plan, compiled. It cannot start before `rebind` filled in addresses."""

    @property
    def side(self) -> Side:
        """Which half."""
        ...

    @property
    def nbytes(self) -> int:
        """Wire bytes that a complete run moves; 0 for an empty half, which starts and ends at once."""
        ...

    def rebind(self, local: Binding, remote: Mapping[int, Remote]) -> None:
        """Point the program at where storages lie now, without planning or compiling anything again.

        Args:
            local: this process's binding of its own manifest.
            remote: the other end by rank: writer ranks for a destination, the instance's ranks for a source.

        Raises:
            TransportError: a rank is missing, a region is not linked, or an address falls outside its region.
        """
        ...


@runtime_checkable
class Transfer(Protocol):
    """One run of a program. Once it has ended, well or not, nothing of it touches memory."""

    @property
    def digests(self) -> NDArray[np.uint64] | None:
        """uint64[H], one a hop, once the transfer ended well; None if none were asked for."""
        ...

    def poll(self) -> Progress:
        """Return the progress now; never blocks, never raises."""
        ...

    def wait(self, deadline: float) -> None:
        """Return when every planned byte has moved.

        Raises:
            DeadlineError: still running after ``deadline`` seconds (it goes on), or ended by its own limit.
            PeerLostError: a peer died.
            RevokedError: the source's memory was revoked or replaced while it was read.
            TransportError: cancelled, or any other failure; the first one is raised.
        """
        ...

    def cancel(self, deadline: float) -> Drained | Wedged:
        """Stop, and return when no memory is touched any more. What was moved stays moved."""
        ...


@runtime_checkable
class Transport(Protocol):
    """One way of moving bytes between processes. Thread-safe; one object serves its process for life."""

    @property
    def name(self) -> str:
        """Its name in the registry, in tickets and in endpoints."""
        ...

    @property
    def address(self) -> str:
        """What peers find under this transport's name in `Endpoint.addresses`; empty if they need nothing."""
        ...

    def caps(self, a: Endpoint, b: Endpoint) -> Caps | Refusal:
        """Say what is possible from source ``a`` to destination ``b``; where it is here, by trying."""
        ...

    def register(self, region: Region, descriptor: int | None = None) -> Registration:
        """Make a region known. A later generation of the same id ends the earlier one.

        Args:
            region: memory of this process.
            descriptor: of the file that the region maps from its offset 0, if any; borrowed for the call.

        Raises:
            TransportError: this transport cannot use such memory.
        """
        ...

    def export(self, registration: Registration, rights: Rights, fence: Fence) -> Ticket:
        """Let whoever holds the ticket, and may enter the job, reach the region.

        Raises:
            TransportError: the registration has ended, or such rights are never given.
        """
        ...

    def revoke(self, ticket: Ticket, deadline: float) -> Drained | Wedged:
        """End a ticket: no new peer gets in at once, and `Drained` means that none is left inside."""
        ...

    def link(self, peer: Endpoint, tickets: Sequence[Ticket], deadline: float) -> Link:
        """Return a way to ``peer`` that reaches the tickets' regions.

        Raises:
            DeadlineError: the peer did not answer in time.
            PeerLostError: it is gone.
            FencedError, RevokedError: a ticket is of another epoch, or no longer good.
            AuthError: the peer, or this process, belongs to another user or job.
        """
        ...

    def compile(self, plan: Plan, hops: Hops, side: Side, staging: Staging = ...) -> Program:
        """Lower ``hops``, this side's rows of ``plan``, to descriptor tables. May give an empty program."""
        ...

    def start(
        self, program: Program, fence: Fence, limits: Limits = ..., *, digest: bool = False
    ) -> Transfer:
        """Start one run.

        Args:
            program: compiled by this transport and bound.
            fence: of the update this run belongs to; two-sided transports pass the same one on both sides.
            limits: bounds on the run.
            digest: whether to digest the wire bits of every hop on the way.

        Raises:
            TransportError: not bound, bound to memory that has been replaced, or its link is dead or busy.
            RevokedError: a ticket it was bound through has been revoked.
        """
        ...

    def close(self, deadline: float) -> None:
        """Cancel what runs, close all links and revoke all tickets, as far as ``deadline`` seconds allow."""
        ...
