"""Behind `publish`: announce a version, digest it once for all readers, send to those that cannot pull."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from syncline import faults
from syncline.errors import DeadlineError, LayoutError, ReplicaDivergenceError, SynclineError
from syncline.protocol import messages as m
from syncline.store.offer import Offer, encode_digests
from syncline.store.send import Sender
from syncline.transport.base import Limits, Rights, Ticket, Wedged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncline.memory import Binding
    from syncline.plan import DigestRows, Plan
    from syncline.protocol.ids import Fence, VersionKey
    from syncline.protocol.parts import InstanceLayout, RankLayout
    from syncline.store.adapter import TrainerAdapter
    from syncline.store.member import Member
    from syncline.store.publication import Publication
    from syncline.transport.cuda_ipc_sources import DeviceSourceDigests
    from syncline.transport.sources import SourceDigests

logger = logging.getLogger(__name__)

_IDLE = 30.0
_PATIENCE = 5.0
_SAME_VERSIONS = 3
_NO_DIGESTS = encode_digests(np.zeros(0, np.int32), np.zeros(0, np.uint64))


class Publisher:
    """The threads of one trainer rank: one publishes, one waits for readers that need something more.

    Args:
        member: the process.
        adapter: of its trainer.
        fence: the rank's own.
        table: name of the table.
        descriptors: a read-only descriptor of each shared region, by region id.
    """

    def __init__(
        self,
        member: Member,
        adapter: TrainerAdapter,
        fence: Fence,
        table: str,
        descriptors: Mapping[int, int],
    ) -> None:
        self._member, self._adapter, self._fence, self._table = member, adapter, fence, table
        self._descriptors = descriptors
        self._book = member.plans(fence)
        self._writers: tuple[RankLayout, ...] = ()
        self._offer: tuple[int, bytes] = (-1, b"")  # generation of the binding that was put, and its hash
        self._tickets: list[Ticket] = []
        self._sameness = Sameness()
        self._digester = Digester(adapter.rank, member)
        self._digesting = threading.Lock()
        self._delivered: set[tuple[VersionKey, bytes]] = set()
        self._sender = Sender(member, adapter.rank)
        self._queue: queue.SimpleQueue[Publication | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._publish_all, name=f"syncline publish {adapter.rank}", daemon=True),
            threading.Thread(target=self._serve, name=f"syncline serve {adapter.rank}", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def put(self, publication: Publication) -> None:
        """Publish in the background; `Publication.finish` is called at the end."""
        self._queue.put(publication)

    def close(self) -> None:
        """End the publishing thread; the serving one ends with the member."""
        self._closing.set()
        self._queue.put(None)
        self._threads[0].join(_PATIENCE)

    # --- publishing

    def _publish_all(self) -> None:
        self._member.use_device()
        while (publication := self._queue.get()) is not None:
            try:
                self._publish(publication)
            except SynclineError as error:
                self._abort(publication, error)
            except BaseException as error:
                logger.exception("publishing version %s failed", publication.number)
                self._abort(publication, SynclineError("publishing failed", found=error))
            else:
                publication.finish()

    def _publish(self, publication: Publication) -> None:
        binding = self._adapter.binding()
        faults.point("writer.before_put")
        reply: m.PutDone = self._member.ask(
            m.Put(
                self._fence,
                self._table,
                publication.number,
                binding.fingerprint,
                binding.generation,
                "live",
                self._offered(binding),
            )
        )
        publication.key = reply.key
        publication.readers = tuple(one.name for one in reply.membership)
        if not reply.membership:
            logger.info("version %s: no reader is registered", reply.key)
            return
        faults.point("writer.before_digest")
        self._digest(reply.key, reply.membership, binding)

    def _offered(self, binding: Binding) -> bytes:
        """Return the hash of a binding's offer, which is put and its regions exported when it is new."""
        if self._offer[0] != binding.generation:
            tickets = []
            for region in filter(lambda r: r.nbytes, binding.regions.values()):
                transport = self._member.exporter(region)
                registration = transport.register(region, self._descriptors.get(region.id))
                tickets.append(transport.export(registration, Rights.READ, self._fence))
            self._forget({(t.region, t.generation) for t in tickets})
            self._tickets = tickets
            offer = Offer(binding.to_wire(), tuple(t.encode() for t in tickets)).encode()
            self._offer = binding.generation, self._member.client.put_binding(self._fence, offer)
        return self._offer[1]

    def release(self, deadline: float) -> None:
        """Hand no memory out any more, until the next publish offers it anew; wait until nobody reads it.

        Raises:
            DeadlineError: a reader still has some of it open; names it. The memory must stay.
        """
        until = time.monotonic() + deadline
        tickets, self._tickets, self._offer = self._tickets, [], (-1, b"")
        for ticket in tickets:
            left = max(0.0, until - time.monotonic())
            end = self._member.transport(ticket.transport).revoke(ticket, left)
            if isinstance(end, Wedged):
                raise DeadlineError(
                    f"memory of writer {self._adapter.rank} is still read after {deadline:g} s",
                    expected="released by every reader",
                    found=f"{', '.join(end.peers)}: {end.reason}",
                    hint="do not free, unmap or offload it",
                )

    def _forget(self, kept: set[tuple[int, int]]) -> None:
        """Tell readers to close regions that no storage lies in any more; nobody waits for them."""
        for ticket in self._tickets:
            if (ticket.region, ticket.generation) not in kept:
                self._member.transport(ticket.transport).revoke(ticket, 0.0)

    def _abort(self, publication: Publication, error: SynclineError) -> None:
        logger.warning("version %s is given up: %s", publication.number, error)
        publication.finish(error)
        if publication.key is None:
            return
        try:
            self._member.ask(m.AbortVersion(self._fence, self._table, publication.key, error.what), _PATIENCE)
        except SynclineError as unheard:
            logger.debug("the version is over already: %s", unheard.what)

    # --- digests

    def _plan(self, instances: Sequence[InstanceLayout]) -> Plan:
        if not self._writers:
            seconds = self._member.options.connect_timeout
            members: m.Members = self._member.ask(m.AwaitMembers(self._fence, self._table, seconds), seconds)
            self._writers = members.writers
        return self._book.plan(self._writers, instances)

    def _digest(
        self, key: VersionKey, instances: Sequence[InstanceLayout], binding: Binding | None = None
    ) -> None:
        """Digest what this rank holds, under the plan of these instances, and deliver it: once a version."""
        with self._digesting:
            try:
                plan = self._plan(instances)
            except LayoutError as error:
                logger.warning("version %s: no instance fits the writers: %s", key, error)
                return
            if (key, plan.id) in self._delivered:
                return
            held = self._adapter.binding() if binding is None else binding
            blob = self._digester.run(plan, held, self._member.options.update_timeout)
            count = self._sameness.count(plan.id, blob)
            if count == _SAME_VERSIONS:
                logger.warning(
                    "writer %d: no tensor changed in %d versions, up to %s, though the number moved: "
                    "does the trainer update the parameters that it publishes?",
                    self._adapter.rank,
                    count,
                    key,
                )
            faults.point("writer.before_digests")
            self._member.ask(m.Digests(self._fence, self._table, key, plan.id, blob))
            self._delivered = {done for done in self._delivered if done[0] == key} | {(key, plan.id)}

    # --- readers that need more than memory

    def _serve(self) -> None:
        self._member.use_device()
        served: dict[str, int] = {}
        while not self._closing.is_set():
            try:
                request = m.AwaitPulls(self._fence, self._table, served, _IDLE)
                pulls: m.Pulls = self._member.ask(request, _IDLE)
            except DeadlineError:
                continue
            except SynclineError as error:
                if not self._closing.is_set():
                    logger.warning("writer %d serves no more: %s", self._adapter.rank, error)
                return
            for pull in pulls.pulls:
                served[pull.instance] = pull.begun.attempt
                self._serve_one(pull)

    def _serve_one(self, pull: m.Pull) -> None:
        """Give an instance that joined late its digests; send to one that cannot reach this memory."""
        try:
            plan = self._plan(pull.begun.membership)
            if pull.instance not in plan.reader_hosts:
                return  # left out: it finds out by itself
            if self._sender.needed(pull):  # readers that pull themselves are left alone with the processor
                self._sender.serve(pull, plan, self._adapter.binding())
            if pull.begun.level != "none":
                self._digest(pull.begun.key, pull.begun.membership)
        except SynclineError as error:
            if not self._closing.is_set():
                logger.warning("instance %s was not served: %s", pull.instance, error)


