"""How the workers of one vLLM instance tell each other what they know: short texts, no pickle."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from syncline.errors import PeerLostError, ProtocolError

MAX_MESSAGE = 64 << 20
_IDLE = timedelta(days=365)  # an update has its own deadline; a worker that died breaks the wait


class Peers:
    """A gloo group of all workers of an instance; its construction is collective."""

    def __init__(self) -> None:
        self._group: Any = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=_IDLE)
        self.rank = 0 if self._group is None else dist.get_rank(self._group)
        self.world = 1 if self._group is None else dist.get_world_size(self._group)

    def exchange(self, mine: bytes) -> list[bytes]:
        """Return what every worker gave, by rank; collective.

        Raises:
            PeerLostError: a worker is gone.
            ProtocolError: a message of an impossible size.
        """
        if self._group is None:
            return [mine]
        sizes = self._gather(torch.tensor([len(mine)], dtype=torch.int64))
        longest = max(int(size) for size in sizes)
        if longest > MAX_MESSAGE:
            raise ProtocolError(
                "a message of an impossible size", expected=f"up to {MAX_MESSAGE}", found=longest
            )
        padded = torch.zeros(max(longest, 1), dtype=torch.uint8)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine or b"\0"), dtype=torch.uint8)[: len(mine)]
        parts = self._gather(padded)
        return [part.numpy().tobytes()[: int(size)] for part, size in zip(parts, sizes, strict=True)]

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.world)]
        try:
            dist.all_gather(found, tensor, group=self._group)
        except RuntimeError as error:
            raise PeerLostError(
                "a worker of the inference instance is gone",
                expected=f"{self.world} workers",
                found=error,
                rank=self.rank,
                hint="restart the instance",
            ) from error
        return found
