"""What a client remembers of itself, to tell it to a MetaServer that has lost its memory. No I/O.

A restarted server knows the epochs and nothing else. Every registration is claimed again with its former
fence; a writer then puts again what it still offers, and its digests; a reader says what its parameters hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from syncline.errors import RevokedError
from syncline.protocol import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncline.errors import SynclineError
    from syncline.protocol.ids import VersionKey

_KEPT_PUTS = 16  # as many versions as a server keeps a table
_OF_AN_ATTEMPT = (m.Progress, m.Verified, m.Failed, m.Commit)


@dataclass(slots=True)
class _Offer:
    """One version as this rank put it, with the digests that it has delivered."""

    put: m.Put
    digests: dict[bytes, m.Digests] = field(default_factory=dict)
    closed: bool = False


class Membership:
    """One registration of this client: its newest fence, and what a new server must hear about it.

    Attributes:
        request: the registration as the owner sent it.
        fence: the newest fence.
        lease: seconds that the server gives it between two signs of life.
        refilled: whether the server of ``fence.boot`` knows everything that is remembered here.
        error: why the membership is over; None while it lives.
        progress: the running count of bytes for its heartbeats.
        next_beat, beating: when the next heartbeat is due, and whether one is under way.
    """

    def __init__(self, request: m.RegisterWriter | m.RegisterReader, registered: m.Registered) -> None:
        self.request, self.fence, self.lease = request, registered.fence, registered.lease
        self.refilled = True
        self.error: SynclineError | None = None
        self.progress: Callable[[], int] | None = None
        self.next_beat, self.beating = 0.0, False
        self._offers: dict[VersionKey, _Offer] = {}
        self._bindings: dict[bytes, m.PutBinding] = {}  # newest last
        self._last: VersionKey | None = None
        self._held: tuple[VersionKey | None, bool] = (None, False)  # replaced as one: two threads write it
        self._owner_tells = False
        if isinstance(request, m.RegisterReader):
            self._held = (request.committed, request.dirty)

    # --- what happened

    def note(self, *, committed: VersionKey | None, dirty: bool) -> None:
        """Take the owner's word for what a reader's parameters hold; it tells every change from here on."""
        self._owner_tells = True
        self._held = (committed, dirty)

    def sent(self, request: m.Message) -> None:
        """Remember that live parameters may change from here on (before the server can have answered)."""
        if isinstance(request, m.Progress | m.Verified):
            self._touched()

    def answered(self, request: m.Message, reply: m.Message) -> None:
        """Remember what a request achieved."""
        match request, reply:
            case m.PutBinding(), _:
                self._binding(request)
            case m.Put(), m.PutDone():
                self._put(request, reply)
            case m.Digests(), _:
                self._digests(request)
            case m.AbortVersion(), _:
                self._offers.pop(request.key, None)
            case m.CloseWindow(), _:
                self._window(request)
            case _:
                self._of_a_reader(request, reply)

    def _of_a_reader(self, request: m.Message, reply: m.Message) -> None:
        match request, reply:
            case m.BeginUpdate(), m.Begun() if request.mode == "in_place":
                self._touched()
            case m.BeginUpdate(), m.Current():
                self._held = (reply.key, self._held[1])
            case m.Commit(), _:
                # Ranks that have not applied it will claim another version: a half-applied commit shows.
                self._held = (request.to, False)
            case m.Applied(), _:
                self._held = (request.key, False)
            case m.Failed(), _ if request.touched:
                self._touched()
            case _:
                pass

    def joined(self, registered: m.Registered) -> None:
        """Take the fence of a registration that was repeated."""
        self.fence, self.lease = registered.fence, registered.lease

    def _touched(self) -> None:
        if not self._owner_tells:
            self._held = (self._held[0], True)

    def _put(self, request: m.Put, reply: m.PutDone) -> None:
        self._last = max(self._last or reply.key, reply.key)
        self._offers.setdefault(reply.key, _Offer(request))
        live = sorted(key for key, offer in self._offers.items() if offer.put.source == "live")
        self._close(live[:-1])

    def _binding(self, request: m.PutBinding) -> None:
        named = {offer.put.binding_fp for offer in self._offers.values()}
        self._bindings = {name: one for name, one in self._bindings.items() if name in named}
        self._bindings[request.binding_fp] = request

    def _digests(self, request: m.Digests) -> None:
        if (offer := self._offers.get(request.key)) is not None:
            offer.digests[request.plan_id] = request

    def _window(self, request: m.CloseWindow) -> None:
        offer = self._offers.get(request.key)
        if offer is None:
            return
        if offer.put.source == "live":
            self._close([k for k, o in self._offers.items() if o.put.source == "live" and k <= request.key])
        elif request.evict:
            self._close([request.key])

    def _close(self, keys: list[VersionKey]) -> None:
        """Mark versions that nobody may read any more; of those only the newest is worth telling."""
        for key in keys:
            self._offers[key].closed = True
        for key in [k for k, offer in self._offers.items() if offer.closed and k != self._last]:
            del self._offers[key]
        for key in sorted(self._offers)[:-_KEPT_PUTS]:
            del self._offers[key]

    # --- telling it again

    def claim(self) -> m.RegisterWriter | m.RegisterReader:
        """Return the registration to repeat."""
        if isinstance(self.request, m.RegisterWriter):
            return msgspec.structs.replace(self.request, previous=self.fence, last=self._last)
        committed, dirty = self._held
        return msgspec.structs.replace(self.request, previous=self.fence, committed=committed, dirty=dirty)

    def bindings(self) -> list[m.PutBinding]:
        """Return the bindings that puts name, or soon will, under the newest fence."""
        return [msgspec.structs.replace(one, fence=self.fence) for one in self._bindings.values()]

    def offers(self) -> list[m.Put | m.Digests]:
        """Return the puts and digests to repeat, in order, under the newest fence."""
        found: list[m.Put | m.Digests] = []
        for _, offer in sorted(self._offers.items()):
            found.append(
                msgspec.structs.replace(offer.put, fence=self.fence, refill=True, closed=offer.closed)
            )
            if not offer.closed:
                found += [msgspec.structs.replace(one, fence=self.fence) for one in offer.digests.values()]
        return found


def across_restart(request: m.Message) -> m.Message:
    """Return what to send to a new server in place of a request that its predecessor may have received.

    Raises:
        RevokedError: the request belongs to an update attempt, and those ended with the server.
    """
    if isinstance(request, _OF_AN_ATTEMPT):
        raise RevokedError(
            f"the MetaServer was restarted during the update ({type(request).__name__} was under way)",
            found=f"attempt {request.attempt} of its predecessor",
            hint="begin a new update; nothing of the old attempt can be committed",
        )
    if isinstance(request, m.Put):
        return msgspec.structs.replace(request, refill=True)
    if isinstance(request, m.Watch):
        return msgspec.structs.replace(request, since=0)  # events are counted from one again
    return request
