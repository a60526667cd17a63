"""What two processes must know of each other's device before they meet over NCCL."""

from __future__ import annotations

from typing import Self

import msgspec

from syncline.errors import TransportError

_MAX_BYTES = 1 << 14


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One process's device; travels as the address of `syncline.transport.nccl` in its endpoint.

    Attributes:
        device: UUID of the device; equal for two processes exactly if they share it.
        version: of NCCL, as ``ncclGetVersion`` counts (22703 is 2.27.3); 0: there is none here.
        apart: UUIDs of the devices whose memory this one cannot map.
    """

    device: str
    version: int
    apart: list[str] = []

    def encode(self) -> str:
        """Return the card as JSON text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Self:
        """Decode `encode`.

        Raises:
            TransportError: something else, or longer than any.
        """
        try:
            if len(text) > _MAX_BYTES:
                raise TransportError("too long for a device's card", expected=_MAX_BYTES, found=len(text))
            return msgspec.json.decode(text.encode(), type=cls)
        except msgspec.MsgspecError as error:
            raise TransportError("not a device's card", found=error) from error


def check_pair(mine: Card, theirs: Card, peer: object) -> None:
    """Refuse a pair that NCCL would hang or fail on.

    Raises:
        TransportError: no NCCL at one end, other versions, or one device for both.
    """
    if not mine.version or not theirs.version:
        where = "this process" if not mine.version else str(peer)
        raise TransportError(
            "NCCL is missing", expected="libnccl.so.2, as torch for CUDA brings it", found=f"none in {where}"
        )
    if mine.version != theirs.version:
        raise TransportError(
            f"{peer} has another version of NCCL",
            expected=mine.version,
            found=theirs.version,
            hint="install one build of torch everywhere: versions of NCCL do not talk to each other",
        )
    if mine.device == theirs.device:
        raise TransportError(
            f"this process and {peer} share one GPU, over which NCCL does not work",
            expected="a GPU each",
            found=mine.device,
            hint="leave the transport to syncline: processes that share a GPU use cuda_ipc",
        )
