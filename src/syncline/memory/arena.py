"""One memfd that holds all live parameters of a process, and descriptors of it that can only be read.

A memfd has no name, so nothing of it can stay behind: its pages live exactly as long as a descriptor or a
mapping, even through the owner's ``kill -9`` while a reader still maps it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Self

import torch

from syncline.errors import MemoryBudgetError, SynclineError
from syncline.memory.pages import Mapping, collapse
from syncline.memory.region import Kind, Region

if TYPE_CHECKING:
    from types import TracebackType

ALIGNMENT = 64
"""Slots begin on cache lines: streaming stores and every dtype's alignment want it."""

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; the fcntl module of Python 3.11 has no name for it

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""What a reader may rely on: a mapping of the region's size never loses its pages."""


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """A sealed memfd of fixed size, mapped here for reading and writing.

    Pages are reserved slot by slot (`reserve`), not at once: while parameters move in one by one, the
    memory of the old ones pays for the new.

    Args:
        nbytes: size, rounded up to whole pages, at least one.
        name: shown in ``/proc``.
        region_id: id of the arena's region.

    The mapping lives until the last tensor made by `storage` dies, whatever `close` did before.
    """

    def __init__(self, nbytes: int, name: str = "syncline", region_id: int = 0) -> None:
        self.nbytes = max(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.PAGESIZE)
        self._map: Mapping | None = None
        self._fds: tuple[int, int] | None = None  # for reserving pages; for handing out
        writable = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(writable, self.nbytes)
            self._map = Mapping(writable, self.nbytes)
            # Our mapping is the last writable one, even for a receiver who opens the descriptor again by
            # its path.
            fcntl.fcntl(writable, fcntl.F_ADD_SEALS, SEALS | _F_SEAL_FUTURE_WRITE)
            self._fds = writable, reopen_read_only(writable)
        except OSError as error:
            os.close(writable)
            raise MemoryBudgetError("the arena could not be made", found=error) from error
        self.region = Region(region_id, self._map.address, self.nbytes, Kind.ARENA)

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.region.ptr

    @property
    def fd(self) -> int:
        """A read-only descriptor, owned by the arena; duplicate it to keep it.

        Raises:
            SynclineError: the arena was closed.
        """
        return self._open_fds()[1]

    def _open_fds(self) -> tuple[int, int]:
        if self._fds is None:
            raise SynclineError("the arena is closed")
        return self._fds

    def reserve(self, offset: int, nbytes: int) -> None:
        """Allocate the pages of a range, so that touching them can never be a SIGBUS.

        Raises:
            MemoryBudgetError: the kernel has no pages for it.
        """
        if nbytes == 0:
            return
        try:
            os.posix_fallocate(self._open_fds()[0], offset, nbytes)
        except OSError as error:
            raise MemoryBudgetError(
                "the kernel refused pages for the arena", expected=f"{nbytes} bytes", found=error
            ) from error

    def storage(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return uint8[nbytes] at ``offset``, whose untyped storage is exactly these bytes.

        One storage over the whole arena would make all parameters look tied, and saving one would save all.
        """
        if self._map is None:
            raise SynclineError("the arena is closed")
        if offset < 0 or offset + nbytes > self.nbytes:
            raise SynclineError("a slot outside its arena", expected=self.nbytes, found=(offset, nbytes))
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map.buffer, dtype=torch.uint8, count=nbytes, offset=offset)

    def use_huge_pages(self) -> bool:
        """Gather the arena's pages into huge ones where the kernel can; return whether it did.

        For an arena that is filled: it costs about as much as copying it once, and makes every later copy and
        digest of it faster, here and in all readers.
        """
        return collapse(self.address, self.nbytes)

    def close(self) -> None:
        """Stop handing out descriptors and slots. Tensors in the arena stay valid; the last one frees it."""
        fds, self._fds, self._map = self._fds, None, None
        for fd in fds or ():
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):  # half-made, or the interpreter is going down
            self.close()


def reopen_read_only(fd: int) -> int:
    """Return a new descriptor of the same file that can only be read and only be mapped read-only."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
