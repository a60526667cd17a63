"""The whole job-level truth: one `JobState`, owned by the MetaServer, which is only I/O around it.

``handle`` answers a request or defers it; whatever was deferred is re-examined after every change and by
``tick``, ends by its deadline at the latest, and is then found in ``pending``. The server may die at any
moment: the next one starts from the boot number and the epochs of the run directory, and its clients tell it
the rest. What the server must write down is ``epochs``, and that before a `Registered` leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncline.errors import DeadlineError, FencedError, ProtocolError, SynclineError
from syncline.protocol import blobs, membership, publish, requests, status, steps, update
from syncline.protocol.core import Core, Member, Resolved, Timing, Wait, Waiting, check_deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from syncline.protocol.messages import Reply, Request
    from syncline.protocol.parts import Message
    from syncline.protocol.replies import Event

__all__ = ["Deferred", "JobState", "Resolved", "Timing"]


@dataclass(frozen=True, slots=True)
class Deferred:
    """The answer comes through `JobState.pending`, by ``deadline`` (absolute, on the caller's clock)."""

    ticket: int
    deadline: float


# Requests of anybody who holds the job's key.
_FREE: dict[type[Message], Callable[..., Any]] = {
    requests.RegisterWriter: membership.register_writer,
    requests.RegisterReader: membership.register_reader,
    requests.JoinFailed: membership.join_failed,
    requests.StatusQuery: status.status,
}

# Requests of members, with the role that may send them; their fence is checked before anything else.
_FENCED: dict[type[Message], tuple[str, Callable[..., Any]]] = {
    requests.AwaitMembers: ("member", membership.await_members),
    requests.Heartbeat: ("member", membership.heartbeat),
    requests.Deregister: ("member", membership.deregister),
    requests.PutManifest: ("member", blobs.put_manifest),
    requests.GetManifest: ("member", blobs.get_manifest),
    requests.PutBinding: ("writer", blobs.put_binding),
    requests.GetBinding: ("member", blobs.get_binding),
    requests.Put: ("writer", publish.put),
    requests.Digests: ("writer", publish.digests),
    requests.FetchDigests: ("member", publish.fetch_digests),
    requests.AbortVersion: ("writer", publish.abort_version),
    requests.CloseWindow: ("writer", publish.close_window),
    requests.WaitCommitted: ("member", publish.wait_committed),
    requests.BeginUpdate: ("controller", update.begin_update),
    requests.StartUpdate: ("controller", steps.start_update),
    requests.AwaitUpdate: ("worker", steps.await_update),
    requests.AwaitBound: ("worker", steps.await_bound),
    requests.AwaitDirty: ("controller", steps.await_dirty),
    requests.AwaitVerified: ("controller", steps.await_verified),
    requests.AwaitDecision: ("worker", steps.await_decision),
    requests.AwaitPulls: ("writer", steps.await_pulls),
    requests.Progress: ("worker", update.progress),
    requests.Verified: ("worker", update.verified),
    requests.Failed: ("reader", update.failed),
    requests.Commit: ("controller", update.commit),
    requests.Applied: ("worker", update.applied),
    requests.AwaitServing: ("member", update.await_serving),
    requests.Pin: ("member", update.pin),
    requests.Unpin: ("member", update.unpin),
}


class JobState:
    """Pure state of one job's control plane.

    Args:
        job: the job's name.
        boot: boot number of this server, from 1; a restarted server takes the next one.
        epochs: newest epoch of each table, as the run directory has it.
        timing: leases, stalls, bounds.
        now: the clock at the start, in seconds; any monotonic clock, passed to every call.
    """

    def __init__(
        self,
        job: str,
        *,
        boot: int = 1,
        epochs: Mapping[str, int] | None = None,
        timing: Timing | None = None,
        now: float = 0.0,
    ) -> None:
        self.core = Core(job, boot, epochs or {}, timing or Timing(), now)

    @property
    def epochs(self) -> dict[str, int]:
        """Newest epoch of each table: to be written down before a `Registered` leaves the server."""
        return {name: table.epoch for name, table in sorted(self.core.tables.items()) if table.epoch}

    def handle(self, request: Request, now: float) -> Reply | Deferred:
        """Answer one request, or defer it.

        Raises:
            SynclineError: the request is refused. That changes nothing but its sender's lease; an update
                that was to be replaced by a refused `BeginUpdate` has ended nevertheless.
        """
        self._advance(now)
        try:
            return self._answer(request)
        finally:
            self._settle()

    def tick(self, now: float) -> None:
        """Let time pass: leases, stalls, deadlines."""
        self._advance(now)
        self._settle()

    def pending(self) -> list[Resolved]:
        """Return the deferred requests that have ended since the last call."""
        done, self.core.resolved = self.core.resolved, []
        return done

    def drain_events(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events = list(self.core.outbox)
        self.core.outbox.clear()
        return events

    def next_wake(self, now: float) -> float:
        """Return the seconds after which a `tick` can change something; infinity if never."""
        core = self.core
        times = [*core.leases.expires.values(), *(wait.until for wait in core.waits.values())]
        for table in core.tables.values():
            times += [core.started + core.timing.recovery] if table.recovering else []
            for version in table.versions.values():
                times += [pin.ends(core.timing.stall) for pin in version.pins.values()]
        return max(0.0, min(times, default=float("inf")) - now)

    # --- requests

    def _answer(self, request: Request) -> Reply | Deferred:
        core = self.core
        kind = type(request)
        if kind in _FREE:
            return _FREE[kind](core, request)
        if kind is not requests.Watch and kind not in _FENCED:
            raise ProtocolError("not a request", found=kind.__name__)
        member = None if kind is requests.Watch else self._sender(request)
        seconds = check_deadline(getattr(request, "deadline", 0.0))
        wait = Wait(
            core.last_ticket + 1, request, member.number if member else None, core.now, core.now + seconds
        )
        answer = _examine(core, wait, member)
        if not isinstance(answer, Waiting):
            return answer
        if core.now >= wait.until:
            raise _too_late(wait, answer)
        core.last_ticket = wait.ticket
        core.waits[wait.ticket] = wait
        return Deferred(wait.ticket, wait.until)

    def _sender(self, request: Any) -> Member:
        member = self.core.check(request.fence, getattr(request, "table", None))
        role = _FENCED[type(request)][0]
        kinds = {"member", "writer"} if member.instance is None else {"member", "reader"}
        if member.instance is not None:
            kinds.add("controller" if member.rank < 0 else "worker")
        if role not in kinds:
            raise ProtocolError(
                f"{type(request).__name__} is not for this member to send",
                rank=member.who,
                expected=f"a {role}",
            )
        return member

    # --- time

    def _advance(self, now: float) -> None:
        core = self.core
        core.now = max(core.now, now)
        for number in core.leases.expired(core.now):
            membership.end(core, number, f"no sign of life for {core.timing.lease:g} s")
        for table in core.tables.values():
            for version in table.versions.values():
                self._revoke_due(table, version)
            if table.recovering and core.recovery_left <= 0:
                self._end_recovery(table)

    def _revoke_due(self, table: Any, version: Any) -> None:
        core = self.core
        for holder, pin in list(version.pins.items()):
            if holder in version.pins and pin.ends(core.timing.stall) <= core.now:
                late = pin.until <= core.now
                why = "its deadline passed" if late else f"no byte moved for {core.timing.stall:g} s"
                core.revoke(table, version, holder, why)

    def _end_recovery(self, table: Any) -> None:
        """Go on without the writers that did not come back after a restart: they count as dead."""
        table.recovering = False
        if table.group is None or not table.group.refilled:
            return
        for rank in table.group.missing:
            reason = "it did not come back after the server's restart"
            table.group.gone.setdefault(rank, reason)
            for version in table.versions.values():
                if version.key.epoch == table.group.epoch and version.fail(
                    f"writer {rank} was lost: {reason}"
                ):
                    self.core.tell(
                        version.state.lower(), table.name, version.key, rank=rank, detail=version.reason
                    )

    # --- waits

    def _settle(self) -> None:
        """Bring everything to rest: seal, retire, and answer deferred requests until none can be answered."""
        core = self.core
        while True:
            for table in core.tables.values():
                publish.settle(core, table)
            if not sum(self._poll(wait) for wait in list(core.waits.values())):
                return

    def _poll(self, wait: Wait) -> bool:
        core = self.core
        member = None if wait.member is None else core.members.get(wait.member)
        try:
            if wait.member is not None and member is None:
                reason = core.ended.get(wait.member, "it ended")
                raise FencedError(f"member {wait.member} was superseded: {reason}", hint="register again")
            answer = _examine(core, wait, member)
            if isinstance(answer, Waiting):
                if core.now < wait.until:
                    return False
                raise _too_late(wait, answer)
            core.resolved.append(Resolved(wait.ticket, answer, None))
        except SynclineError as error:
            core.resolved.append(Resolved(wait.ticket, None, error))
        del core.waits[wait.ticket]
        return True


def _examine(core: Core, wait: Wait, member: Member | None) -> Any:
    if isinstance(wait.request, requests.Watch):
        return status.watch(core, wait.request, wait.until)
    return _FENCED[type(wait.request)][1](core, member, wait.request, wait.until)


def _too_late(wait: Wait, answer: Waiting) -> DeadlineError:
    return DeadlineError(
        f"{type(wait.request).__name__} waited {wait.until - wait.since:g} s in vain for {answer.whom}",
        expected=answer.whom,
        hint="the named members are late or dead; raise the deadline only if they are merely slow",
    )
