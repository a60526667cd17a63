"""A peer's region, mapped here read-only from a descriptor that came over a socket."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from syncline.errors import TransportError
from syncline.memory.arena import SEALS
from syncline.memory.pages import map_shared, unmap
from syncline.memory.region import Kind, Region

if TYPE_CHECKING:
    from types import TracebackType


class MappedRegion:
    """A read-only mapping of exactly the size that the peer announced.

    Args:
        fd: descriptor; it is not kept and the caller closes it.
        region: the peer's description (its pointer is ignored).

    Raises:
        TransportError: the descriptor is not shared memory, is smaller than announced, or could still be
        shrunk
            under the mapping (an arena without its seals).

    Nothing may use `region` after `close`: reading an unmapped page is a crash, so a transport drains first.
    """

    def __init__(self, fd: int, region: Region) -> None:
        _check(fd, region)
        self.nbytes = region.nbytes
        self._address = _map(fd, region.nbytes)
        self.region = region.at(self._address, Kind.MAPPED)

    @property
    def address(self) -> int:
        """Address of the first byte in this process.

        Raises:
            TransportError: the mapping was closed.
        """
        if not self._address:
            raise TransportError("the region is no longer mapped", found=self.region)
        return self._address

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._address

    def close(self) -> None:
        """Unmap; closing twice is allowed."""
        address, self._address = self._address, 0
        if address:
            unmap(address, self.nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(AttributeError, TypeError):  # half-made, or the interpreter is going down
            self.close()


def _check(fd: int, region: Region) -> None:
    try:
        found = os.fstat(fd)
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise TransportError(
            "a descriptor that is not shared memory", expected="a memfd or a file on tmpfs", found=error
        ) from error
    if not stat.S_ISREG(found.st_mode) or region.nbytes <= 0 or found.st_size < region.nbytes:
        raise TransportError(
            "a region that lies about its size",
            expected=f"{region.nbytes} bytes, as announced",
            found=f"{found.st_size} bytes",
            hint="the peer is broken or of another version: nothing was mapped",
        )
    # torch's own shared memory cannot be sealed; an arena always is.
    if region.kind is not Kind.SHARED and seals & SEALS != SEALS:
        raise TransportError(
            "an arena that could still shrink under its readers",
            expected=f"seals {SEALS:#x}",
            found=f"{seals:#x}",
        )


def _map(fd: int, nbytes: int) -> int:
    # Not the mmap module: it keeps a duplicate of every descriptor, and a reader maps thousands of shared
    # storages.
    try:
        return map_shared(fd, nbytes, writable=False)
    except OSError as error:
        raise TransportError(
            "a region could not be mapped", expected=f"{nbytes} bytes, read-only", found=error
        ) from error
