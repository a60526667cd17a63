"""`WeightReader`: in an instance's control process. It decides when the instance changes its version."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import traceback
from typing import TYPE_CHECKING, Self

from syncline import faults
from syncline.errors import DeadlineError, ProtocolError, SynclineError, to_wire
from syncline.protocol import messages as m
from syncline.store import join
from syncline.store.follow import Follower
from syncline.store.guard import Guard
from syncline.store.lanes import device_of
from syncline.store.member import Member
from syncline.store.proof import Rhythm
from syncline.store.report import Stopwatch, UpdateReport
from syncline.store.worker import WorkerWeightsReader

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from syncline.layout import Rules
    from syncline.options import Options
    from syncline.protocol.ids import Fence, VersionKey
    from syncline.protocol.parts import Level
    from syncline.store.adapter import EngineAdapter, PauseMode

logger = logging.getLogger(__name__)

_PATIENCE = 5.0
_ROUND = 30.0  # seconds of one wait for an instance to become DIRTY
_HEARING = 1.0  # seconds for ranks to say that they wrote nothing; without their word the engine stays paused


class WeightReader:
    """Keeps one inference instance at a version: all of its ranks, or none.

    One process of the instance holds it, usually rank 0's, which then needs no `WorkerWeightsReader` of its
    own. An update is in place: the engine is paused, every rank is written and verified, the decision is
    recorded at the MetaServer, ranks apply it, the engine resumes. If an update fails after the first byte,
    the instance is DIRTY: the engine stays paused until a full update succeeds.

    Args:
        adapter: of the engine in this process.
        instance: name of the instance.
        job: name of the job.
        table: name of the table.
        rules: what this instance allows beyond equal names and dtypes.
        options: deadlines and bounds; from the environment if left out.
        pause: what happens to a generation that runs when an update begins.
        verify_every: make the proof that is demanded at the first update and every n-th after it; those
            between are committed without one, which their report says (level ``"none"``).
        worker: also take part as rank 0.
        check: wait for the writers, and refuse at once if they cannot feed this instance.

    Raises:
        NameMismatchError, ShapeMismatchError, UndeclaredCastError, CoverageError: with ``check``: the writers
            cannot feed this instance; no byte has moved.
        DeadlineError: no MetaServer within ``connect_timeout``; or, with ``check``, no writers.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        *,
        instance: str,
        job: str = "default",
        table: str = "weights",
        rules: Rules | None = None,
        options: Options | None = None,
        pause: PauseMode = "wait",
        verify_every: int = 1,
        worker: bool = True,
        check: bool = True,
    ) -> None:
        self.adapter, self.instance, self._table = adapter, instance, table
        self._mode: PauseMode = pause
        self._rhythm = Rhythm(verify_every)
        device = device_of(adapter) if worker else None
        self.member = Member(job, f"instance {instance}, controller", options, device=device)
        self._nonce = itertools.count(time.monotonic_ns())
        self._updating = threading.Lock()
        self._follower: Follower | None = None
        self._paused_at: float | None = None
        self._held = False
        self._running = threading.Event()  # set while the engine is not paused by this reader
        self._running.set()
        self.worker: WorkerWeightsReader | None = None
        try:
            self._registered = join.as_controller(self.member, table, instance, adapter.world)
            if worker:
                self.worker = WorkerWeightsReader(
                    adapter, instance=instance, job=job, table=table, rules=rules, member=self.member
                )
                if check:
                    self.worker.check_layout()
            if self.dirty:  # as the worker's registration may have made it
                logger.warning("instance %s is DIRTY: it is paused until a full update", instance)
                self.hold()
        except BaseException as error:
            self._decline(error)
            raise
        self._guard = Guard(instance, self._hold_when_dirty)

    @property
    def committed(self) -> VersionKey | None:
        """The version that the instance serves, as the MetaServer has it; None before the first update."""
        return self._status().committed

    @property
    def dirty(self) -> bool:
        """Whether live memory may hold a mixture, so that the engine must not serve."""
        return self._status().dirty

    def update(
        self,
        version: int | None = None,
        *,
        timeout: float | None = None,
        verify: Level = "delivered",
        after: VersionKey | None = None,
    ) -> UpdateReport:
        """Bring the instance to a version, and return when the engine runs on it.

        Args:
            version: the writers' number; None: the newest that can be had. A future one is waited for.
            timeout: seconds for everything; ``update_timeout`` if left out.
            verify: the proof demanded before the commit; see ``verify_every``.
            after: only a version newer than this one will do.

        Raises:
            ProtocolError: ``verify="effective"``, which needs a checkpoint: see
                `WorkerWeightsReader.check_effective`.
            StaleVersionError: an older version than the newest, at once.
            UnknownVersionError: never published, or nobody holds it any more.
            VersionAbortedError, VersionBrokenError: a writer failed; named.
            DigestMismatchError: not the bytes that were published; tensor and rank are named.
            RevokedError: the window closed on this instance: it was too slow, or stuck.
            DeadlineError: names whom it waited for.
        """
        if verify == "effective":
            raise ProtocolError(
                "an update cannot prove the level 'effective' by itself",
                expected="none, delivered or installed",
                hint="after the update, call check_effective(checkpoint) on every rank's WorkerWeightsReader",
            )
        with self._updating:
            seconds = self.member.options.update_timeout if timeout is None else timeout
            report = self._update(version, seconds, self._rhythm.level(verify), after)
            if report.changed:
                self._rhythm.count()
            return report

    def follow(
        self,
        every: int = 1,
        max_staleness: int | None = None,
        *,
        verify: Level = "delivered",
        verify_every: int | None = None,
        on_update: Callable[[UpdateReport], None] | None = None,
    ) -> Follower:
        """Update in the background, whenever versions appear.

        Args:
            every: take a version only if its number is at least this much newer than the one served.
            max_staleness: if updates fail and the newest version is more than this many numbers ahead, hold
                the engine paused until one succeeds. None: keep serving the old version.
            verify: the proof demanded before a commit.
            verify_every: prove the first update from now on and every n-th after it; the reader's own if
                left out.
            on_update: called with the report of each update, from the follower's thread.

        Returns:
            The follower; `Follower.stop` ends it, and `close` does too.
        """
        if self._follower is not None and self._follower.running:
            raise SynclineError("this reader follows already", hint="stop the follower first")
        if verify_every is not None:
            self._rhythm = Rhythm(verify_every)
        self._follower = Follower(self, every, max_staleness, verify, on_update)
        return self._follower

    def hold(self) -> None:
        """Pause the engine until the next update succeeds; one that fails leaves it paused."""
        with self._updating:
            self._held = True
            if self._paused_at is None:
                self._pause(self.member.options.update_timeout)

    def newest(self) -> VersionKey | None:
        """Return the newest version that was sealed, as far as the MetaServer knows."""
        versions, _ = self._versions(_PATIENCE)
        return max((v.key for v in versions if v.state not in ("OPEN", "ABORTED")), default=None)

    def await_version(self, after: VersionKey | None, deadline: float) -> VersionKey | None:
        """Return the newest version that can be had now and is newer than ``after``; wait for one.

        Args:
            after: None: any version will do.
            deadline: seconds; None is returned at its end.
        """
        left = _Left(time.monotonic() + deadline)
        while True:
            versions, seq = self._versions(left() + _HEARING)
            ready = [v.key for v in versions if v.state == "SEALED" and not v.closed]
            newer = [key for key in ready if after is None or key > after]
            if newer:
                return max(newer)
            if left() <= 0:
                return None
            self.member.ask(m.Watch(seq, left()), left() + _PATIENCE)

    def close(self) -> None:
        """Leave the job; the engine keeps what it has."""
        self._guard.stop()
        self._running.set()
        if self._follower is not None:
            self._follower.stop()
        if self.worker is not None:
            self.worker.close()
        self.member.close()
        self._guard.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.member.fail(error)
        self.close()

    # --- registration

    @property
    def _fence(self) -> Fence:
        return self._registered.fence

    def _decline(self, error: BaseException) -> None:
        join.decline(self.member, self._table, f"instance {self.instance}", error, self.instance)
        self.member.fail(error)
        if self.worker is not None:
            self.worker.close()
        self.member.close()

    def _versions(self, deadline: float) -> tuple[list[m.VersionStatus], int]:
        status: m.Status = self.member.ask(m.StatusQuery(self._table), deadline)
        return [version for table in status.tables for version in table.versions], status.seq

    def _status(self, deadline: float | None = None) -> m.InstanceStatus:
        status: m.Status = self.member.ask(m.StatusQuery(self._table), deadline)
        found = [i for t in status.tables for i in t.instances if i.name == self.instance]
        if not found:
            raise SynclineError("the MetaServer does not know this instance", found=self.instance)
        return found[0]

    # --- one update

    def _update(
        self, version: int | None, timeout: float, level: Level, after: VersionKey | None
    ) -> UpdateReport:
        watch = Stopwatch(time.monotonic)
        until = time.monotonic() + timeout
        request = m.BeginUpdate(
            self._fence, self._table, version, "in_place", timeout, next(self._nonce), after, level
        )
        begun: m.Begun | m.Current = self.member.ask(request, timeout)
        watch.lap("wait")
        if isinstance(begun, m.Current):
            if self._paused_at is not None:
                self._resume(begun.key, flush=True)
            return UpdateReport(
                begun.key, self.instance, "none", changed=False, seconds={"total": watch.total}
            )
        return self._install(begun, watch, until)

    def _install(self, begun: m.Begun, watch: Stopwatch, until: float) -> UpdateReport:
        """Run one attempt from the pause to the resumption."""
        key, left = begun.key, _Left(until)
        try:
            if self._paused_at is None:
                self._pause(left())
            watch.lap("pause")
            faults.point("reader.before_start")
            self.member.ask(m.StartUpdate(self._fence, self._table, key, begun.attempt))
            verified: m.AllVerified = self.member.ask(
                m.AwaitVerified(self._fence, self._table, key, begun.attempt, left()), left()
            )
            watch.lap("pull")
            faults.point("reader.before_commit")
            self.member.ask(
                m.Commit(self._fence, self._table, self.instance, begun.committed, key, begun.attempt)
            )
            watch.lap("commit")
            faults.point("reader.after_commit")
            self.member.ask(m.AwaitServing(self._fence, self._table, self.instance, key, left()), left())
            watch.lap("apply")
        except BaseException as error:
            self._give_up(begun, error)
            raise
        paused = self._resume(key, flush=True)
        watch.lap("resume")
        return self._report(begun, verified, watch, paused)

    def _pause(self, deadline: float) -> None:
        began = time.monotonic()
        self.adapter.pause(self._mode, deadline)
        self._paused_at = began
        self._running.clear()

    def _resume(self, key: VersionKey | None, *, flush: bool = False) -> float:
        """Let the engine run again; return for how long it stood."""
        if flush:
            self.adapter.flush_caches()
        self.adapter.resume(key)
        paused = time.monotonic() - (self._paused_at or time.monotonic())
        self._paused_at, self._held = None, False
        self._running.set()
        return paused

    def _give_up(self, begun: m.Begun, error: BaseException) -> None:
        """End a failed attempt. The engine resumes only if no byte of live memory was touched, and it ran."""
        fields = to_wire(error, "".join(traceback.format_exception(error)))
        note = m.Failed(
            self._fence, self._table, begun.key, begun.attempt, fields, touched=False, deadline=_HEARING
        )
        try:
            self.member.ask(note, _PATIENCE)
        except SynclineError as unheard:
            logger.debug("the attempt was over already: %s", unheard.what)
        try:
            status = self._status()
        except SynclineError as unknown:
            logger.warning("instance %s stays paused: its state is unknown (%s)", self.instance, unknown.what)
            return
        if status.dirty:
            error.add_note(f"instance {self.instance} is DIRTY and stays paused until a full update succeeds")
        elif self._paused_at is not None and not self._held:
            self._resume(None)

    def _hold_when_dirty(self) -> None:
        """Wait until the instance is DIRTY though no update failed, and pause its engine; see `Guard`."""
        if not self._running.wait(_ROUND):
            raise DeadlineError(f"instance {self.instance} is paused")
        self.member.ask(m.AwaitDirty(self._fence, self._table, _ROUND), _ROUND)
        with self._updating:  # briefly: an update must not wait here for a server that has gone
            if self._paused_at is None and self._status(_HEARING).dirty:
                logger.warning(
                    "instance %s is DIRTY, as a rank of it was replaced: paused until a full update",
                    self.instance,
                )
                self._held = True
                self._pause(self.member.options.update_timeout)

    def _report(
        self, begun: m.Begun, verified: m.AllVerified, watch: Stopwatch, paused: float
    ) -> UpdateReport:
        ranks = verified.reports
        return UpdateReport(
            key=begun.key,
            instance=self.instance,
            level=begun.level,
            nbytes=sum(int(rank.get("nbytes", 0)) for rank in ranks),
            tensors=max((int(rank.get("tensors", 0)) for rank in ranks), default=0),
            seconds=watch.seconds | {"total": watch.total},
            paused=paused,
            ranks=ranks,
        )


class _Left:
    """Seconds left until a point in time, never negative."""

    def __init__(self, until: float) -> None:
        self._until = until

    def __call__(self) -> float:
        return max(0.0, self._until - time.monotonic())
