"""A region: one range of memory that can be named, handed out, and told from what lay there before."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Self

PRIVATE_NBYTES = 2**63 - 1
"""Size of the region that stands for a whole private address space."""


class Kind(enum.IntEnum):
    """What a region's memory is. The numbers are part of the wire format."""

    MALLOC = 0
    """Private memory of one process: cannot be handed out."""
    ARENA = 1
    """The process's sealed memfd arena."""
    SHARED = 2
    """One storage in shared memory of its own."""
    MAPPED = 3
    """A peer's region, mapped read-only here."""
    CUDA = 4
    """One segment of a CUDA allocator: `syncline.memory.cuda`."""


@dataclass(frozen=True, slots=True)
class Region:
    """One range of memory.

    Attributes:
        id: number of the region, unique in the process that owns it.
        ptr: address in this process; 0 in a description that came over a wire and is not mapped yet.
        nbytes: size in bytes.
        kind: what the memory is.
        generation: grows whenever an id comes to name other memory.
    """

    id: int
    ptr: int
    nbytes: int
    kind: Kind
    generation: int = 0

    @classmethod
    def private(cls, region_id: int = 0) -> Self:
        """Return the one region that stands for all private memory of a process.

        It begins at address 0, so that offsets in it are addresses: twenty thousand storages need no twenty
        thousand regions.
        """
        return cls(region_id, 0, PRIVATE_NBYTES, Kind.MALLOC)

    @property
    def mapped(self) -> bool:
        """Whether addresses in this region mean something in this process."""
        return self.ptr != 0 or self.kind is Kind.MALLOC or self.nbytes == 0

    def at(self, ptr: int, kind: Kind | None = None) -> Region:
        """Return the same region at another address, for a peer's region mapped here."""
        return replace(self, ptr=ptr, kind=self.kind if kind is None else kind)
