"""What a writer offers with a put: where its storages lie, and the right to reach them. And its digests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np

from syncline.errors import DigestMismatchError, ProtocolError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BYTES = 256 << 20


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """One writer rank's binding and tickets, both encoded by their own rooms.

    Attributes:
        binding: `syncline.memory.Binding.to_wire`.
        tickets: `syncline.transport.base.Ticket.encode`, one a region and transport.
    """

    binding: bytes
    tickets: tuple[bytes, ...]

    def encode(self) -> bytes:
        """Return the offer as msgpack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, blob: bytes) -> Self:
        """Decode `encode`.

        Raises:
            ProtocolError: not an offer, or larger than `MAX_BYTES`.
        """
        if len(blob) > MAX_BYTES:
            raise ProtocolError("an offer larger than any", expected=MAX_BYTES, found=len(blob))
        try:
            return msgspec.msgpack.decode(blob, type=cls)
        except msgspec.MsgspecError as error:
            raise ProtocolError("bytes that are not an offer", found=error) from error


class PieceDigests(msgspec.Struct, array_like=True, frozen=True):
    """One writer rank's digests on the wire: little-endian columns of equal length."""

    pieces: bytes  # int32, ascending
    digests: bytes  # uint64


def encode_digests(pieces: NDArray[np.int32], digests: NDArray[np.uint64]) -> bytes:
    """Return digests by piece number, one a piece that the rank holds."""
    columns = PieceDigests(pieces.astype("<i4").tobytes(), digests.astype("<u8").tobytes())
    return msgspec.msgpack.encode(columns)


def decode_digests(blob: bytes, count: int, who: str) -> tuple[NDArray[np.int32], NDArray[np.uint64]]:
    """Decode `encode_digests`.

    Args:
        blob: from a peer.
        count: number of pieces of the plan.
        who: whose digests they are, for messages.

    Raises:
        DigestMismatchError: not digests of this plan.
    """
    try:
        wire = msgspec.msgpack.decode(blob, type=PieceDigests)
    except msgspec.MsgspecError as error:
        raise DigestMismatchError("bytes that are not digests", rank=who, found=error) from error
    rows = len(wire.pieces) // 4
    if len(wire.pieces) != 4 * rows or len(wire.digests) != 8 * rows:
        raise DigestMismatchError(
            "digests in columns of odd lengths",
            rank=who,
            found=f"{len(wire.pieces)}, {len(wire.digests)} bytes",
        )
    pieces = np.frombuffer(wire.pieces, "<i4").astype(np.int32)
    outside = rows and (int(pieces[0]) < 0 or int(pieces[-1]) >= count or bool((np.diff(pieces) <= 0).any()))
    if outside:
        raise DigestMismatchError("digests of pieces that the plan does not have", rank=who, expected=count)
    return pieces, np.frombuffer(wire.digests, "<u8").astype(np.uint64)
