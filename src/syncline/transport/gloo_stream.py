"""One transfer with one peer over gloo, as a coroutine: it yields whenever it would have to wait.

Both ends first tell each other which plan, update and staging they mean, and go on only if they agree. Then
buckets flow in order, each answered once its bytes are installed; no more than ``inflight`` are unanswered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import torch

from syncline.errors import PlanError, TransportError
from syncline.faults import point
from syncline.protocol.ids import Fence  # noqa: TC001 - msgspec reads the annotations at run time
from syncline.transport.base import Side
from syncline.transport.gloo_link import MARK_BYTES, mark_of, set_mark
from syncline.transport.work import move

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray
    from torch._C._distributed_c10d import Work

    from syncline.transport.buckets import Bucket
    from syncline.transport.gloo_link import GlooLink
    from syncline.transport.running import Running

VERSION = 1
_HELLO_BYTES = 512
_ANSWER_BYTES = 16
_HELLO_MARK = 0x53594E4C


class Agreement(msgspec.Struct, frozen=True, array_like=True):
    """What both ends must mean alike before the first byte."""

    version: int
    plan_id: bytes
    fence: Fence
    bucket: int
    inflight: int
    buckets: int
    nbytes: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Agreement).decode


@dataclass(eq=False)
class Stream:
    """One peer's part of a transfer.

    Attributes:
        link: to the peer, reserved for this transfer.
        side: which end this is.
        agreement: what this end means.
        work: the buckets, in order.
        staging: uint8 [inflight, bucket + mark], in use until the stream has ended.
        ended: whether both ends stopped in step; if they did not, the link must be broken off.
        answers: one a slot; posted: receives of buckets, in order.
    """

    link: GlooLink
    side: Side
    agreement: Agreement
    work: list[Bucket]
    staging: list[torch.Tensor]
    ended: bool = False
    answers: list[torch.Tensor] = field(default_factory=list)
    posted: list[Work] = field(default_factory=list)

    def steps(self, running: Running, out: NDArray[np.uint64] | None) -> Iterator[bool]:
        """Run the stream; yields True after some progress, False while it waits for the peer.

        But for the source's first word, no end ever sends what the other has not yet posted a receive for: it
        works as well where a send blocks until then.
        """
        point("gloo.before_hello")
        self.answers = [torch.zeros(_ANSWER_BYTES, dtype=torch.uint8) for _ in self.staging]
        if self.side is Side.SOURCE:
            yield from self._send_all(running, out)
        else:
            yield from self._receive_all(running, out)
        self.ended = True

    def _offer(self) -> Iterator[bool]:
        """Source: say what is meant, and hear whether the destination means the same."""
        ours, theirs = _message(self.agreement), torch.zeros(_HELLO_BYTES, dtype=torch.uint8)
        awaited = self.link.receive(theirs)
        sent = self.link.send(ours)
        yield from self._arrive(theirs, _HELLO_MARK)
        self.link.finish(awaited)
        self.link.finish(sent)
        self._compare(theirs)

    def _accept(self) -> Iterator[bool]:
        """Destination: hear what the source means; listen for its buckets, if it is the same, then answer."""
        ours, theirs = _message(self.agreement), torch.zeros(_HELLO_BYTES, dtype=torch.uint8)
        awaited = self.link.receive(theirs)
        yield from self._arrive(theirs, _HELLO_MARK)
        self.link.finish(awaited)
        if self._means_the_same(theirs):
            self._listen()
        self.link.finish(self.link.send(ours))  # at once: the source listens
        self._compare(theirs)

    def _listen(self) -> None:
        """Be ready for the first buckets."""
        self.posted = [
            self.link.receive(self._slot(k)) for k in range(min(len(self.staging), len(self.work)))
        ]

    def _means_the_same(self, theirs: torch.Tensor) -> bool:
        return self._decode(theirs) == self.agreement

    def _decode(self, theirs: torch.Tensor) -> Agreement:
        raw = bytes(theirs.numpy())
        length = int.from_bytes(raw[:4], "little")
        if length > _HELLO_BYTES - 4 - MARK_BYTES:
            raise TransportError("a greeting that lies about its length", found=length, rank=self.link.peer)
        try:
            return _decode(raw[4 : 4 + length])
        except msgspec.MsgspecError as error:
            raise TransportError("a greeting that is none", found=error, rank=self.link.peer) from error

    def _compare(self, theirs: torch.Tensor) -> None:
        found = self._decode(theirs)
        if found == self.agreement:
            return
        self.ended = True  # both ends have spoken and stop here, in step
        names = [n for n in Agreement.__struct_fields__ if getattr(found, n) != getattr(self.agreement, n)]
        what = "fence" if names == ["fence"] else ", ".join(names)
        raise PlanError(
            f"the two ends of a link do not mean the same transfer: {what} differ",
            expected=_shown(self.agreement, names),
            found=_shown(found, names),
            rank=self.link.peer.name,
            hint="both sides must plan from the same layouts, and start within one update",
        )

    def _send_all(self, running: Running, out: NDArray[np.uint64] | None) -> Iterator[bool]:
        yield from self._offer()
        slots = len(self.staging)
        flight: list[tuple[Work, Work]] = []
        for k, bucket in enumerate(self.work):
            if k >= slots:
                yield from self._answered(k - slots, flight, running)
            for part in bucket.parts:
                running.check()
                move(part, out)
            point("gloo.before_send")
            message = self._slot(k)
            set_mark(message, k + 1)
            awaited = self.link.receive(self.answers[k % slots])
            flight.append((self.link.send(message), awaited))
            yield True
        for k in range(max(0, len(self.work) - slots), len(self.work)):
            yield from self._answered(k, flight, running)

    def _answered(self, k: int, flight: list[tuple[Work, Work]], running: Running) -> Iterator[bool]:
        """Wait until the peer has installed bucket ``k``; its slot is free then."""
        answer = self.answers[k % len(self.answers)]
        yield from self._arrive(answer, k + 1)
        for work in flight[k]:
            self.link.finish(work)
        installed = int.from_bytes(bytes(answer[:8].numpy()), "little")
        if installed != self.work[k].moved:
            raise TransportError(
                "the peer installed another number of bytes than were sent",
                expected=self.work[k].moved,
                found=installed,
                rank=self.link.peer.name,
            )
        running.add(self.work[k].moved, self.work[k].hops)

    def _receive_all(self, running: Running, out: NDArray[np.uint64] | None) -> Iterator[bool]:
        yield from self._accept()
        slots = len(self.staging)
        replies: list[Work] = []
        for k, bucket in enumerate(self.work):
            yield from self._arrive(self._slot(k), k + 1)
            self.link.finish(self.posted[k])
            point("gloo.before_install")
            for part in bucket.parts:
                running.check()
                move(part, out)
            running.add(bucket.moved, bucket.hops)
            if k + slots < len(self.work):
                self.posted.append(self.link.receive(self._slot(k + slots)))
            if k >= slots:
                self.link.finish(replies[k - slots])
            answer = self.answers[k % slots]
            answer[:8] = torch.frombuffer(bytearray(bucket.moved.to_bytes(8, "little")), dtype=torch.uint8)
            set_mark(answer, k + 1)
            replies.append(self.link.send(answer))
            yield True
        for reply in replies[-slots:]:
            self.link.finish(reply)

    def _arrive(self, message: torch.Tensor, mark: int) -> Iterator[bool]:
        while mark_of(message) != mark:
            self.link.check()
            yield False

    def _slot(self, k: int) -> torch.Tensor:
        return self.staging[k % len(self.staging)][: self.work[k].nbytes + MARK_BYTES]


def _message(agreement: Agreement) -> torch.Tensor:
    body = _encode(agreement)
    if len(body) > _HELLO_BYTES - 4 - MARK_BYTES:
        raise TransportError("a greeting too long", expected=_HELLO_BYTES, found=len(body))
    message = torch.zeros(_HELLO_BYTES, dtype=torch.uint8)
    raw = len(body).to_bytes(4, "little") + body
    message[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    set_mark(message, _HELLO_MARK)
    return message


def _shown(agreement: Agreement, names: list[str]) -> str:
    values = {n: getattr(agreement, n) for n in names}
    return ", ".join(f"{n} {v.hex() if isinstance(v, bytes) else v}" for n, v in values.items())
