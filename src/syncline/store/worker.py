"""`WorkerWeightsReader`: beside each inference rank's parameters. It moves the data, and decides nothing."""

from __future__ import annotations

import logging
import threading
import traceback
from typing import TYPE_CHECKING, Self

from syncline import faults
from syncline.errors import DeadlineError, FencedError, SynclineError, to_wire
from syncline.kernels.engine import Op
from syncline.layout import Rules
from syncline.protocol import messages as m
from syncline.store import join
from syncline.store import rules as rules_wire
from syncline.store.lanes import device_of
from syncline.store.member import Member
from syncline.store.rank import RankUpdater
from syncline.verify.effective import compare

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from syncline.options import Options
    from syncline.protocol.ids import Fence
    from syncline.store.adapter import EngineAdapter
    from syncline.verify.effective import EffectiveReport

logger = logging.getLogger(__name__)

_IDLE = 30.0  # seconds of one wait for work; it is asked again at once
_PATIENCE = 5.0  # seconds for a last word
_FAREWELL = 1.0  # seconds for one that nobody depends on


class WorkerWeightsReader:
    """Takes part in the updates of one instance, as one rank, from a thread of its own.

    The instance's `WeightReader` decides when and what; this object pulls, proves, and applies. It never
    writes live memory except between the controller's start of an update and its own report.

    Args:
        adapter: of the engine in this process.
        instance: name of the instance: the ranks that take part in one forward pass.
        job: name of the job.
        table: name of the table.
        rules: what this instance allows beyond equal names and dtypes.
        options: deadlines and bounds; from the environment if left out.
        member: the connection of another face in this process, to share.

    Raises:
        DeadlineError: no MetaServer within ``connect_timeout``.
        AuthError: the job's key is missing or wrong.
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
        member: Member | None = None,
    ) -> None:
        self.adapter, self.instance, self._table = adapter, instance, table
        self.who = f"instance {instance}, rank {adapter.rank}"
        self._owns = member is None
        self.member = member or Member(job, self.who, options, device=device_of(adapter))
        self.failure: SynclineError | None = None
        self._attempt = 0
        self._closing = threading.Event()
        try:
            self.member.compiled(Op.COPY_DIGEST, Op.DIGEST)  # takes a while, once
            self._fence = self._register(rules or Rules())
        except BaseException as error:
            self._decline(error)
            raise
        self._updater = RankUpdater(self.member, adapter, self._fence, table, instance)
        self.member.client.count_progress(self._fence, lambda: self._updater.moved)
        self._thread = threading.Thread(target=self._serve, name=f"syncline {self.who}", daemon=True)
        self._thread.start()

    def check_layout(self, deadline: float | None = None) -> None:
        """Wait until both sides are complete, and check that the writers can feed this instance.

        Args:
            deadline: seconds; ``connect_timeout`` if left out.

        Raises:
            NameMismatchError, ShapeMismatchError, UndeclaredCastError, CoverageError: they cannot, and no
                byte has moved; the message names the tensor.
            DeadlineError: names whoever is missing.
        """
        seconds = self.member.options.connect_timeout if deadline is None else deadline
        request = m.AwaitMembers(self._fence, self._table, seconds)
        members: m.Members = self.member.ask(request, seconds)
        mine = next((one for one in members.instances if one.name == self.instance), None)
        if mine is not None:
            self._updater.book.check(members.writers, mine)

    def check_effective(self, directory: Path) -> EffectiveReport:
        """Compare every live tensor, bit for bit, with a fresh load by the engine's own loader.

        All ranks of an instance call it together, between two updates.

        Raises:
            EffectiveMismatchError: they differ; names tensors, counts, first indices, distances.
        """
        report = compare(self.adapter.live_tensors(), self.adapter.load_fresh(directory))
        report.raise_on_difference(self.who)
        return report

    def close(self) -> None:
        """Stop taking part; an update under way fails for the whole instance."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._owns:
            self.member.close()
        elif not self._leave():
            return  # no server: the thread ends with the member that it shares
        self._thread.join(_PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.member.fail(error)
        self.close()

    # --- registration

    def _register(self, rules: Rules) -> Fence:
        adapter, member = self.adapter, self.member
        allowed = rules_wire.merge([rules, Rules(aliases=adapter.aliases)])
        return join.as_reader(member, self._table, self.instance, adapter, rules_wire.encode(allowed))

    def _decline(self, error: BaseException) -> None:
        join.decline(self.member, self._table, self.who, error, self.instance)
        if self._owns:
            self.member.fail(error)
            self.member.close()

    def _leave(self) -> bool:
        try:
            self.member.ask(m.Deregister(self._fence, "closed"), _FAREWELL)
        except SynclineError as error:
            logger.debug("%s left without a farewell: %s", self.who, error.what)
            return False
        return True

    # --- the thread

    def _serve(self) -> None:
        self.member.use_device()
        while not self._closing.is_set():
            try:
                request = m.AwaitUpdate(self._fence, self._table, self._attempt, _IDLE)
                begun: m.Begun = self.member.ask(request, _IDLE)
            except DeadlineError:
                continue  # nothing to do for a while, or no server for a while
            except SynclineError as error:
                if not self._closing.is_set():
                    self.failure = error
                    logger.exception("%s takes part no more", self.who)
                return
            self._attempt = begun.attempt
            self._take_part(begun)

    def _take_part(self, begun: m.Begun) -> None:
        try:
            verified = self._updater.pull(begun)
            faults.point("worker.before_verified")
            self.member.ask(verified)
            if not self._decided(begun):
                return
            faults.point("worker.before_apply")
            self._updater.apply(begun)
            faults.point("worker.before_applied")
            self.member.ask(m.Applied(self._fence, self._table, begun.key))
            self._updater.settle(begun.key)
        except BaseException as error:
            if self._closing.is_set():
                return
            logger.warning("%s: version %s failed", self.who, begun.key, exc_info=True)
            self._tell_failure(begun, error)

    def _decided(self, begun: m.Begun) -> bool:
        wait = self.member.options.update_timeout
        request = m.AwaitDecision(self._fence, self._table, begun.key, begun.attempt, wait)
        decision: m.Decision = self.member.ask(request, wait)
        if not decision.committed:
            logger.warning("%s: version %s was not committed: %s", self.who, begun.key, decision.reason)
        return decision.committed

    def _tell_failure(self, begun: m.Begun, error: BaseException) -> None:
        fields = to_wire(error, "".join(traceback.format_exception(error)))
        fields["rank"] = fields.get("rank") or self.who
        touched = self._updater.touched
        try:
            note = m.Failed(self._fence, self._table, begun.key, begun.attempt, fields, touched)
            self.member.ask(note, _PATIENCE)
        except FencedError as late:
            logger.info("%s: the attempt was over already: %s", self.who, late.what)
        except SynclineError as unheard:
            logger.warning("%s could not report its failure: %s", self.who, unheard.what)
