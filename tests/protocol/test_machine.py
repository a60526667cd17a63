"""A hypothesis state machine: actions, faults, restarts, repetitions in any order; the world decides."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from syncline.errors import FencedError
from syncline.protocol import messages as m
from syncline.protocol.job import Deferred
from tests.protocol.world import DEADLINE, World

RANKS = st.integers(0, 1)
NAMES = st.sampled_from(["a", "b"])
DEADLINES = st.sampled_from([3.0, 30.0, DEADLINE])


REPEATED = [
    m.Put,
    m.Digests,
    m.Progress,
    m.Verified,
    m.Commit,
    m.Applied,
    m.Heartbeat,
    m.BeginUpdate,
    m.Failed,
]


class ProtocolMachine(RuleBasedStateMachine):
    """Actions that are not possible now do nothing, so that shrinking stays simple."""

    @initialize(
        level=st.sampled_from(["none", "delivered"]), source=st.sampled_from(["live", "live", "snapshot"])
    )
    def start(self, level: m.Level, source: m.Source) -> None:
        self.world = World()
        self.world.level, self.world.source = level, source
        self.sent: list[Any] = []
        send = self.world.send

        def recording(request: Any) -> Any:
            before = self.world.state.handle(m.StatusQuery(), self.world.now)
            reply = send(request)
            self.sent.append(request)
            if isinstance(reply, FencedError) and not isinstance(
                request, m.RegisterReader | m.RegisterWriter
            ):
                after = self.world.state.handle(m.StatusQuery(), self.world.now)
                assert after == before, "a fenced request changed something"
            return reply

        self.world.send = recording

    # --- writers

    @rule(rank=RANKS, deadline=DEADLINES)
    def writer_goes_on(self, rank: int, deadline: float) -> None:
        writer = self.world.writers[rank]
        if not writer.alive or rank in self.world.down or writer.closing is not None or writer.holds > 6:
            return
        if not writer.put:
            self.world.put(writer)
        elif not writer.digested:
            self.world.digest(writer)
        else:
            self.world.close(writer, deadline)

    @rule(rank=RANKS)
    def writer_dies(self, rank: int) -> None:
        self.world.writers[rank].alive = False

    @rule()
    def trainer_starts_anew(self) -> None:
        if self.world.state.core.tables["weights"].epoch < 4:
            self.world.new_trainer()

    @rule(rank=RANKS)
    def writer_comes_back(self, rank: int) -> None:
        writer = self.world.writers[rank]
        if writer.alive and writer.fence is not None and rank in self.world.down:
            self.world.come_back(writer)

    # --- instances

    @rule(name=NAMES, mode=st.sampled_from(["in_place", "staged"]), deadline=DEADLINES)
    def begin(self, name: str, mode: m.Mode, deadline: float) -> None:
        instance = self.world.instances[name]
        if instance.controller.alive:
            self.world.begin(instance, mode, deadline)

    @rule(name=NAMES, rank=RANKS, steps=st.integers(1, 2))
    def read(self, name: str, rank: int, steps: int) -> None:
        instance = self.world.instances[name]
        worker = instance.workers[rank]
        for _ in range(steps):
            if worker.alive and worker.job is not None and worker.halves < 2:
                self.world.read(instance, worker)

    @rule(name=NAMES)
    def everybody_reads(self, name: str) -> None:
        for rank in (0, 1):
            self.read(name, rank, 2)

    @rule(name=NAMES, rank=RANKS)
    def fail(self, name: str, rank: int) -> None:
        worker = self.world.instances[name].workers[rank]
        if worker.alive and worker.job is not None and not worker.apply:
            self.world.fail(self.world.instances[name], worker)

    @rule(name=NAMES)
    def commit(self, name: str) -> None:
        instance = self.world.instances[name]
        if instance.controller.alive and instance.controller.begun is not None:
            self.world.commit(instance)

    @rule(name=NAMES, rank=RANKS)
    def apply(self, name: str, rank: int) -> None:
        worker = self.world.instances[name].workers[rank]
        if worker.alive and worker.apply is not None:
            self.world.apply(self.world.instances[name], worker)

    @rule(name=NAMES, rank=RANKS)
    def worker_dies(self, name: str, rank: int) -> None:
        self.world.instances[name].workers[rank].alive = False

    @rule(name=NAMES, rank=RANKS)
    def worker_is_replaced(self, name: str, rank: int) -> None:
        instance = self.world.instances[name]
        instance.workers[rank].alive = False
        self.world.replace_worker(instance, instance.workers[rank])

    @rule(name=NAMES)
    def controller_dies(self, name: str) -> None:
        self.world.instances[name].controller.alive = False

    @rule(name=NAMES)
    def controller_is_replaced(self, name: str) -> None:
        self.world.replace_controller(self.world.instances[name])

    @rule(name=NAMES, rank=RANKS)
    def silent_worker_registers_again(self, name: str, rank: int) -> None:
        instance = self.world.instances[name]
        worker = instance.workers[rank]
        if worker.alive and worker.fence and worker.fence.member not in self.world.state.core.members:
            self.world.join_worker(instance, worker)

    # --- everything else

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(seconds=st.sampled_from([4.0, 11.0]), name=NAMES, rank=RANKS)
    def somebody_is_stuck(self, seconds: float, name: str, rank: int) -> None:
        self.world.pass_time(seconds, stuck=(self.world.instances[name].workers[rank],))

    @rule()
    def everybody_is_silent(self) -> None:
        self.world.tick(11.0)

    @precondition(lambda self: self.world.state.core.boot < 4)
    @rule()
    def server_restarts(self) -> None:
        self.world.restart()

    @rule(kind=st.sampled_from(REPEATED), back=st.integers(1, 6))
    def an_old_request_comes_again(self, kind: type[m.Message], back: int) -> None:
        """Repeat what was sent, from a live process or a superseded one; registrations apart."""
        old = [one for one in self.sent if isinstance(one, kind)][-back:]
        if not old:
            return
        before = self.world.status()
        reply = self.world.send(old[0])
        if isinstance(reply, Deferred) or kind in (m.BeginUpdate, m.Heartbeat):
            return
        facts = [(one.name, one.committed, one.serving) for one in before.instances]
        after = self.world.status()
        assert [(one.name, one.committed, one.serving) for one in after.instances] == facts, old[0]

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """Nobody waits for ever: with the longest deadline, every wait has ended."""
        if not hasattr(self, "world"):
            return
        self.world.pass_time(DEADLINE + 1, step=200.0)
        assert not self.world.state.core.waits
        for version in self.world.status().versions:
            assert not version.pins


FIXED = os.environ.get("SYNCLINE_TEST_EXAMPLES")  # a smaller search, the same each time: for the mutants
ProtocolMachine.TestCase.settings = settings(
    max_examples=int(FIXED or 150),
    derandomize=FIXED is not None,
    database=None,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestProtocol = ProtocolMachine.TestCase
