"""One reader rank's part in an update: pull, prove, apply. Called by `WorkerWeightsReader`'s thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from syncline import faults
from syncline.protocol import messages as m
from syncline.protocol.ids import Fence
from syncline.store.adapter import DeviceEngine, StagedEngine
from syncline.store.proof import Proof
from syncline.store.pull import Puller
from syncline.store.report import Stopwatch

if TYPE_CHECKING:
    from syncline.plan import Plan
    from syncline.protocol.ids import VersionKey
    from syncline.store.adapter import EngineAdapter
    from syncline.store.member import Member
    from syncline.store.pull import Leg, Outcome, Route


class RankUpdater:
    """Takes one rank through updates. One thread at a time.

    Args:
        member: the process.
        adapter: of the engine in it.
        fence: the rank's own.
        table: name of the table.
        instance: name of the instance.

    Attributes:
        touched: whether the update at hand has written live memory (or may have).
        moved: bytes moved since the start, for heartbeats.
    """

    def __init__(
        self, member: Member, adapter: EngineAdapter, fence: Fence, table: str, instance: str
    ) -> None:
        self._member, self._adapter, self._fence = member, adapter, fence
        self._table, self._instance = table, instance
        self._staged = adapter if isinstance(adapter, StagedEngine) else None
        self.who = f"instance {instance}, rank {adapter.rank}"
        only = member.options.transport
        self._puller = Puller(member, fence, None if only == "auto" else only)
        self._proof = Proof(member, table, self.who, adapter.binding)
        self.book = member.plans(fence)
        self.touched = False
        self.moved = 0
        self._held: VersionKey | None = None
        self._received: frozenset[str] = frozenset()

    def pull(self, begun: m.Begun) -> m.Verified:
        """Install every byte of a version in live memory and prove it.

        Returns:
            The report that the MetaServer wants. Until it is sent, nothing of the version counts.
        """
        self.touched = False
        watch = Stopwatch(time.monotonic)
        deadline = self._member.options.update_timeout
        stages = self._staged.stages if self._staged is not None else ()
        places = begun.writers
        route = self._puller.route(self._plan(begun), self._instance, self._adapter.rank, places, stages)
        watch.lap("plan")
        fence = update_fence(self._member, begun)
        faults.point("worker.before_bind")
        self._puller.bind(route, places, self._adapter.binding(), fence, deadline)
        watch.lap("bind")
        if isinstance(self._adapter, DeviceEngine):
            self._adapter.finish_forwards()  # paused means: no kernel of a forward pass runs either
        self._meet(begun)
        watch.lap("meet")
        self._member.client.note(self._fence, committed=self._held, dirty=True)  # before the first byte
        self.touched = True
        faults.point("worker.before_first_byte")
        self._received = route.received
        before = self.moved
        for index in range(len(route.legs)):
            self._receive(begun, route, index, fence, before, watch)
        moved = self.moved - before
        report: dict[str, int | float | str] = {
            "nbytes": moved,
            "tensors": len(route.received),
            **_proved(begun, route),
            **{f"{phase}_s": seconds for phase, seconds in watch.seconds.items()},
        }
        return m.Verified(
            self._fence,
            self._table,
            begun.key,
            begun.attempt,
            route.plan.id,
            moved,
            route.nbytes,
            report,
        )

    def apply(self, begun: m.Begun) -> None:
        """Let the engine recompute what it derives from the weights, after the commit was decided.

        Raises:
            AdapterError: its hook moved a live tensor, named.
        """
        self.touched = True
        self._adapter.after_update(begun.key, self._received)
        if isinstance(self._adapter, DeviceEngine):
            self._adapter.finish_forwards()  # and what its hook began has ended before anybody resumes
        self._adapter.binding()
        self._adapter.report_version(begun.key)

    def settle(self, key: VersionKey) -> None:
        """Remember, for a server that may lose its memory, that live memory holds this version whole."""
        self._held = key
        self._member.client.note(self._fence, committed=key, dirty=False)

    def _plan(self, begun: m.Begun) -> Plan:
        ranks = [m.RankLayout(w.manifest_fp, w.host, w.rules) for w in begun.writers]
        return self.book.plan(ranks, begun.membership, self._instance)

    def _meet(self, begun: m.Begun) -> None:
        """Wait until all ranks of the instance are bound: who cannot take part fails before a byte moves."""
        if self._adapter.world == 1:
            return
        faults.point("worker.before_meet")
        seconds = self._member.options.update_timeout
        self._member.ask(m.AwaitBound(self._fence, self._table, begun.key, begun.attempt, seconds), seconds)

    def _receive(
        self, begun: m.Begun, route: Route, index: int, fence: Fence, before: int, watch: Stopwatch
    ) -> None:
        """Receive and prove one leg, and hand it to an engine that takes stages."""
        staged = self._staged if self._staged is not None and self._staged.stages else None
        deadline = self._member.options.update_timeout
        if staged is not None:
            staged.begin_stage(index)
            watch.lap("install")
        outcome = self._move(begun, route.legs[index], fence, before)
        watch.lap("transfer")
        self._proof.check(self._fence, begun, route, index, outcome, deadline)
        watch.lap("proof")
        if staged is not None:
            faults.point("worker.before_end_stage")
            staged.end_stage(index)
            watch.lap("install")

    def _move(self, begun: m.Begun, leg: Leg, fence: Fence, before: int) -> Outcome:
        start = self.moved

        def report(nbytes: int) -> None:
            self.moved = start + nbytes
            moved = self.moved - before
            self._member.ask(m.Progress(self._fence, self._table, begun.key, begun.attempt, moved))

        deadline = self._member.options.update_timeout
        outcome = self._puller.run(leg, fence, deadline, digest=begun.level != "none", report=report)
        self.moved = start + outcome.nbytes
        return outcome


def _proved(begun: m.Begun, route: Route) -> dict[str, int | float | str]:
    if begun.level == "none":
        return {}
    return {"hops_proved": len(route.hops), "installed": int(begun.level == "installed")}


def update_fence(member: Member, begun: m.Begun) -> Fence:
    """Return the fence that both sides of an update make for themselves: no member's, but the attempt's."""
    return Fence(member.job, member.client.boot, begun.key.epoch, 0, begun.attempt)
