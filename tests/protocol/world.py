"""A small world around the state under test: processes with tiny memories, and an oracle of what must hold.

Every writer's live memory is one value, the version that it holds; a writer changes it the very moment that
its `CloseWindow` is answered. Every worker rank's live memory is two halves, one read from each writer, so
that a pull that a writer disturbed shows. Nothing here looks at digests: what the protocol lets through, the
world believes. The world knows nothing of the state's inside except by `Status`, and its waits for the rule
of deadlines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncline.errors import FencedError, SynclineError
from syncline.protocol import messages as m
from syncline.protocol.ids import VersionKey
from syncline.protocol.job import Deferred, JobState, Timing
from tests.protocol.procs import INITIAL, ControllerProc, InstanceProc, WorkerProc, WriterProc

if TYPE_CHECKING:
    from syncline.protocol.parts import Mode

TABLE = "weights"
PLAN = b"plan"
TIMING = Timing(lease=10.0, stall=10.0, recovery=30.0, events=4)
DEADLINE = 1000.0
LEGAL = {
    ("OPEN", "SEALED"),
    ("OPEN", "ABORTED"),
    ("OPEN", "RETIRED"),  # sealed and retired within one request
    ("OPEN", "BROKEN"),  # sealed and broken between two looks
    ("SEALED", "RETIRED"),
    ("SEALED", "BROKEN"),
}


class World:
    """The state under test and everything around it."""

    def __init__(self, *, writers: int = 2, instances: tuple[str, ...] = ("a", "b"), ranks: int = 2) -> None:
        self.now = 0.0
        self.spawned = 0
        self.deadline = DEADLINE
        self.level: m.Level = "delivered"
        self.source: m.Source = "live"
        self.state = JobState("job", timing=TIMING, now=self.now)
        self.seen: dict[VersionKey, str] = {}
        self.pinned: dict[VersionKey, set[str]] = {}
        self.digests: set[tuple[VersionKey, int]] = set()
        self.puts: set[tuple[VersionKey, int]] = set()
        self.down: set[int] = set()  # writer ranks that have not registered again after a restart
        self.writers = [WriterProc(rank, self._name()) for rank in range(writers)]
        self.instances = {
            name: InstanceProc(
                name, ControllerProc(self._name()), [WorkerProc(r, self._name()) for r in range(ranks)]
            )
            for name in instances
        }
        for writer in self.writers:
            self.join_writer(writer)
        for instance in self.instances.values():
            for worker in instance.workers:
                self.join_worker(instance, worker)
            self.join_controller(instance)

    def _name(self) -> str:
        self.spawned += 1
        return f"p{self.spawned}"

    # --- sending

    def send(self, request: Any) -> Any:
        """Send, collect what else ended, return the reply, a `Deferred`, or the error of the tree."""
        try:
            return self.state.handle(request, self.now)
        except SynclineError as error:
            return error
        finally:
            self.collect()

    def collect(self) -> None:
        for done in self.state.pending():
            for writer in self.writers:
                if writer.closing == done.ticket:
                    self.window_closed(writer, done.reply)
            for instance in self.instances.values():
                if instance.controller.waiting == done.ticket:
                    instance.controller.waiting = None
                    if isinstance(done.reply, m.Begun):
                        self.begun(instance, done.reply)

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.state.tick(self.now)
        self.collect()

    # --- registrations

    def join_writer(self, writer: WriterProc) -> Any:
        last = (
            VersionKey(writer.fence.epoch, writer.holds if writer.put else writer.holds - 1)
            if writer.fence
            else None
        )
        if last is not None and last.number < 1:
            last = None
        request = m.RegisterWriter(
            TABLE, writer.rank, len(self.writers), b"w", "host", "", writer.process, writer.fence, last
        )
        reply = self.send(request)
        if isinstance(reply, m.Registered):
            writer.fence = reply.fence
            self.down.discard(writer.rank)
        return reply

    def join_worker(self, instance: InstanceProc, worker: WorkerProc) -> Any:
        worker.job, worker.apply = None, None
        fields = (worker.process, worker.fence, worker.applied, worker.dirty)
        request = m.RegisterReader(
            TABLE, instance.name, worker.rank, len(instance.workers), b"r", "host", "", *fields
        )
        reply = self.send(request)
        if isinstance(reply, m.Registered):
            worker.fence = reply.fence
        return reply

    def join_controller(self, instance: InstanceProc) -> Any:
        controller = instance.controller
        controller.begun = controller.waiting = None
        fields = (controller.process, controller.fence, controller.committed)
        reply = self.send(
            m.RegisterReader(TABLE, instance.name, -1, len(instance.workers), b"", "host", "", *fields)
        )
        if isinstance(reply, m.Registered):
            controller.fence, controller.committed = reply.fence, reply.committed
            if reply.applying is not None:
                self.tell_apply(instance, reply.applying)
        return reply

    # --- what writers do

    def key(self, writer: WriterProc) -> VersionKey:
        assert writer.fence is not None
        return VersionKey(writer.fence.epoch, writer.holds)

    def put(self, writer: WriterProc, *, refill: bool = False) -> Any:
        assert writer.fence is not None
        reply = self.send(
            m.Put(writer.fence, TABLE, writer.holds, b"w", 1, self.source, b"binding", refill=refill)
        )
        if isinstance(reply, m.PutDone):
            writer.put = True
            self.puts.add((reply.key, writer.rank))
        return reply

    def digest(self, writer: WriterProc) -> Any:
        assert writer.fence is not None
        self.digests.add((self.key(writer), writer.rank))
        reply = self.send(m.Digests(writer.fence, TABLE, self.key(writer), PLAN, b"d"))
        if isinstance(reply, m.Done):
            writer.digested = True
        else:
            self.digests.discard((self.key(writer), writer.rank))
        return reply

    def close(self, writer: WriterProc, deadline: float | None = None) -> Any:
        assert writer.fence is not None
        reply = self.send(m.CloseWindow(writer.fence, TABLE, self.key(writer), deadline or self.deadline))
        if isinstance(reply, Deferred):
            writer.closing = reply.ticket
        else:
            self.window_closed(writer, reply)
        return reply

    def window_closed(self, writer: WriterProc, reply: Any) -> None:
        """Change the weights at once: whoever still reads them reads something else."""
        writer.closing = None
        if isinstance(reply, m.WindowClosed) and writer.alive:
            writer.holds += 1
            writer.put = writer.digested = False

    # --- what instances do

    def begin(self, instance: InstanceProc, mode: Mode, deadline: float | None = None) -> Any:
        controller = instance.controller
        assert controller.fence is not None
        controller.nonce += 1
        controller.mode, controller.begun = mode, None
        request = m.BeginUpdate(
            controller.fence,
            TABLE,
            None,
            mode,
            deadline or self.deadline,
            controller.nonce,
            level=self.level,
        )
        reply = self.send(request)
        if isinstance(reply, Deferred):
            controller.waiting = reply.ticket
        elif isinstance(reply, m.Begun):
            self.begun(instance, reply)
        return reply

    def begun(self, instance: InstanceProc, reply: m.Begun) -> None:
        controller = instance.controller
        controller.begun = (reply.key, reply.attempt, controller.mode, reply.committed)
        controller.committed = reply.committed
        for worker in instance.workers:
            worker.job, worker.halves, worker.verified, worker.apply = controller.begun[:3], 0, False, None

    def read(self, instance: InstanceProc, worker: WorkerProc) -> Any:
        """Read the next half; after the last one, report."""
        assert worker.job is not None
        assert worker.fence is not None
        at, attempt, mode = worker.job
        source = self.writers[worker.halves]
        memory = worker.live if mode == "in_place" else worker.shadow
        half = self.content(source, at)
        memory = (half, memory[1]) if worker.halves == 0 else (memory[0], half)
        if mode == "in_place":
            worker.live, worker.dirty = memory, True
        else:
            worker.shadow = memory
        worker.halves += 1
        worker.moved += 1
        if worker.halves < 2:
            return self.send(m.Progress(worker.fence, TABLE, at, attempt, worker.halves))
        reply = self.send(m.Verified(worker.fence, TABLE, at, attempt, PLAN, 2, 2))
        worker.verified = isinstance(reply, m.Done)
        if not worker.verified:
            worker.job = None
        return reply

    def content(self, source: WriterProc, at: VersionKey) -> VersionKey:
        """Return what a read of version ``at`` finds in a writer's memory."""
        assert source.fence is not None
        if self.source == "snapshot":
            return at
        return (
            VersionKey(at.epoch, source.holds) if source.fence.epoch == at.epoch else VersionKey(at.epoch, 0)
        )

    def commit(self, instance: InstanceProc) -> Any:
        """Decide, whatever the workers said: the protocol must refuse what is wrong."""
        controller = instance.controller
        assert controller.fence is not None
        assert controller.begun is not None
        at, attempt, mode, committed = controller.begun
        request = m.Commit(controller.fence, TABLE, instance.name, committed, at, attempt)
        again = instance.high == at and self._state(instance.name) == "COMMITTED"
        reply = self.send(request)
        if isinstance(reply, m.Committed):
            if not again:
                self.check_commit(instance, at, attempt, mode)
            instance.high = at
            controller.committed = at
            self.tell_apply(instance, at)
        elif isinstance(reply, FencedError):
            controller.begun = None
        return reply

    def _state(self, name: str) -> str:
        one = self.state.core.tables[TABLE].instances.get(name)
        return one.state if one else ""

    def tell_apply(self, instance: InstanceProc, at: VersionKey) -> None:
        for worker in instance.workers:
            if worker.alive and worker.job is not None and worker.job[0] == at and worker.verified:
                worker.apply = at

    def apply(self, instance: InstanceProc, worker: WorkerProc) -> Any:
        assert worker.apply is not None
        assert worker.fence is not None
        at, worker.apply = worker.apply, None
        if worker.job is not None and worker.job[2] == "staged":
            worker.live = worker.shadow
        worker.applied, worker.dirty = at, False
        return self.send(m.Applied(worker.fence, TABLE, at))

    def fail(self, instance: InstanceProc, worker: WorkerProc) -> Any:
        assert worker.job is not None
        assert worker.fence is not None
        at, attempt, mode = worker.job
        touched = mode == "in_place" and worker.halves > 0
        worker.job = None
        return self.send(m.Failed(worker.fence, TABLE, at, attempt, {"what": "failed"}, touched))

    # --- time and faults

    def beat(self, *, stuck: tuple[WorkerProc, ...] = ()) -> None:
        """Let every live process show that it lives, and every pull that is not stuck move."""
        for process in self.processes():
            if not process.alive or process.fence is None:
                continue
            if isinstance(process, WorkerProc):
                process.moved += process not in stuck
                self.send(m.Heartbeat(process.fence, process.moved))
            else:
                self.send(m.Heartbeat(process.fence))

    def processes(self) -> list[Any]:
        workers = [worker for one in self.instances.values() for worker in one.workers]
        return [*self.writers, *(one.controller for one in self.instances.values()), *workers]

    def pass_time(self, seconds: float, *, stuck: tuple[WorkerProc, ...] = (), step: float = 5.0) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            self.beat(stuck=stuck)
            self.tick()

    def restart(self) -> None:
        """Kill the server; readers come back at once, writers one by one."""
        core = self.state.core
        self.state = JobState(
            "job", boot=core.boot + 1, epochs=self.state.epochs, timing=TIMING, now=self.now
        )
        self.seen.clear()
        self.pinned.clear()
        self.puts.clear()
        self.digests.clear()
        for writer in self.writers:
            writer.closing = None
            writer.put = writer.digested = False
            self.down.add(writer.rank)
        for instance in self.instances.values():
            if instance.controller.alive:
                self.join_controller(instance)
            for worker in instance.workers:
                if worker.alive:
                    self.join_worker(instance, worker)

    def come_back(self, writer: WriterProc) -> Any:
        """Register again after a restart, and offer again what live memory still holds."""
        reply = self.join_writer(writer)
        if isinstance(reply, m.Registered):
            self.put(writer, refill=True)
        return reply

    def replace_worker(self, instance: InstanceProc, worker: WorkerProc) -> Any:
        fresh = WorkerProc(worker.rank, self._name())
        instance.workers[worker.rank] = fresh
        if not any(one.alive for one in (*instance.workers, instance.controller) if one is not fresh):
            instance.high = None
        return self.join_worker(instance, fresh)

    def replace_controller(self, instance: InstanceProc) -> Any:
        instance.controller = ControllerProc(self._name())
        return self.join_controller(instance)

    def new_trainer(self) -> None:
        """Start all writers anew, from the oldest checkpoint."""
        for rank in range(len(self.writers)):
            self.writers[rank] = WriterProc(rank, self._name())
        for writer in self.writers:
            self.join_writer(writer)

    # --- what must hold

    def status(self) -> m.TableStatus:
        reply = self.state.handle(m.StatusQuery(TABLE), self.now)
        assert isinstance(reply, m.Status)
        return reply.tables[0]

    def instance_status(self, name: str) -> m.InstanceStatus | None:
        return next((one for one in self.status().instances if one.name == name), None)

    def check_commit(self, instance: InstanceProc, at: VersionKey, attempt: int, mode: Mode) -> None:
        """Every rank read this version, whole, in this attempt, and said so; the writers vouch for it."""
        for worker in instance.workers:
            assert worker.alive, "committed with a dead rank"
            assert worker.job == (at, attempt, mode), f"rank {worker.rank} was not at this attempt"
            assert worker.verified, f"committed before rank {worker.rank} had verified"
            memory = worker.live if mode == "in_place" else worker.shadow
            assert memory == (at, at), f"committed a torn pull: rank {worker.rank} holds {memory}"
        if self.level != "none":
            lacking = [one.rank for one in self.writers if (at, one.rank) not in self.digests]
            assert not lacking, f"committed without the digests of writers {lacking}"
        assert instance.high is None or at >= instance.high, "committed backwards"

    def check(self) -> None:
        """Check everything that holds at every moment."""
        status = self.status()
        for version in status.versions:
            self._check_version(version)
        for one in status.instances:
            self._check_instance(one)
        for wait in self.state.core.waits.values():
            assert self.now < wait.until, f"{wait.request} still waits past its deadline"
            assert wait.member in self.state.core.members, "a dead member waits"
        self.check_deadlines()

    def _check_version(self, version: m.VersionStatus) -> None:
        before = self.seen.get(version.key, "OPEN")
        legal = before == version.state or (before, version.state) in LEGAL
        assert legal, f"version {version.key} went from {before} to {version.state}"
        self.seen[version.key] = version.state
        if version.state in ("SEALED", "RETIRED", "BROKEN"):
            every = {(version.key, rank) for rank in range(len(self.writers))}
            assert every <= self.puts, f"version {version.key} sealed without every rank's put"
        pins = set(version.pins)
        if version.state in ("OPEN", "RETIRED", "ABORTED"):
            assert not pins, f"version {version.key} is {version.state} and pinned by {pins}"
        old = self.pinned.get(version.key)
        if version.closed and version.source == "live" and old is not None:
            assert pins <= old, f"version {version.key} was pinned after its window closed"
        self.pinned[version.key] = pins

    def _check_instance(self, one: m.InstanceStatus) -> None:
        instance = self.instances[one.name]
        alive = all(worker.alive for worker in instance.workers)
        if one.committed is not None and instance.high is not None:
            assert one.committed >= instance.high, "the committed version went back"
        if one.state in ("PULLING", "VERIFIED"):
            at = one.target
            in_place = instance.controller.mode == "in_place" and instance.controller.begun is not None
            assert not (in_place and one.serving), f"instance {one.name} serves while it pulls {at} in place"
        if not one.serving or not alive:
            return
        expected = one.committed or INITIAL
        for worker in instance.workers:
            assert worker.live == (expected, expected), (
                f"instance {one.name} serves {expected} while rank {worker.rank} holds {worker.live}"
            )
            assert worker.applied == one.committed, "serves before every rank acknowledged"

    def check_deadlines(self) -> None:
        """A writer that waits, waits for somebody; and the state says when it must be woken."""
        wake = self.state.next_wake(self.now)
        for wait in self.state.core.waits.values():
            assert wake <= wait.until - self.now
