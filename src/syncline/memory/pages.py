"""Mappings that begin on a huge page, so that large copies need few address translations.

The kernel maps 2 MiB at once only where address and file offset agree modulo 2 MiB, which an ordinary
``mmap`` does not see to. Whether huge pages are used at all stays the kernel's decision: a system that
refuses them works as before.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from functools import cache

HUGE = 2 << 20
_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x1, 0x2, 0x10, 0x20, 0x4000
_MADV_DONTNEED, _MADV_COLLAPSE = 4, 25
_FAILED = ctypes.c_void_p(-1).value


def map_shared(fd: int, nbytes: int, *, writable: bool) -> int:
    """Map a file from its start, and return the address, a multiple of 2 MiB if the file is that large.

    Raises:
        OSError: the kernel refused.
    """
    libc = _libc()
    slack = HUGE if nbytes >= HUGE else 0
    # Room for the mapping and its alignment; what is not needed of it is given back.
    room = libc.mmap(None, nbytes + slack, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    _check(room)
    start = -(-room // HUGE) * HUGE if slack else room
    protection = _PROT_READ | (_PROT_WRITE if writable else 0)
    flags = _MAP_SHARED | _MAP_FIXED | _MAP_NORESERVE
    mapped = libc.mmap(start, nbytes, protection, flags, fd, 0)
    if mapped in (None, _FAILED):
        error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        libc.munmap(room, nbytes + slack)
        raise error
    if slack:
        page = os.sysconf("SC_PAGE_SIZE")
        end = start + -(-nbytes // page) * page
        if start > room:
            libc.munmap(room, start - room)
        if room + nbytes + slack > end:
            libc.munmap(end, room + nbytes + slack - end)
    return int(mapped)


def unmap(address: int, nbytes: int) -> None:
    """Give a mapping back."""
    _libc().munmap(address, nbytes)


def collapse(address: int, nbytes: int) -> bool:
    """Ask the kernel to gather the pages of a populated range into huge ones; return whether it did.

    The memory stays what and where it is, for everybody who maps it. The kernel gives up at the first piece
    for which it finds no room, so that pieces are asked for one by one where the whole was refused.
    """
    whole = nbytes // HUGE * HUGE
    madvise = _libc().madvise
    if madvise(address, whole, _MADV_COLLAPSE) == 0:
        return bool(whole)
    pieces = range(address, address + whole, HUGE)
    return sum(madvise(piece, HUGE, _MADV_COLLAPSE) == 0 for piece in pieces) == len(pieces) > 0


def discard(address: int, nbytes: int) -> None:
    """Give back the whole pages of a range of private memory whose contents nobody will read again."""
    page = os.sysconf("SC_PAGE_SIZE")
    start, end = -(-address // page) * page, (address + nbytes) // page * page
    if end > start:
        _libc().madvise(start, end - start, _MADV_DONTNEED)


class Mapping:
    """A writable mapping as a buffer that is unmapped when nothing refers to the buffer any more.

    Attributes:
        buffer: bytes of the mapping; tensors made from it keep it alive.
        address: of the first byte.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.address = map_shared(fd, nbytes, writable=True)
        self.buffer = (ctypes.c_ubyte * nbytes).from_address(self.address)
        weakref.finalize(self.buffer, unmap, self.address, nbytes)


def _check(address: int | None) -> None:
    if address in (None, _FAILED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
