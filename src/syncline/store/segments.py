"""Shared memory for copies: a pool of sealed segments, filled from the front and used again when empty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncline.memory.arena import Arena, aligned
from syncline.memory.budget import Use, require_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from syncline.memory import Region

SEGMENT_BYTES = 64 << 20
"""Size of a segment; a larger tensor gets one of its own. Few descriptors, and little is left half-used."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one tensor: uint8[nbytes] in a segment."""

    region: int
    offset: int
    nbytes: int
    tensor: torch.Tensor


@dataclass(slots=True)
class _Segment:
    arena: Arena
    filled: int = 0
    slots: int = 0


class SegmentPool:
    """Not thread-safe: its owner holds a lock."""

    def __init__(self, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._segment_bytes = segment_bytes
        self._segments: dict[int, _Segment] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._segments)

    def take(self, sizes: Sequence[int]) -> list[Slot]:
        """Return room for tensors of these sizes in bytes: all of them, or none.

        Raises:
            MemoryBudgetError: too little memory; nothing was allocated.
        """
        require_memory(sum(aligned(n) for n in sizes), "copies of tensors", Use.MEMFD)
        taken: list[Slot] = []
        try:
            for nbytes in sizes:
                slot = self._take(nbytes)
                taken.append(slot)  # one by one: what was taken is given back if the next one fails
        except BaseException:
            self.give(taken)
            raise
        return taken

    def give(self, slots: Iterable[Slot]) -> None:
        """Take back slots that nobody reads any more. A segment without slots is filled anew, or freed."""
        for slot in slots:
            segment = self._segments[slot.region]
            segment.slots -= 1
            if segment.slots:
                continue
            if segment.arena.nbytes > self._segment_bytes:
                segment.arena.close()
                del self._segments[slot.region]
            else:
                segment.filled = 0

    def region(self, number: int) -> Region:
        """Return a segment's region."""
        return self._segments[number].arena.region

    def descriptor(self, number: int) -> int:
        """Return a read-only descriptor of a segment; it stays the pool's."""
        return self._segments[number].arena.fd

    def close(self) -> None:
        """Free everything."""
        for segment in self._segments.values():
            segment.arena.close()
        self._segments.clear()

    def _take(self, nbytes: int) -> Slot:
        number, segment = self._with_room(nbytes)
        offset = segment.filled
        segment.arena.reserve(offset, nbytes)
        segment.filled += aligned(nbytes)
        segment.slots += 1
        return Slot(number, offset, nbytes, segment.arena.storage(offset, nbytes))

    def _with_room(self, nbytes: int) -> tuple[int, _Segment]:
        for number, segment in self._segments.items():
            if segment.filled + aligned(nbytes) <= segment.arena.nbytes:
                return number, segment
        self._last += 1
        made = _Segment(Arena(max(nbytes, self._segment_bytes), region_id=self._last))
        self._segments[self._last] = made
        return self._last, made
