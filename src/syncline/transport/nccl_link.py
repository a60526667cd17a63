"""One pair of processes with a GPU each: a communicator for the bytes, a pair over gloo for all else.

Over gloo the two say who they are, what they mean, and what they have installed; it is also what notices
that a peer is gone. The communicator carries nothing but buckets, and is aborted when the link ends.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import torch

from syncline.errors import DeadlineError, TransportError
from syncline.transport.gloo_link import MARK_BYTES, GlooLink, mark_of, set_mark
from syncline.transport.nccl_card import Card, check_pair

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from syncline.transport.base import Endpoint
    from syncline.transport.clock import Deadline
    from syncline.transport.nccl_device import Communicator, Device

_HELLO_BYTES = 4096
_HELLO_MARK = 0x4E43434C
_NAP = 100e-6


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    card: Card
    name: bytes


class NcclLink(GlooLink):
    """As `GlooLink`, with a communicator.

    Args:
        device: of this process.

    Raises:
        DeadlineError: the peer did not come.
        TransportError: one GPU for both, or other versions of NCCL.
    """

    def __init__(
        self,
        peer: Endpoint,
        rank: int,
        store: Store,
        interface: str,
        deadline: Deadline,
        device: Device,
    ) -> None:
        self._communicator: Communicator | None = None
        super().__init__(peer, rank, store, interface, deadline)
        try:
            self._communicator = self._meet(rank, deadline, device)
        except BaseException:
            super().close()
            raise

    @property
    def communicator(self) -> Communicator:
        """What carries the buckets.

        Raises:
            PeerLostError: the link has ended.
        """
        self.check()
        if self._communicator is None:
            raise TransportError(f"the link to {self.peer} has no communicator")
        return self._communicator

    def break_off(self, why: str) -> None:
        """End the link at once: what is queued on the device returns soon, done or not."""
        super().break_off(why)
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()

    def _meet(self, rank: int, deadline: Deadline, device: Device) -> Communicator:
        mine = _Hello(device.card, device.name() if rank == 0 and device.card.version else b"")
        theirs = self._exchange(mine, deadline)
        check_pair(mine.card, theirs.card, self.peer)
        name = mine.name if rank == 0 else theirs.name
        communicator = device.communicator(name, rank, self.check, deadline)
        try:
            self._greet(communicator, rank, deadline, device)
        except BaseException:
            communicator.abort()
            raise
        return communicator

    def _greet(self, communicator: Communicator, rank: int, deadline: Deadline, device: Device) -> None:
        """Send a word each way: the first message makes connections, and blocks both hosts for it.

        Everybody makes links in one order. Later, processes that block for each other could be a circle.
        """
        stream, end, (word,) = device.stream(), device.event(), device.memory(16, 1)
        calls = [communicator.send, communicator.receive]
        for call in calls if rank == 0 else reversed(calls):
            call(word, stream)
        end.record(stream)
        while not end.query():
            self.check()
            communicator.check()
            if deadline.over:
                raise DeadlineError(
                    f"{self.peer} did not answer over NCCL", expected=f"within {deadline.seconds:g} s"
                )
            time.sleep(_NAP)

    def _exchange(self, mine: _Hello, deadline: Deadline) -> _Hello:
        """Tell the peer who this is, and hear who it is."""
        incoming = torch.zeros(_HELLO_BYTES, dtype=torch.uint8)
        awaited = self.receive(incoming)
        sent = self.send(_message(mine))
        while mark_of(incoming) != _HELLO_MARK:
            self.check()
            if deadline.over:
                raise DeadlineError(
                    f"{self.peer} did not say who it is", expected=f"within {deadline.seconds:g} s"
                )
            time.sleep(_NAP)
        self.finish(awaited)
        self.finish(sent)
        raw = bytes(incoming.numpy())
        length = int.from_bytes(raw[:4], "little")
        try:
            return msgspec.msgpack.decode(raw[4 : 4 + length], type=_Hello)
        except msgspec.MsgspecError as error:
            raise TransportError("a greeting that is none", found=error, rank=self.peer) from error


def _message(hello: _Hello) -> torch.Tensor:
    body = msgspec.msgpack.encode(hello)
    if len(body) > _HELLO_BYTES - 4 - MARK_BYTES:
        raise TransportError("a greeting too long", expected=_HELLO_BYTES, found=len(body))
    message = torch.zeros(_HELLO_BYTES, dtype=torch.uint8)
    raw = len(body).to_bytes(4, "little") + body
    message[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    set_mark(message, _HELLO_MARK)
    return message
