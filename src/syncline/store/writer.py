"""`WeightWriter`: in every trainer process. It opens a read window on live weights, and closes it in time."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Literal, Self

from syncline import faults
from syncline.errors import AdapterError, StaleVersionError, SynclineError
from syncline.kernels.engine import Op
from syncline.layout import Rules
from syncline.protocol import messages as m
from syncline.store import join
from syncline.store import rules as rules_wire
from syncline.store.adapter import DeviceTrainer
from syncline.store.lanes import device_of
from syncline.store.member import Member
from syncline.store.publication import Publication
from syncline.store.publisher import Publisher
from syncline.store.save import save_version

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from syncline.options import Options
    from syncline.protocol.ids import Fence
    from syncline.protocol.parts import Until
    from syncline.store.adapter import TrainerAdapter

logger = logging.getLogger(__name__)

_PATIENCE = 5.0
_HEARING = 2.0  # seconds that a server of a rank that cannot join stays: who waits for it shall hear why

Wait = Literal["none", "pulled", "committed"]


class WeightWriter:
    """Publishes the live parameters of one trainer rank. Every rank has one, and publishes the same versions.

    Parameters in host memory are moved once, in place, into memory that readers of this host can map; those
    on a GPU stay where they are. Then nothing is ever copied here. A version is a *read window*: it opens
    with `publish` and closes before the next mutation of the weights (the adapter's hooks call that), waiting
    for readers whose bytes progress.
    The user's process groups are never used.

    Args:
        adapter: of the trainer in this process.
        job: name of the job; trainers and engines of one job use the same.
        table: name of the table.
        rules: what the trainer allows beyond equal names and dtypes.
        options: deadlines and bounds; from the environment if left out.
        serve: run the job's MetaServer in this process, unless there is one; rank 0 does, if left out.

    Raises:
        MemoryBudgetError: too little memory to move the parameters; nothing was touched.
        DeadlineError: no MetaServer within ``connect_timeout``.
        AuthError: the job's key is missing or wrong.
    """

    def __init__(
        self,
        adapter: TrainerAdapter,
        *,
        job: str = "default",
        table: str = "weights",
        rules: Rules | None = None,
        options: Options | None = None,
        serve: bool | None = None,
    ) -> None:
        self.adapter, self._table = adapter, table
        self.who = f"writer {adapter.rank}"
        embedded = adapter.rank == 0 if serve is None else serve
        self.member = _member(job, self.who, options, adapter, embedded)
        self._current: Publication | None = None
        self._newest = -1
        self._closing = threading.Lock()
        try:
            self.member.compiled(Op.DIGEST)  # before a version has a deadline: it takes a while, once
            descriptors = adapter.share()
            self._fence = self._register(rules or Rules())
            self._publisher = Publisher(self.member, adapter, self._fence, table, descriptors)
            self._hook = adapter.on_mutation(self._before_mutation)
        except BaseException as error:
            self._decline(error)
            raise

    def publish(self, version: int, *, wait: Wait = "none", timeout: float | None = None) -> Publication:
        """Open a read window on the live weights as version ``version``.

        Every rank calls it after the same optimizer step. It makes no copy and, unless told to wait, returns
        at once: announcing and digesting happen behind it. The weights must not change before the window is
        closed; the adapter's mutation points (``optimizer.step`` above all) see to that.

        Args:
            version: greater than any before, in this run of the trainer.
            wait: ``"none"``: the next mutation waits only for pulls under way; ``"pulled"``: it waits until
                every live instance has pulled this version; ``"committed"``: return when every live instance
                serves it (strictly on-policy).
            timeout: seconds of the wait; ``update_timeout`` if left out.

        Raises:
            StaleVersionError: not greater than the one before; nothing was changed, a window stays open.
            SynclineError: what went wrong with the version before, if nobody has been told.
            RemoteError: with ``"committed"``: an instance failed at this version.
        """
        if version <= self._newest:
            raise StaleVersionError(
                "version numbers must grow",
                rank=self.who,
                expected=f"more than {self._newest}",
                found=version,
                hint="number the versions by the optimizer step; a restarted trainer makes a new writer",
            )
        self.close_window("the next publish")
        self._newest = version
        self.adapter.quiesce()
        self.member.written()
        until: Until = "pulled" if wait == "pulled" else "drained"
        publication = Publication(version, until, self.member, self._fence, self._table)
        self._current = publication
        self._publisher.put(publication)
        if wait == "committed":
            publication.wait_committed(timeout)
        return publication

    def close_window(self, reason: str = "close_window") -> None:
        """Close the read window, if one is open: the weights may change when this returns.

        Mutation hooks call it. It waits for this rank's own digests and for readers whose bytes progress;
        those that are stuck are revoked after ``stall`` seconds and can never commit what they read.
        """
        with self._closing:
            publication, self._current = self._current, None
            if publication is None:
                return
            faults.point("writer.before_close")
            logger.debug("%s closes version %s for %s", self.who, publication.number, reason)
            publication.close(self.member.options.update_timeout)

    def release(self, timeout: float | None = None) -> None:
        """Close the window and take the weights' memory back from readers, ahead of an offload or a sleep.

        The next `publish` offers it anew, wherever it lies then.

        Raises:
            DeadlineError: a reader still has some of it open: it must not be freed.
        """
        self.close_window("release")
        self._publisher.release(self.member.options.update_timeout if timeout is None else timeout)

    def await_readers(self, *instances: str, timeout: float | None = None) -> tuple[str, ...]:
        """Wait until all writers, and the named instances, are there; return all instances that are.

        Raises:
            DeadlineError: names whoever is missing.
            SynclineError: why one of them cannot join, in its own words.
        """
        seconds = self.member.options.connect_timeout if timeout is None else timeout
        request = m.AwaitMembers(self._fence, self._table, seconds, True, instances)
        members: m.Members = self.member.ask(request, seconds)
        return tuple(one.name for one in members.instances)

    def save(
        self, directory: Path, *, base: Path | None = None, max_shard_bytes: int = 512 << 20
    ) -> list[Path]:
        """Write the version whose window is open as a Hugging Face checkpoint; one rank calls it.

        The whole tensors are gathered from all writers' live memory a file at a time, so that one file is the
        extra memory. See `syncline.store.files.save_checkpoint`.

        Args:
            directory: appears whole, or not at all.
            base: a checkpoint directory whose configuration and tokenizer files are copied along.
            max_shard_bytes: upper bound of one file.

        Raises:
            UnknownVersionError: no window is open.
            RevokedError: the weights changed while they were read; nothing was written.
        """
        key = self._current.wait() if self._current is not None else None
        return save_version(
            self.member, self._fence, self._table, key, directory, base=base, max_shard_bytes=max_shard_bytes
        )

    def close(self) -> None:
        """Close the window, leave the job, stop an embedded MetaServer. The parameters stay in place.

        A MetaServer in this process waits a moment for the other ranks to leave: they need it for that.

        Raises:
            DeadlineError: no MetaServer for the time of a lease: no reader can commit what it reads now.
            SynclineError: what went wrong with the last version, if nobody has been told.
        """
        try:
            if self._current is not None:
                self.member.client.connect(self.member.options.lease)
            self.close_window("close")
            if self.member.serves:
                self._await_others()
        finally:
            self._hook.remove()
            self._publisher.close()
            self.member.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self.member.fail(error)
        self._hook.remove()
        self._publisher.close()
        self.member.close()

    def _await_others(self) -> None:
        until = time.monotonic() + _PATIENCE
        try:
            while (left := until - time.monotonic()) > 0:
                status: m.Status = self.member.ask(m.StatusQuery(self._table), left)
                tables = [one for one in status.tables if one.epoch == self._fence.epoch]
                if not tables or len(tables[0].missing) >= tables[0].world - 1:
                    return
                self.member.ask(m.Watch(status.seq, left), left)
        except SynclineError as error:
            logger.debug("%s leaves before the others: %s", self.who, error.what)

    # --- registration

    def _register(self, rules: Rules) -> Fence:
        adapter, member = self.adapter, self.member
        allowed = rules_wire.merge([rules, Rules(aliases=adapter.aliases)])
        rules_sent = rules_wire.encode(allowed)
        return join.as_writer(
            member, self._table, adapter.manifest, rank=adapter.rank, world=adapter.world, rules=rules_sent
        )

    def _decline(self, error: BaseException) -> None:
        join.decline(self.member, self._table, self.who, error)
        if self.member.serves:
            time.sleep(_HEARING)
        self.member.fail(error)
        self.member.close()

    def _before_mutation(self, reason: str) -> None:
        self.close_window(reason)


def _member(job: str, who: str, options: Options | None, adapter: TrainerAdapter, serve: bool) -> Member:
    """Return the process's connection; for weights on a GPU, one that hands out that device's memory."""
    try:
        device = device_of(adapter)
    except SynclineError:
        device = None  # `share` says the same, when there is a connection by which the others hear it
    if device is None:
        return Member(job, who, options, serve=serve, exports=True)
    if not isinstance(adapter, DeviceTrainer):
        raise AdapterError(
            "weights on a GPU need an adapter that knows its device's memory",
            expected="an adapter with `segments`; see syncline.store.adapter.DeviceTrainer",
            found=type(adapter).__name__,
            rank=who,
        )
    segments = adapter.segments
    return Member(job, who, options, serve=serve, exports=True, device=device, segments=segments)
