"""Device memory as regions: one a segment of the allocator, however many tensors lie in it.

A region is a cudaMalloc'ed block, or a range of virtual memory that an allocator has mapped without a gap
(expandable segments, sleep modes). Its identity is the driver's number of the allocations below it, so that
memory that was freed and allocated again at the same address is told from what lay there before.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from syncline.errors import TransportError
from syncline.memory import cuda_driver as driver
from syncline.memory.binding import Binding
from syncline.memory.cuda_driver import Attribute
from syncline.memory.region import Kind, Region

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class Piece:
    """What one call of the allocator made.

    Attributes:
        address, nbytes: where it is.
        identity: the driver's number, never given twice in a process.
    """

    address: int
    nbytes: int
    identity: int


@dataclass(frozen=True, slots=True)
class Segment:
    """One region and what it is made of.

    Attributes:
        region: id, address, size and generation.
        pieces: one for a cudaMalloc'ed block; several, without a gap, of virtual memory.
        legacy: whether it can be handed out by an IPC handle.
    """

    region: Region
    pieces: tuple[Piece, ...]
    legacy: bool


class DeviceSegments:
    """The segments of one process on one device, found as its storages are looked up.

    Args:
        device: index of the device.
        first_id: id of the first region, where others of this process have the lower ones.
    """

    def __init__(self, device: int, first_id: int = 1) -> None:
        self.device = device
        self._mutex = threading.Lock()
        self._next = first_id
        self._known: dict[int, Segment] = {}  # by address
        self._generation = 0
        self._last: Binding | None = None
        self._asked: tuple[bytes, NDArray[np.int64], NDArray[np.int64]] | None = None

    def bind(self, fingerprint: bytes, addresses: ArrayLike, nbytes: ArrayLike) -> Binding:
        """Return where storages lie now, with a new generation if anything moved since the last call.

        Args:
            fingerprint: of the manifest.
            addresses: integers [S].
            nbytes: sizes of the storages, integers [S].

        Raises:
            TransportError: a storage is not (wholly) in memory of this device.
        """
        where, size = np.array(addresses, np.int64), np.array(nbytes, np.int64)
        with self._mutex, driver.current(self.device):
            if self._last is not None and self._unmoved(fingerprint, where, size):
                return self._last
            self._asked = fingerprint, where, size
            found = self._segments(where, size)
            starts = np.array([s.region.ptr for s in found], np.int64)
            at = np.searchsorted(starts, where, side="right") - 1 if len(found) else np.zeros(0, np.int64)
            empty = size == 0
            ids = np.array([s.region.id for s in found], np.int32)
            region = np.where(empty, ids[0] if len(ids) else 0, ids[at] if len(ids) else 0)
            offset = np.where(empty, 0, where - (starts[at] if len(starts) else 0))
            regions = {s.region.id: s.region for s in found}
            if not found and len(where):
                regions = {0: Region(0, 0, 0, Kind.CUDA)}
            made = Binding(fingerprint, self._generation, region.astype(np.int32), offset, regions)
            if self._last is None or not made.same_places(self._last):
                self._generation += 1
                made = Binding(fingerprint, self._generation, made.region, made.offset, regions)
                self._last = made
            return self._last

    def segment(self, region: Region) -> Segment:
        """Return what a region is made of, after checking that it is still so.

        Raises:
            TransportError: it was freed, or allocated anew.
        """
        with self._mutex, driver.current(self.device):
            known = self._known.get(region.ptr)
            if known is None or known.region != region:
                raise TransportError(
                    "no such segment of this device's allocator", expected="a region of `bind`", found=region
                )
            now = tuple(self._pieces(region.ptr, region.ptr + region.nbytes))
            if now != known.pieces:
                raise TransportError(
                    f"region {region.id} was freed or moved since it was bound",
                    expected=f"{len(known.pieces)} pieces at {region.ptr:#x}",
                    found=f"{len(now)} others",
                    hint="bind again: plans and programs stay good",
                )
            return known

    def _unmoved(self, fingerprint: bytes, where: NDArray[np.int64], size: NDArray[np.int64]) -> bool:
        """Whether the last binding still holds: equal addresses, with the memory below that was there."""
        if self._asked is None or self._last is None or self._asked[0] != fingerprint:
            return False
        if not (np.array_equal(self._asked[1], where) and np.array_equal(self._asked[2], size)):
            return False
        known = [self._known[r.ptr] for r in self._last.regions.values() if r.nbytes]
        try:
            return all(
                tuple(self._pieces(s.region.ptr, s.region.ptr + s.region.nbytes)) == s.pieces for s in known
            )
        except TransportError:
            return False  # something is gone: looking for all of it anew says what

    def _segments(self, where: NDArray[np.int64], size: NDArray[np.int64]) -> list[Segment]:
        """Return the segments that storages lie in, by address."""
        order = np.argsort(where, kind="stable")
        found: list[list[Piece]] = []
        legacy: list[bool] = []
        covered = -1
        for i in order.tolist():
            start, end = int(where[i]), int(where[i] + size[i])
            if end <= max(covered, start):
                continue
            for piece in self._pieces(max(start, covered), end):
                ordinary = bool(driver.attribute(piece.address, Attribute.LEGACY_IPC))
                if found and not ordinary and not legacy[-1] and covered == piece.address:
                    found[-1].append(piece)
                else:
                    found.append([piece])
                    legacy.append(ordinary)
                covered = piece.address + piece.nbytes
        return [self._remembered(tuple(p), ordinary) for p, ordinary in zip(found, legacy, strict=True)]

    def _pieces(self, start: int, end: int) -> Iterator[Piece]:
        while start < end:
            base, nbytes = driver.address_range(start)
            if driver.attribute(start, Attribute.DEVICE_ORDINAL) != self.device:
                raise TransportError(
                    "a storage lies on another device",
                    expected=f"device {self.device}",
                    found=f"device {driver.attribute(start, Attribute.DEVICE_ORDINAL)}",
                )
            yield Piece(base, nbytes, driver.attribute(start, Attribute.BUFFER_ID))
            start = base + nbytes

    def _remembered(self, pieces: tuple[Piece, ...], legacy: bool) -> Segment:
        address = pieces[0].address
        nbytes = sum(p.nbytes for p in pieces)
        known = self._known.get(address)
        if known is not None and known.pieces == pieces:
            return known
        if known is None:
            region = Region(self._next, address, nbytes, Kind.CUDA, 1)
            self._next += 1
        else:
            region = Region(known.region.id, address, nbytes, Kind.CUDA, known.region.generation + 1)
        self._known[address] = Segment(region, pieces, legacy)
        return self._known[address]
