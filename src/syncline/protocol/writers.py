"""The writers of one epoch: who has which rank, who is missing, and whether the epoch still assembles."""

from __future__ import annotations


class WriterGroup:
    """One incarnation of a table's writers.

    Attributes:
        slots: rank -> live member.
        last: rank -> newest member that ever had the slot.
        gone: rank -> why its newest member is not there any more.
        orderly: ranks that left by themselves.
        assembling: whether a process without a past may still take a free rank.
        refilled: built from writers that came back after a restart of the server.
        high: highest version number seen in the epoch, -1 before the first.
    """

    def __init__(self, epoch: int, world: int, *, refilled: bool = False) -> None:
        self.epoch, self.world, self.refilled = epoch, world, refilled
        self.slots: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.gone: dict[int, str] = {}
        self.orderly: set[int] = set()
        self.assembling = True
        self.high = -1

    @property
    def missing(self) -> list[int]:
        """Ranks without a live process."""
        return [rank for rank in range(self.world) if rank not in self.slots]

    @property
    def finished(self) -> bool:
        """Whether every rank left in good order: this epoch will publish nothing more."""
        return len(self.orderly) == self.world

    def join(self, rank: int, member: int) -> None:
        """Give a free rank to a member; the last one ends the assembly."""
        self.slots[rank] = self.last[rank] = member
        self.gone.pop(rank, None)
        self.orderly.discard(rank)
        if not self.missing:
            self.assembling = False

    def lose(self, rank: int, reason: str, *, orderly: bool) -> None:
        """Do without a rank whose process ended."""
        self.slots.pop(rank, None)
        self.gone[rank] = reason
        if orderly:
            self.orderly.add(rank)

    def names(self) -> str:
        """Return the missing ranks in words, with what is known of them."""
        known = [f"writer {rank} ({self.gone.get(rank, 'never registered')})" for rank in self.missing]
        return ", ".join(known)