class Sameness:
    """Counts versions in a row whose contents, as far as this rank holds them, are bit for bit the same."""

    def __init__(self) -> None:
        self._last: tuple[bytes, bytes] | None = None
        self._count = 0

    def count(self, plan_id: bytes, blob: bytes) -> int:
        """Return for how many versions, this one included, the digests under one plan have been these.

        Digests of another plan cannot be compared: the count starts anew. A rank without tensors counts 0.
        """
        if blob == _NO_DIGESTS:
            return 0
        self._count = self._count + 1 if self._last == (plan_id, blob) else 1
        self._last = plan_id, blob
        return self._count


class Digester:
    """Digests a rank's pieces; compiled once a plan, rebound when storages moved.

    Args:
        rank: of the writer.
        member: the process.
    """

    def __init__(self, rank: int, member: Member) -> None:
        self._rank, self._member = rank, member
        self._compiled: tuple[bytes, DigestRows, SourceDigests | DeviceSourceDigests] | None = None
        self._bound: tuple[bytes, int] | None = None

    def run(self, plan: Plan, binding: Binding, deadline: float) -> bytes:
        """Return the encoded digests of everything the rank holds of the plan.

        Raises:
            ReplicaDivergenceError: a piece that the rank holds twice, with different contents.
            DeadlineError: not done in time.
        """
        if self._compiled is None or self._compiled[0] != plan.id:
            rows = plan.digest_rows(self._rank)
            self._compiled = plan.id, rows, self._member.digests(plan, rows)
        _, rows, program = self._compiled
        if self._bound != (plan.id, binding.generation):
            program.rebind(binding)
            self._bound = plan.id, binding.generation
        running = program.start(Limits(deadline=deadline, threads=self._member.options.threads))
        running.wait(deadline)
        digests = running.digests if running.digests is not None else np.zeros(0, np.uint64)
        pieces, first = np.unique(rows.piece, return_index=True)
        if len(pieces) != len(rows):
            self._check_copies(plan, rows, digests)
        return encode_digests(pieces, digests[first])

    def _check_copies(self, plan: Plan, rows: DigestRows, digests: np.ndarray) -> None:
        same = rows.piece[1:] == rows.piece[:-1]
        differs = np.flatnonzero(same & (digests[1:] != digests[:-1]))
        if len(differs):
            row = int(differs[0])
            raise ReplicaDivergenceError(
                "one box is held twice by one rank, with different contents",
                tensor=plan.names[int(rows.tensor[row])],
                rank=f"writer {self._rank}",
                expected="equal copies (they are declared aliases)",
                found=f"{len(differs)} differing pieces",
            )
