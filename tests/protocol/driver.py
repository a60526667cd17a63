"""A job in one process: the state under test, a clock, and members that remember what they were told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from syncline.protocol import messages as m
from syncline.protocol.ids import Fence, VersionKey
from syncline.protocol.job import Deferred, JobState, Timing

if TYPE_CHECKING:
    from syncline.errors import SynclineError

TABLE = "weights"
PLAN = b"plan"
TIMING = Timing(lease=10.0, stall=10.0, recovery=30.0)


def key(number: int, epoch: int = 1) -> VersionKey:
    return VersionKey(epoch, number)


class Job:
    """Wraps one `JobState`; every message takes the way through MessagePack, as on the wire."""

    def __init__(
        self, *, boot: int = 1, epochs: dict[str, int] | None = None, timing: Timing = TIMING
    ) -> None:
        self.now = 100.0
        self.timing = timing
        self.state = JobState("job", boot=boot, epochs=epochs, timing=timing, now=self.now)
        self.replies: dict[int, Any] = {}
        self.errors: dict[int, SynclineError] = {}

    def restart(self) -> None:
        boot, epochs = self.state.core.boot + 1, self.state.epochs
        self.state = JobState("job", boot=boot, epochs=epochs, timing=self.timing, now=self.now)

    def send(self, request: Any) -> Any:
        request = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=m.Request)
        try:
            answer = self.state.handle(request, self.now)
        finally:
            self._collect()
        if isinstance(answer, Deferred):
            assert self.now < answer.deadline
            return answer
        return msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=m.Reply)

    def _collect(self) -> None:
        for done in self.state.pending():
            assert (done.reply is None) != (done.error is None)
            if done.error is None:
                self.replies[done.ticket] = done.reply
            else:
                self.errors[done.ticket] = done.error

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.state.tick(self.now)
        self._collect()

    def wait(self, seconds: float, *alive: Member, step: float = 1.0) -> None:
        """Let time pass while the given members beat (without progress)."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            for member in alive:
                self.send(m.Heartbeat(member.fence))
            self.tick()

    def done(self, deferred: Deferred) -> bool:
        return deferred.ticket in self.replies or deferred.ticket in self.errors

    def reply(self, deferred: Any) -> Any:
        assert isinstance(deferred, Deferred), deferred
        if deferred.ticket in self.errors:
            raise self.errors[deferred.ticket]
        return self.replies[deferred.ticket]

    def status(self) -> m.TableStatus:
        return self.send(m.StatusQuery(TABLE)).tables[0]

    def version(self, number: int, epoch: int = 1) -> m.VersionStatus:
        return next(one for one in self.status().versions if one.key == key(number, epoch))

    def instance(self, name: str = "a") -> m.InstanceStatus:
        return next(one for one in self.status().instances if one.name == name)

    # --- members

    def writer(self, rank: int, world: int = 2, process: str = "", **fields: Any) -> Writer:
        return Writer(self, rank, world, process or f"w{rank}", **fields)

    def writers(self, world: int = 2, process: str = "w") -> list[Writer]:
        return [self.writer(rank, world, f"{process}{rank}") for rank in range(world)]

    def fleet(self, name: str = "a", world: int = 2, process: str = "", **fields: Any) -> Fleet:
        return Fleet(self, name, world, process or name, **fields)


class Member:
    fence: Fence

    def __init__(self, job: Job) -> None:
        self.job = job

    def beat(self, progress: int = 0) -> None:
        self.job.send(m.Heartbeat(self.fence, progress))

    def leave(self) -> None:
        self.job.send(m.Deregister(self.fence, "goodbye"))


