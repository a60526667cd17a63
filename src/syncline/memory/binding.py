"""A binding: in which region, and where in it, each storage of a manifest lies now.

A binding changes whenever storages move (an offload, a sleep mode, an optimizer that re-allocates); the
manifest and the plan do not. Its wire form carries no pointer: the receiver maps the regions and fills in
its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np

from syncline.errors import ManifestError, TransportError
from syncline.memory.region import Kind, Region

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray

WIRE_VERSION = 1
MAX_STORAGES = 1 << 24
_BYTES_PER_STORAGE = 12  # int32 region and int64 offset


class _RegionWire(msgspec.Struct, array_like=True, frozen=True):
    id: int
    nbytes: int
    kind: int
    generation: int


class _BindingWire(msgspec.Struct, array_like=True, frozen=True):
    version: int
    fingerprint: bytes
    generation: int
    regions: list[_RegionWire]
    region: bytes  # little-endian int32, one a storage
    offset: bytes  # little-endian int64, one a storage


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_BindingWire).decode


@dataclass(frozen=True, eq=False)
class Binding:
    """Where the S storages of one manifest lie.

    Attributes:
        fingerprint: the manifest's, 16 bytes.
        generation: grows with every change of any address below.
        region: int32[S], key into ``regions``.
        offset: int64[S], bytes from the region's start to the storage's first byte.
        regions: the regions by id.
    """

    fingerprint: bytes
    generation: int
    region: NDArray[np.int32]
    offset: NDArray[np.int64]
    regions: Mapping[int, Region] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, dtype in (("region", np.int32), ("offset", np.int64)):
            column = np.array(getattr(self, name), dtype)
            column.setflags(write=False)
            object.__setattr__(self, name, column)
        if self.region.ndim != 1 or self.region.shape != self.offset.shape:
            raise ManifestError(
                "a binding needs one region and one offset a storage",
                expected="two columns of one length",
                found=f"region {self.region.shape}, offset {self.offset.shape}",
            )

    @classmethod
    def private(cls, fingerprint: bytes, addresses: ArrayLike, generation: int = 0) -> Self:
        """Bind storages of private memory by their absolute addresses, integers [S]."""
        offset = np.asarray(addresses, np.int64)
        region = np.zeros(offset.shape, np.int32)
        return cls(fingerprint, generation, region, offset, {0: Region.private(0)})

    def __len__(self) -> int:
        return len(self.offset)

    def addresses(self) -> NDArray[np.int64]:
        """Return int64[S]: absolute addresses, in this process, of the storages' first bytes.

        Raises:
            TransportError: a region that storages lie in is not mapped here, or is not in ``regions``.
        """
        ids, base = self._bases()
        if not len(self.region):
            return np.zeros(0, np.int64)
        slot = np.minimum(np.searchsorted(ids, self.region), max(0, len(ids) - 1))
        if not len(ids) or bool(np.any(ids[slot] != self.region)):
            known = set(ids.tolist())
            stray = next(int(r) for r in self.region if int(r) not in known)
            raise TransportError(
                "a binding names a region that it does not describe", expected=sorted(known), found=stray
            )
        used = np.zeros(len(ids), bool)
        used[slot] = True
        for region_id in ids[used]:
            if not self.regions[int(region_id)].mapped:
                raise TransportError(
                    "a binding's region is not mapped in this process",
                    expected="an address from Binding.relocated",
                    found=self.regions[int(region_id)],
                )
        return base[slot] + self.offset

    def _bases(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ids = np.array(sorted(self.regions), np.int64)
        return ids, np.array([self.regions[int(i)].ptr for i in ids], np.int64)

    def same_places(self, other: Binding) -> bool:
        """Whether both bind one manifest to the same places (generations may differ)."""
        return (
            self.fingerprint == other.fingerprint
            and bool(np.array_equal(self.region, other.region))
            and bool(np.array_equal(self.offset, other.offset))
            and dict(self.regions) == dict(other.regions)
        )

    def relocated(self, pointers: Mapping[int, int]) -> Binding:
        """Return the binding with regions (by id) at the given addresses of this process, kind MAPPED."""
        regions = {
            key: r.at(pointers[key], Kind.MAPPED) if key in pointers else r for key, r in self.regions.items()
        }
        return Binding(self.fingerprint, self.generation, self.region, self.offset, regions)

    def to_wire(self) -> bytes:
        """Encode without pointers (msgpack, 12 bytes a storage).

        Raises:
            TransportError: a storage lies in private memory, which no peer can reach.
        """
        for region in self.regions.values():
            if region.kind is Kind.MALLOC:
                raise TransportError(
                    "private memory cannot be handed out",
                    expected="storages in an arena or in shared memory",
                    found=region,
                    hint="adopt the parameters into an Arena before publishing",
                )
        regions = [
            _RegionWire(r.id, r.nbytes, int(r.kind), r.generation)
            for r in sorted(self.regions.values(), key=lambda r: r.id)
        ]
        columns = self.region.astype("<i4").tobytes(), self.offset.astype("<i8").tobytes()
        return _encode(_BindingWire(WIRE_VERSION, self.fingerprint, self.generation, regions, *columns))

    @classmethod
    def from_wire(cls, blob: bytes) -> Self:
        """Decode `to_wire`; regions have pointer 0 until `relocated`.

        Raises:
            ManifestError: not a binding, another version, or columns, regions and offsets that disagree.
        """
        if len(blob) > MAX_STORAGES * _BYTES_PER_STORAGE:
            raise ManifestError("a binding larger than any manifest", found=f"{len(blob)} bytes")
        try:
            wire = _decode(blob)
            kinds = [Kind(r.kind) for r in wire.regions]
        except (msgspec.MsgspecError, ValueError) as error:
            raise ManifestError("bytes that are not a binding", found=error) from error
        count = len(wire.offset) // 8
        if wire.version != WIRE_VERSION or len(wire.offset) != 8 * count or len(wire.region) != 4 * count:
            raise ManifestError(
                "a binding of another version, or with columns of odd lengths",
                expected=f"version {WIRE_VERSION}, 4 and 8 bytes a storage",
                found=f"version {wire.version}, {len(wire.region)} and {len(wire.offset)} bytes",
            )
        regions = {
            r.id: Region(r.id, 0, r.nbytes, kind, r.generation)
            for r, kind in zip(wire.regions, kinds, strict=True)
        }
        region = np.frombuffer(wire.region, "<i4").astype(np.int32)
        offset = np.frombuffer(wire.offset, "<i8").astype(np.int64)
        _check_offsets(region, offset, regions)
        return cls(wire.fingerprint, wire.generation, region, offset, regions)


def _check_offsets(
    region: NDArray[np.int32], offset: NDArray[np.int64], regions: Mapping[int, Region]
) -> None:
    if any(r.nbytes < 0 for r in regions.values()):
        raise ManifestError("a region of negative size", found=list(regions.values()))
    if not len(region):
        return
    ids = np.array(sorted(regions), np.int64)
    slot = np.minimum(np.searchsorted(ids, region), max(len(ids) - 1, 0))
    if not len(ids) or bool(np.any(ids[slot] != region)):
        raise ManifestError("a binding that names a region it does not describe", expected=ids.tolist())
    limits = np.array([regions[int(i)].nbytes for i in ids], np.int64)
    outside = np.flatnonzero((offset < 0) | (offset > limits[slot]))
    if outside.size:
        first = int(outside[0])
        raise ManifestError(
            "a binding that points outside its regions",
            expected=f"an offset within [0, {int(limits[slot[first]])}] of region {int(region[first])}",
            found=f"{int(offset[first])} for storage {first}",
        )
