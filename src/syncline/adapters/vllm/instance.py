"""`VLLMInstance`: one vLLM instance kept at a version, from outside, through vLLM's own verbs."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from syncline.adapters.vllm.doors import Door, HTTPDoor, LLMDoor, VLLMPause
from syncline.errors import SynclineError
from syncline.meta import MetaClient
from syncline.options import Options
from syncline.protocol import messages as m

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from syncline.protocol.ids import VersionKey
    from syncline.protocol.parts import Level

logger = logging.getLogger(__name__)

_PATIENCE = 30.0  # seconds for a verb that only changes a state
_SLACK = 45.0  # seconds beyond an update's own deadline until its call is given up


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """What an update did.

    Attributes:
        key: the version that the instance serves now.
        changed: whether it is another than before.
        seconds: by phase: ``pause``, ``update``, ``caches``, ``resume``, ``total``.
    """

    key: VersionKey
    changed: bool
    seconds: Mapping[str, float] = field(default_factory=dict)


class VLLMInstance:
    """Drives the updates of one vLLM instance: pause, update, cache reset, version, resume.

    The instance's workers join the job themselves; this object moves no weights. It may live anywhere that
    reaches the job's MetaServer and vLLM's verbs.

    Args:
        engine: an ``LLM`` of this process, or the URL of a server (``VLLM_SERVER_DEV_MODE=1``); either
            started with ``weight_transfer_config={"backend": "syncline"}``.
        instance: name of the instance.
        job: name of the job.
        table: name of the table.
        options: deadlines; from the environment if left out.
        pause: what happens to requests that run when an update begins: ``"abort"`` cuts them, ``"wait"`` lets
            them end, ``"keep"`` freezes them; frozen ones recompute keys and values with the new weights.
        hold: stay paused until the first update: an engine started on dummy weights serves nobody.
        casts, extras, frozen: the instance's `Rules`.
        local: patterns of parameters that no checkpoint tensor fills and that stay as they are.
        verify_every: prove every n-th update.
        twin_check: prove the layout by vLLM's own loader, a rank of random weights in host memory; only once
            for each vLLM, model and layout on a host.
        frozen_draft: leave a draft model (speculative decoding) as it was started; else one is refused.
        token: the server's API key.

    Raises:
        AdapterError: a live tensor or layer that cannot be explained or updated; named.
        NameMismatchError, ShapeMismatchError, UndeclaredCastError, CoverageError: the writers cannot feed it.
        DeadlineError: no writers, or no MetaServer, within ``connect_timeout``.
    """

    def __init__(
        self,
        engine: Any,
        *,
        instance: str = "vllm",
        job: str = "default",
        table: str = "weights",
        options: Options | None = None,
        pause: VLLMPause = "keep",
        hold: bool = False,
        casts: Mapping[str, str] | str | None = None,
        extras: Sequence[str] = (),
        frozen: Sequence[str] = (),
        local: Sequence[str] = (),
        verify_every: int = 1,
        twin_check: bool = True,
        frozen_draft: bool = False,
        token: str | None = None,
    ) -> None:
        self.instance, self._table = instance, table
        self._mode: VLLMPause = pause
        self._options = options or Options.from_environment()
        self._door: Door = HTTPDoor(engine, token) if isinstance(engine, str) else LLMDoor(engine)
        self._paused = False
        self._meta = MetaClient(job, self._options)
        try:
            if hold:
                self.hold()
            info = {
                "job": job,
                "table": table,
                "instance": instance,
                "options": _changed(self._options),
                "casts": casts if isinstance(casts, str) else dict(casts or {}),
                "extras": list(extras),
                "frozen": list(frozen),
                "local": list(local),
                "verify_every": verify_every,
                "twin_check": twin_check,
                "frozen_draft": frozen_draft,
            }
            self._door.initialise(info, self._options.connect_timeout + _SLACK)
            if self.dirty:
                logger.warning("instance %s is DIRTY: it is paused until a full update", instance)
                self.hold()
        except BaseException:
            self._meta.close()
            raise

    @property
    def committed(self) -> VersionKey | None:
        """The version that the instance serves; None before the first update."""
        return self._status().committed

    @property
    def dirty(self) -> bool:
        """Whether live memory may hold a mixture: then the instance is paused."""
        return self._status().dirty

    @property
    def paused(self) -> bool:
        """Whether this object holds the instance paused."""
        return self._paused

    def hold(self) -> None:
        """Pause until the next update succeeds."""
        if not self._paused:
            self._door.pause(self._mode, self._options.update_timeout)
            self._paused = True

    def update(
        self, version: int | None = None, *, timeout: float | None = None, verify: Level = "delivered"
    ) -> InstanceReport:
        """Bring the instance to a version, and return when it serves it.

        Args:
            version: the writers' number; None: the newest. A future one is waited for, requests paused.
            timeout: seconds for the update, and for the pause; ``update_timeout`` if left out.
            verify: the proof demanded before the commit: ``"none"``, ``"delivered"``, ``"installed"``.

        Raises:
            SynclineError: whatever went wrong in a worker, as it was raised there. If live memory was not
                touched, the instance goes on with what it has; else it stays paused until an update succeeds.
            DeadlineError: requests did not end, under ``"wait"``; the instance goes on.
        """
        seconds = self._options.update_timeout if timeout is None else timeout
        before, held = self.committed, self._paused
        lap = _Laps()
        if not self._paused:
            self._door.pause(self._mode, seconds)
            self._paused = True
        lap.end("pause")
        try:
            info = {"version": version, "timeout": seconds, "verify": verify}
            self._door.update(info, seconds + _SLACK)
        except BaseException as error:
            self._give_up(error, held=held)
            raise
        lap.end("update")
        key = self.committed
        if key is None:
            raise SynclineError("the instance was updated, but the MetaServer knows of no version")
        self._door.finish(str(key), _PATIENCE)
        self._door.reset_caches(_PATIENCE)
        lap.end("caches")
        self._door.resume(_PATIENCE)
        self._paused = False
        lap.end("resume")
        return InstanceReport(key, key != before, lap.seconds())

    def check_effective(self, directory: Path | str) -> None:
        """Compare every live tensor, in every worker, bit for bit with a fresh load of a checkpoint by vLLM.

        The instance is paused meanwhile.

        Raises:
            EffectiveMismatchError: they differ; names tensors, counts, first indices.
        """
        seconds, held = self._options.update_timeout, self._paused
        self.hold()
        try:
            info = {"verify": "effective", "directory": str(directory), "timeout": seconds}
            self._door.update(info, seconds + _SLACK)
        finally:
            self._end_failed()
            if not held:
                self._door.resume(_PATIENCE)
                self._paused = False

    def close(self) -> None:
        """Leave the job; the engine keeps its weights, and is resumed unless it is DIRTY."""
        try:
            if self._paused and not self.dirty:
                self._door.resume(_PATIENCE)
            self._door.leave(_PATIENCE)
        finally:
            self._meta.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end_failed(self) -> None:
        """End vLLM's session of a failed update: workers that raised nothing still have it open."""
        try:
            self._door.finish(None, _PATIENCE)
        except SynclineError as ended:
            logger.debug("the worker that failed had ended it already: %s", ended.what)

    def _give_up(self, error: BaseException, *, held: bool) -> None:
        """Resume after a failed update, unless live memory was touched or nobody knows whether."""
        self._end_failed()
        try:
            dirty = self.dirty
        except SynclineError as unknown:
            logger.warning("instance %s stays paused: its state is unknown (%s)", self.instance, unknown.what)
            return
        if dirty:
            error.add_note(f"instance {self.instance} is DIRTY and stays paused until a full update succeeds")
        elif not held:
            self._door.resume(_PATIENCE)
            self._paused = False

    def _status(self) -> m.InstanceStatus:
        status: m.Status = self._meta.request(m.StatusQuery(self._table))
        found = [i for t in status.tables for i in t.instances if i.name == self.instance]
        if not found:
            raise SynclineError("the MetaServer does not know this instance", found=self.instance)
        return found[0]


class _Laps:
    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        now = time.monotonic()
        self._seconds[phase], self._last = now - self._last, now

    def seconds(self) -> dict[str, float]:
        return self._seconds | {"total": self._last - self._began}


def _changed(options: Options) -> dict[str, Any]:
    """Return the options as JSON, so that the workers have the same deadlines."""
    return {name: getattr(options, name) for name in Options.__dataclass_fields__}
