"""How rank 0 of an inference instance leads the others: short commands, broadcast in order, no pickle."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from syncline.errors import PeerLostError, ProtocolError

MAX_COMMAND = 64 << 20
_IDLE = timedelta(
    days=365
)  # followers wait for work as a server waits for callers; a dead leader breaks the wait


class Channel:
    """A gloo group of an instance's processes, used for commands only, by one thread a process at a time.

    Args:
        group: the instance's processes, gloo; None makes one of all processes of the default group
            (collective: all of them construct together), or none for an instance of one process.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if group is None and dist.is_initialized() and dist.get_world_size() > 1:
            made: Any = dist.new_group(backend="gloo", timeout=_IDLE)
            group = made
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)

    def send(self, name: str, **arguments: Any) -> None:
        """Send one command from rank 0 to every other rank.

        Raises:
            PeerLostError: a follower is gone.
        """
        if self.world == 1:
            return
        payload = msgspec.msgpack.encode({"name": name, **arguments})
        self._broadcast(torch.tensor([len(payload)], dtype=torch.int64))
        self._broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def receive(self) -> dict[str, Any]:
        """Wait for the next command of rank 0.

        Raises:
            PeerLostError: rank 0 is gone.
            ProtocolError: an impossible size.
        """
        size = self._broadcast(torch.zeros(1, dtype=torch.int64))
        nbytes = int(size[0])
        if not 0 < nbytes <= MAX_COMMAND:
            raise ProtocolError(
                "a command of an impossible size", expected=f"1 to {MAX_COMMAND}", found=nbytes
            )
        payload = self._broadcast(torch.empty(nbytes, dtype=torch.uint8))
        return msgspec.msgpack.decode(payload.numpy().tobytes(), type=dict[str, Any])

    def agree(self, tokens: torch.Tensor, *, stop: bool) -> tuple[torch.Tensor, bool]:
        """Return rank 0's tokens, int64[B], and its wish to stop, on every rank."""
        if self.world == 1:
            return tokens, stop
        both = torch.cat([tokens.to("cpu", torch.int64), torch.tensor([int(stop)])])
        both = self._broadcast(both)
        return both[:-1].to(tokens.device), bool(both[-1])

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            dist.broadcast(
                tensor,
                src=0 if self._group is None else dist.get_global_rank(self._group, 0),
                group=self._group,
            )
        except RuntimeError as error:
            raise PeerLostError(
                "a process of the inference instance is gone",
                expected=f"{self.world} processes",
                found=error,
                rank=self.rank,
                hint="restart the instance",
            ) from error
        return tensor