class Writer(Member):
    def __init__(self, job: Job, rank: int, world: int, process: str, **fields: Any) -> None:
        super().__init__(job)
        self.rank, self.world, self.process = rank, world, process
        self.registered = self.join(**fields)

    def join(self, **fields: Any) -> m.Registered:
        request = m.RegisterWriter(
            TABLE,
            self.rank,
            self.world,
            b"fp%d" % self.rank,
            "host",
            f"ep{self.rank}",
            self.process,
            **fields,
        )
        reply = self.job.send(request)
        self.fence = reply.fence
        return reply

    def put(self, number: int, source: m.Source = "live", **fields: Any) -> m.PutDone:
        request = m.Put(self.fence, TABLE, number, b"fp%d" % self.rank, 1, source, b"binding", **fields)
        return self.job.send(request)

    def digest(self, number: int, plan: bytes = PLAN, epoch: int | None = None) -> Any:
        at = key(number, epoch or self.fence.epoch)
        return self.job.send(m.Digests(self.fence, TABLE, at, plan, b"digest%d" % self.rank))

    def close(self, number: int, deadline: float = 60.0, **fields: Any) -> Any:
        at = key(number, self.fence.epoch)
        return self.job.send(m.CloseWindow(self.fence, TABLE, at, deadline, **fields))


class Reader(Member):
    def __init__(self, job: Job, name: str, rank: int, world: int, process: str, **fields: Any) -> None:
        super().__init__(job)
        self.name, self.rank, self.world, self.process = name, rank, world, process
        self.nonce = 0
        self.registered = self.join(**fields)

    def join(self, **fields: Any) -> m.Registered:
        fp = b"" if self.rank < 0 else b"rfp%d" % self.rank
        request = m.RegisterReader(
            TABLE, self.name, self.rank, self.world, fp, "host", "", self.process, **fields
        )
        reply = self.job.send(request)
        self.fence = reply.fence
        return reply

    # controller
    def begin(self, number: int | None = None, deadline: float = 60.0, **fields: Any) -> Any:
        self.nonce += 1
        fields.setdefault("mode", "in_place")
        fields.setdefault("nonce", self.nonce)
        return self.job.send(m.BeginUpdate(self.fence, TABLE, number, deadline=deadline, **fields))

    def commit(self, to: VersionKey, attempt: int, from_: VersionKey | None) -> Any:
        return self.job.send(m.Commit(self.fence, TABLE, self.name, from_, to, attempt))

    # worker
    def progress(self, begun: m.Begun, nbytes: int) -> Any:
        return self.job.send(m.Progress(self.fence, TABLE, begun.key, begun.attempt, nbytes))

    def verify(self, begun: m.Begun, plan: bytes = PLAN, nbytes: int = 8, planned: int = 8) -> Any:
        return self.job.send(m.Verified(self.fence, TABLE, begun.key, begun.attempt, plan, nbytes, planned))

    def fail(self, begun: m.Begun, *, touched: bool = True, what: str = "broken pipe") -> Any:
        error: dict[str, str | None] = {"kind": "TransportError", "what": what}
        return self.job.send(m.Failed(self.fence, TABLE, begun.key, begun.attempt, error, touched))

    def apply(self, at: VersionKey) -> m.AppliedDone:
        return self.job.send(m.Applied(self.fence, TABLE, at))


class Fleet:
    """One instance: its controller and its workers."""

    def __init__(self, job: Job, name: str, world: int, process: str, **fields: Any) -> None:
        self.job, self.name = job, name
        self.workers = [Reader(job, name, rank, world, f"{process}{rank}", **fields) for rank in range(world)]
        self.controller = Reader(job, name, -1, world, f"{process}c")

    @property
    def all(self) -> list[Reader]:
        return [self.controller, *self.workers]

    def verify(self, begun: m.Begun) -> None:
        for worker in self.workers:
            worker.verify(begun)

    def update(self, number: int | None = None, from_: VersionKey | None = None, **fields: Any) -> m.Begun:
        """Run one whole update of a version whose digests are there."""
        begun = self.controller.begin(number, **fields)
        assert isinstance(begun, m.Begun), begun
        self.verify(begun)
        self.controller.commit(begun.key, begun.attempt, from_ or begun.committed)
        for worker in self.workers:
            worker.apply(begun.key)
        return begun


def publish(writers: list[Writer], number: int, source: m.Source = "live", plan: bytes = PLAN) -> VersionKey:
    """Put on every rank, with digests."""
    for writer in writers:
        writer.put(number, source)
    for writer in writers:
        writer.digest(number, plan)
    return key(number, writers[0].fence.epoch)
