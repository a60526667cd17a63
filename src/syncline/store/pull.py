"""The data path of one reader rank: from a version's offers to bytes in its own memory, with their digests.

Everything that does not change between two versions is made once: plans by their inputs, programs by their
plan, links by their peer. A changed binding, on either side, only rebinds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from syncline.errors import AdapterError, DeadlineError, PlanError, TransportError
from syncline.memory import Binding
from syncline.store.lanes import ONE_SIDED, lane_of
from syncline.store.offer import Offer
from syncline.transport.base import Endpoint, Limits, Remote, Side, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from syncline.plan import Hops, Plan
    from syncline.protocol.ids import Fence
    from syncline.protocol.parts import WriterSource
    from syncline.store.adapter import Stage
    from syncline.store.member import Member
    from syncline.transport.base import Link, Program, Transfer, Transport

_LOOK = 0.25  # seconds between two reports of progress


@dataclass(slots=True)
class Lane:
    """The hops of one rank that one transport moves.

    Attributes:
        transport: which.
        rows: i64[H'], indices into the hops of its leg.
        program: compiled once.
        bound: what the program is bound to: generations and links.
    """

    transport: Transport
    rows: NDArray[np.int64]
    hops: Hops
    program: Program
    bound: object = None


@dataclass(slots=True)
class Leg:
    """What one rank receives in one go, compiled: everything, or one stage of its engine."""

    hops: Hops
    lanes: list[Lane]
    nbytes: int


@dataclass
class Route:
    """One rank's share of one plan: one leg, or one for each stage of its engine."""

    plan: Plan
    hops: Hops
    legs: list[Leg]
    nbytes: int

    @cached_property
    def received(self) -> frozenset[str]:
        """Checkpoint names that the rank receives, in whole or in part."""
        return frozenset(self.plan.names[t] for t in np.unique(self.hops.tensor).tolist())

    @property
    def lanes(self) -> list[Lane]:
        """The lanes of all legs."""
        return [lane for leg in self.legs for lane in leg.lanes]


@dataclass(frozen=True, slots=True)
class Source:
    """One writer rank as it offers a version, decoded."""

    endpoint: Endpoint
    binding: Binding
    tickets: tuple[Ticket, ...]
    version: tuple[str, int]  # endpoint, binding generation: what changes when anything above does

    @classmethod
    def of(cls, place: WriterSource, offered: bytes) -> Source:
        """Decode an offer.

        Raises:
            ProtocolError, ManifestError, TransportError: bytes that are not one.
        """
        offer = Offer.decode(offered)
        return cls(
            Endpoint.from_text(place.endpoint),
            Binding.from_wire(offer.binding),
            tuple(Ticket.decode(ticket) for ticket in offer.tickets),
            (place.endpoint, place.binding_generation),
        )


@dataclass(slots=True)
class Outcome:
    """What a run did: bytes moved, seconds, and u64[H] digests in the order of the hops, if asked for."""

    nbytes: int
    seconds: float
    digests: NDArray[np.uint64] | None


@dataclass(slots=True)
class Puller:
    """Pulls versions into the memory of one reader rank.

    Attributes:
        member: the process.
        fence: of one of its registrations; writers' bindings are fetched under it.
        only: the transport to use for everything; by default what `syncline.store.lanes` chooses.
    """

    member: Member
    fence: Fence
    only: str | None = None
    _routes: dict[tuple[bytes, tuple[str, ...]], Route] = field(default_factory=dict)
    _sources: dict[tuple[str, int], Source] = field(default_factory=dict)
    _links: dict[tuple[str, str], Link] = field(default_factory=dict)

    def route(
        self,
        plan: Plan,
        instance: str,
        rank: int,
        places: Sequence[WriterSource],
        stages: Sequence[Stage] = (),
    ) -> Route:
        """Return the rank's share of a plan, compiled at its first use.

        Args:
            plan: of the version.
            instance: the rank's.
            rank: in its instance.
            places: by writer rank.
            stages: of its engine; always the same ones.

        Raises:
            AdapterError: the stages are not a partition of the storages that receive something.
            TransportError: a two-sided transport is needed, which cannot wait between stages; or none moves
                bytes from where a writer's weights lie to where this rank's do.
        """
        names = tuple(
            lane_of(Endpoint.from_text(place.endpoint), self.member.endpoint, self.only) for place in places
        )
        found = self._routes.get((plan.id, names))
        if found is None:
            hops = plan.reader(instance, rank)
            parts = [hops] if not stages else [hops.take(rows) for rows in staged_rows(hops, stages)]
            legs = [self._leg(plan, part, np.array(names)) for part in parts]
            if len(legs) > 1:
                _check_one_sided(legs)
            found = Route(plan, hops, legs, int(hops.nbytes.sum()))
            self._routes = {(plan.id, names): found}  # a plan that was replaced does not come back
        return found

    def bind(
        self, route: Route, places: Sequence[WriterSource], local: Binding, fence: Fence, deadline: float
    ) -> None:
        """Link to the writers and point the route's programs at where both sides' storages lie now.

        Args:
            route: of the plan that the writers' manifests gave.
            places: by writer rank.
            local: of this rank's manifest.
            fence: of the update.
            deadline: seconds.

        Raises:
            PlanError: a writer's or this rank's binding is of another manifest.
            TransportError, PeerLostError, RevokedError: a writer cannot be reached.
        """
        until = time.monotonic() + deadline
        sources = self._decoded(places, deadline)
        for lane in route.lanes:
            self._bind_lane(lane, sources, local, fence, until)
        self._forget_links({source.endpoint.id for source in sources.values()})

    def run(
        self,
        leg: Leg,
        fence: Fence,
        deadline: float,
        *,
        digest: bool,
        report: Callable[[int], None] = lambda _nbytes: None,
    ) -> Outcome:
        """Move every byte of a leg; ``report`` hears of progress now and then.

        Raises:
            DeadlineError, PeerLostError, RevokedError, TransportError: from a lane; the others are cancelled.
        """
        began = time.monotonic()
        limits = Limits(deadline=deadline, threads=self.member.options.threads)
        running: list[Transfer] = []
        try:
            for lane in leg.lanes:
                started = lane.transport.start(lane.program, fence, limits, digest=digest)
                running.append(started)  # one by one: what was started is cancelled if the next one fails
            _await(running, report)
        except BaseException:
            for transfer in running:
                transfer.cancel(self.member.options.stall)
            raise
        moved = sum(transfer.poll().nbytes for transfer in running)
        digests = _joined(leg, running) if digest else None
        return Outcome(moved, time.monotonic() - began, digests)

    def _leg(self, plan: Plan, hops: Hops, names: NDArray[np.str_]) -> Leg:
        lanes = [
            Lane(transport, rows, part, transport.compile(plan, part, Side.DESTINATION))
            for transport, rows in self._split(hops, names)
            for part in [hops.take(rows)]
        ]
        return Leg(hops, lanes, int(hops.nbytes.sum()))

    def _split(self, hops: Hops, names: NDArray[np.str_]) -> list[tuple[Transport, NDArray[np.int64]]]:
        chosen = names[hops.src] if len(hops) else np.zeros(0, dtype=np.str_)
        return [
            (self.member.transport(str(name)), np.flatnonzero(chosen == name)) for name in np.unique(chosen)
        ]

    def _decoded(self, places: Sequence[WriterSource], deadline: float) -> dict[int, Source]:
        found: dict[int, Source] = {}
        for place in places:
            key = (place.endpoint, place.binding_generation)  # a member's number comes again after a restart
            source = self._sources.get(key)
            if source is None:
                offered = self.member.client.get_binding(self.fence, place.binding_fp, deadline)
                source = Source.of(place, offered)
            if source.binding.fingerprint != place.manifest_fp:
                raise PlanError(
                    "a writer's binding is of another manifest than its put",
                    rank=f"writer {place.rank}",
                    expected=place.manifest_fp.hex(),
                    found=source.binding.fingerprint.hex(),
                )
            found[place.rank] = source
        self._sources = {source.version: source for source in found.values()}
        return found

    def _bind_lane(
        self, lane: Lane, sources: Mapping[int, Source], local: Binding, fence: Fence, until: float
    ) -> None:
        ranks = np.unique(lane.hops.src).tolist()
        links = {rank: self._link(lane, sources[rank], fence, until) for rank in ranks}
        state = (
            local.generation,
            local.fingerprint,
            tuple(
                (rank, sources[rank].version, id(links[rank]), getattr(links[rank], "opened", 0))
                for rank in ranks
            ),
        )
        if lane.bound != state:
            remotes = {rank: Remote(links[rank], sources[rank].binding) for rank in ranks}
            lane.program.rebind(local, remotes)
            lane.bound = state

    def _forget_links(self, here: set[str]) -> None:
        """Close links to writers that died: a trainer that comes back is another process."""
        for key in [key for key, link in self._links.items() if key[1] not in here and not link.alive]:
            self._links.pop(key).close()

    def _link(self, lane: Lane, source: Source, fence: Fence, until: float) -> Link:
        name = lane.transport.name
        key = (name, source.endpoint.id)
        known = self._links.get(key)
        if known is not None and known.alive and name not in ONE_SIDED:
            return known
        tickets = tuple(ticket for ticket in source.tickets if ticket.transport == name)
        if name not in ONE_SIDED:  # two ends meet by a ticket that both can make
            tickets = (meeting(name, fence),)
        made = lane.transport.link(source.endpoint, tickets, max(0.0, until - time.monotonic()))
        self._links[key] = made
        return made


def meeting(transport: str, fence: Fence) -> Ticket:
    """Return the ticket by which two ends of a two-sided transport meet for the update of ``fence``."""
    return Ticket(transport, 0, 0, 0, 1, fence)


def _await(running: Sequence[Transfer], report: Callable[[int], None]) -> None:
    while True:
        waiting = [transfer for transfer in running if not transfer.poll().done]
        for transfer in running:
            if transfer not in waiting:
                transfer.wait(0.0)  # raises what went wrong
        if not waiting:
            return
        try:
            waiting[0].wait(_LOOK)
        except DeadlineError:
            if waiting[0].poll().done:
                raise
            report(sum(transfer.poll().nbytes for transfer in running))


def staged_rows(hops: Hops, stages: Sequence[Stage]) -> list[NDArray[np.int64]]:
    """Return the rows of the hops that go to each stage's storages.

    Raises:
        AdapterError: a storage that is in no stage, or in two.
    """
    highest = max((s for stage in stages for s in stage.storages), default=-1)
    of = np.full(max(highest, int(hops.dst_storage.max(initial=-1))) + 1, -1, np.int64)
    for index, stage in enumerate(stages):
        mine = np.array(stage.storages, np.int64)
        if (of[mine] >= 0).any():
            taken = stages[int(of[mine].max())].name
            raise AdapterError("a storage is in two stages", found=f"{taken} and {stage.name}")
        of[mine] = index
    stage_of = of[hops.dst_storage]
    if (stage_of < 0).any():
        raise AdapterError(
            "a storage is in no stage", found=f"storage {int(hops.dst_storage[np.argmin(stage_of)])}"
        )
    return [np.flatnonzero(stage_of == index) for index in range(len(stages))]


def _check_one_sided(legs: Sequence[Leg]) -> None:
    for name in sorted({lane.transport.name for leg in legs for lane in leg.lanes} - ONE_SIDED):
        raise TransportError(
            "an engine that takes its weights in stages needs a transport by which it pulls",
            expected="shm or cuda_ipc: trainer and engine on one host",
            found=name,
            hint="run a reader without stages across hosts, or place trainer and engine on one host",
        )


def _joined(leg: Leg, running: Sequence[Transfer]) -> NDArray[np.uint64]:
    digests = np.zeros(len(leg.hops), np.uint64)
    for lane, transfer in zip(leg.lanes, running, strict=True):
        if transfer.digests is not None:
            digests[lane.rows] = transfer.digests
    return digests
