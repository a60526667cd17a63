"""`SGLangInstance`: what the user of an SGLang engine holds, beside ``Engine(...)`` or a server's URL."""

from __future__ import annotations

import threading
import time
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from syncline.adapters.sglang import commands as c
from syncline.adapters.sglang.commands import error_of
from syncline.adapters.sglang.doors import Door, EngineDoor, Pause, ServerDoor
from syncline.errors import AdapterError, DeadlineError
from syncline.options import Options
from syncline.protocol import messages as m
from syncline.protocol.ids import VersionKey
from syncline.store.adapter import LiveStatus, Status
from syncline.store.member import Member
from syncline.store.report import UpdateReport

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from syncline.errors import SynclineError
    from syncline.layout import Rules
    from syncline.protocol.parts import Level

_PATIENCE = 10.0  # seconds beyond an update's own, for the engine's answer to arrive


class SGLangInstance:
    """Keeps one SGLang engine, of any number of tensor-parallel ranks, at a version.

    The engine's schedulers do the work, through the plug-in that SGLang loads in them (entry point
    ``sglang.srt.plugins``): each of them joins the job with a `WorkerWeightsReader`, rank 0 with the
    `WeightReader` too. An update is: wait for the version while the engine serves; pause; pull, prove,
    commit, recompute derived weights; flush the caches; report the version; continue. If it fails after the
    first byte, the engine stays paused until a full update succeeds.

    Args:
        engine: an ``sglang.Engine`` of this process, or the URL of a server.
        instance: its name in the job.
        job: name of the job, which this process can reach too.
        table: name of the table.
        rules: what the instance allows; `Rules.frozen` also takes live names that the engine keeps to itself.
        options: deadlines and bounds, here and in the engine; from the environments if left out.
        pause: what happens to requests that run when an update begins.
        key: the server's API key.
        check: wait for the writers, and refuse at once if they cannot feed this instance.
        hold: stay paused until the first update: an engine started on dummy weights serves nobody.
        frozen_draft: leave a draft model (speculative decoding) as it was started; else one is refused.
        twin_check: prove the layout by SGLang's own loader, a rank of random weights in host memory; only
            once for each SGLang, model and layout on a host.
        verify_every: as for `syncline.store.reader.WeightReader`.

    Attributes:
        facts: for each rank, counts of its live tensors by kind (``tensors``, ``traced``, ``replayed``,
            ``derived``, ``local``, ``staged``) and of its ``stages``, and the checkpoint names that SGLang's
            loader ignored (``unused``).

    Raises:
        NameMismatchError, ShapeMismatchError, UndeclaredCastError, CoverageError: the writers cannot feed it.
        AdapterError: a live tensor that nothing explains, or one that cannot be updated; named.
        ProtocolError: the engine does not load syncline's plug-in.
        DeadlineError: no MetaServer, or with ``check`` no writers, within ``connect_timeout``.
    """

    def __init__(
        self,
        engine: Any,
        *,
        instance: str,
        job: str = "default",
        table: str = "weights",
        rules: Rules | None = None,
        options: Options | None = None,
        pause: Pause = "retract",
        key: str | None = None,
        check: bool = True,
        hold: bool = False,
        frozen_draft: bool = False,
        twin_check: bool = True,
        verify_every: int = 1,
    ) -> None:
        self.instance, self._table = instance, table
        self._mode: Pause = pause
        self._options = options or Options.from_environment()
        self._door: Door = ServerDoor(engine, key) if isinstance(engine, str) else EngineDoor(engine)
        self._updating = threading.Lock()
        self._paused_at: float | None = None
        self._hold = hold
        self.facts: list[dict[str, Any]] = []
        self._member = Member(job, f"instance {instance}, user", self._options)
        join = c.Join(
            instance=instance,
            job=job,
            table=table,
            rules=_rules(rules),
            options={} if options is None else _changed(options),
            check=check,
            frozen_draft=frozen_draft,
            twin_check=twin_check,
            verify_every=verify_every,
        )
        try:
            self._join(join)
        except BaseException:
            self._member.close()
            raise

    @property
    def paused(self) -> bool:
        """Whether this object holds the engine paused: an update failed half-way, or none has come yet."""
        return self._paused_at is not None

    def update(
        self,
        version: int | None = None,
        *,
        timeout: float | None = None,
        verify: Level = "delivered",
        after: VersionKey | None = None,
    ) -> UpdateReport:
        """Bring the engine to a version, and return when it runs on it.

        Args:
            version: the writers' number; None: the newest that can be had. A future one is waited for.
            timeout: seconds for everything; ``update_timeout`` if left out.
            verify: the proof demanded before the commit; see `check_effective` for the strongest.
            after: only a version newer than this one will do.

        Raises:
            AdapterError: requests run that a pause of this kind does not stop, or the caches could not be
                flushed: the update failed.
            SynclineError: as `syncline.store.reader.WeightReader.update` raises it, from whichever rank.
        """
        if verify == "effective":
            raise AdapterError(
                "an update cannot prove the level 'effective' by itself",
                hint="after the update, call check_effective(checkpoint)",
            )
        with self._updating:
            until = time.monotonic() + (self._options.update_timeout if timeout is None else timeout)
            self._await(version, after, until)
            self._pause(self._mode, _left(until))
            seconds = _left(until)
            reply = self._exchange(c.Update(version, seconds, verify), seconds + _PATIENCE)
            error = error_of(reply)
            if error is not None:
                self._give_up(reply, error)
                raise error
            return self._finish(_report(reply.result[0]))

    def live_status(self) -> list[dict[str, LiveStatus]]:
        """List every live tensor of every rank as synced, derived or local; index = rank."""
        ranks = self._ask(c.Describe())
        return [{name: _status(fields) for name, fields in rank.items()} for rank in ranks]

    def check_effective(self, directory: Path | str) -> None:
        """Compare every live tensor of every rank with a fresh load of a checkpoint by SGLang's own loader.

        Raises:
            EffectiveMismatchError: they differ; names tensors, counts, first indices, distances.
        """
        self._ask(c.Effective(str(directory)))

    def dump(self, directory: Path | str) -> None:
        """Write each rank's live tensors as ``rank-<n>.safetensors``, for comparisons."""
        self._ask(c.Dump(str(directory)))

    def close(self) -> None:
        """Leave the job. The engine keeps what it has, and goes on unless an update failed half-way."""
        try:
            self._ask(c.Leave())
        finally:
            self._member.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._member.fail(error)
        self.close()

    # ------------------------------------------------------------------------------------ one update

    def _finish(self, report: UpdateReport) -> UpdateReport:
        """Say which version is served, and let the engine go on."""
        self._hold = False
        self._door.report_version(str(report.key), _PATIENCE)
        paused = self._resume()
        return replace(report, paused=paused) if report.changed else report

    def _give_up(self, reply: c.Reply, error: SynclineError) -> None:
        """Let the engine go on after a failed update if it holds one version, whole, with no old caches."""
        if reply.hold or self._hold:
            error.add_note(f"the engine of instance {self.instance} stays paused until an update succeeds")
        else:
            self._resume()

    def _pause(self, mode: Pause, deadline: float) -> None:
        """Pause the engine; one that is paused already, perhaps in a milder way, as well."""
        began = time.monotonic()
        self._door.pause(mode, deadline)
        if self._paused_at is None:
            self._paused_at = began

    def _resume(self) -> float:
        """Let the engine go on; return for how long it stood."""
        self._door.resume(_PATIENCE)
        paused = time.monotonic() - (self._paused_at or time.monotonic())
        self._paused_at = None
        return paused

    def _join(self, command: c.Join) -> None:
        """Join while the engine stands: its scheduler's thread learns the layout."""
        wait = self._options.connect_timeout
        self._pause("in_place", wait)  # nothing is written yet: requests go on afterwards as they were
        reply = self._exchange(command, 3 * wait + _PATIENCE)  # for a server, for writers, for a layout
        error = error_of(reply)
        if not reply.hold and (error is not None or not self._hold):
            self._resume()
        if error is not None:
            raise error
        self.facts = list(reply.result)

    def _await(self, version: int | None, after: VersionKey | None, until: float) -> None:
        """Wait, while the engine serves, until there is a version; what is wrong with it, the update says.

        Raises:
            DeadlineError: none came.
        """
        while True:
            status: m.Status = self._member.ask(m.StatusQuery(self._table))
            tables = [table for table in status.tables if table.name == self._table]
            keys = [v.key for table in tables for v in table.versions if v.state != "OPEN"]
            newest = max(keys, default=None)
            if newest is not None and _satisfies(newest, version, after):
                return
            left = _left(until)
            if left <= 0:
                wanted = "any version" if version is None else f"version {version}"
                raise DeadlineError(
                    f"instance {self.instance} waited for {wanted}, and nobody published it",
                    expected=f"newer than {after}" if after is not None else None,
                    found="nothing" if newest is None else f"version {newest}",
                )
            try:
                self._member.ask(m.Watch(status.seq, left), left + _PATIENCE)
            except DeadlineError:
                continue

    # ------------------------------------------------------------------------------------ commands

    def _ask(self, command: c.Command) -> list[Any]:
        """Send a command that writes nothing, while requests stand still; return each rank's result."""
        with self._updating:
            held = self.paused
            if not held:
                self._pause("in_place", self._options.update_timeout)
            try:
                reply = self._exchange(command, self._options.update_timeout)
            finally:
                if not held:
                    self._resume()
        error = error_of(reply)
        if error is not None:
            raise error
        return list(reply.result)

    def _exchange(self, command: c.Command, deadline: float) -> c.Reply:
        return c.decode_reply(self._door.command(c.encode(command), deadline))


def _satisfies(newest: VersionKey, version: int | None, after: VersionKey | None) -> bool:
    return (version is None or newest.number >= version) and (after is None or newest > after)


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _rules(rules: Rules | None) -> c.RulesText:
    if rules is None:
        return c.RulesText()
    casts: dict[str, str] | Literal["reader"] = "reader" if rules.casts == "reader" else dict(rules.casts)
    return c.RulesText(casts, rules.frozen, rules.extras, dict(rules.aliases))


def _changed(options: Options) -> dict[str, int | float | str]:
    return {field.name: getattr(options, field.name) for field in fields(options)}


def _report(values: dict[str, Any]) -> UpdateReport:
    """Return the report that `UpdateReport.as_dict` wrote."""
    epoch, number = values["key"].split(".")
    known = {field.name for field in fields(UpdateReport)}
    kept = {name: value for name, value in values.items() if name in known}
    return UpdateReport(
        **(kept | {"key": VersionKey(int(epoch), int(number)), "ranks": tuple(values["ranks"])})
    )


def _status(values: dict[str, Any]) -> LiveStatus:
    return LiveStatus(
        Status(values["status"]), tuple(values["names"]), values["dtype"], tuple(values["shape"])
    )
