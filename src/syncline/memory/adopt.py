"""Moves live parameters into an arena in place: their holders keep the same tensors at new addresses.

Two ways, because a storage can be moved in two ways:

- *Into the arena*, where every tensor on the storage is known: the bytes are copied to a slot and every
  tensor is re-pointed there through ``.data`` with its shape, stride and offset. One descriptor serves all.
- *Into shared memory of its own* (torch's ``share_memory_``), where the storage has users that nobody named,
  say views into a flat buffer: re-pointing the tensors that are known would part them from those that are
  not. Sharing replaces the memory inside the storage object itself, so every alias follows, but it costs a
  descriptor each.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from syncline import faults
from syncline.errors import AdapterError, SynclineError
from syncline.memory.arena import Arena, aligned, reopen_read_only
from syncline.memory.binding import Binding
from syncline.memory.budget import SYSTEM, Sources, Use, require_memory
from syncline.memory.pages import discard
from syncline.memory.region import Kind, Region
from syncline.memory.storages import aliases_of, has_unknown_users, lent_uncounted, storage_id, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

ARENA_ID = 0
_TRIM_BYTES = 64 << 20
_MOVE_BYTES = 16 << 20  # copied before the pages that were left are given back


@dataclass(slots=True)
class _Slot:
    """One storage: the tensors on it, how they lie in it, and where it went."""

    name: str
    tensors: list[Tensor]
    dtypes: list[torch.dtype]
    shapes: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]
    starts: list[int]  # storage offsets in elements
    nbytes: int
    region: int = ARENA_ID
    offset: int = 0

    def check_same(self, tensors: Sequence[Tensor]) -> None:
        """Refuse tensors that are not the adopted ones, moved or not."""
        if len(tensors) != len(self.tensors):
            raise AdapterError(
                "a storage came back with other aliases",
                tensor=self.name,
                expected=len(self.tensors),
                found=len(tensors),
            )
        for tensor, dtype, shape in zip(tensors, self.dtypes, self.shapes, strict=True):
            if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device.type != "cpu":
                raise AdapterError(
                    "a parameter changed between two publishes",
                    tensor=self.name,
                    expected=f"{dtype} {shape} on cpu",
                    found=f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}",
                    hint="publish under a new writer after changing a model",
                )


class Adoption:
    """Live parameters of this process, adopted: their regions, descriptors and bindings.

    Args:
        groups: one list of tensors a storage, in the order of the manifest's storages: all tensors known to
            share it. For a DTensor pass its local tensor; for FSDP2 also the flat shard behind it. The first
            tensor of a list is the live one if they should ever part.
        names: one name a storage, for errors; by default its number.
        sources: where memory limits are read.

    Raises:
        AdapterError: tensors that are not dense on the CPU, or that do not share a storage.
        MemoryBudgetError: not enough memory, before any tensor moved; or pages refused half-way, when the
            tensors moved so far stay valid where they are.

    Peak extra memory is the largest storage: each old one is freed before the next is copied. Hold no other
    reference to the storages (``untyped_storage()`` objects count as unknown users).
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        names: Sequence[str] | None = None,
        sources: Sources = SYSTEM,
    ) -> None:
        self._slots = [_survey(_name(names, i), group) for i, group in enumerate(groups)]
        _check_distinct(self._slots)
        self.shared: dict[int, str] = {}
        self._kept: list[Tensor] = []
        self._shared_fds: dict[int, int] = {}
        self._generation = 1
        self._sources = sources
        for number, slot in enumerate(self._slots):
            if slot.nbytes and has_unknown_users(slot.tensors):
                self.shared[number] = "the storage has users that are not among the known aliases"
        in_arena = [i for i in range(len(self._slots)) if i not in self.shared]
        total = self._place(in_arena)
        self._preflight(in_arena)
        faults.point("memory.before_arena")
        self.arena = Arena(total, region_id=ARENA_ID)
        self.regions: dict[int, Region] = {ARENA_ID: self.arena.region}
        with torch.no_grad():
            self._move_all(in_arena)
            self.arena.use_huge_pages()
            for number in self.shared:
                faults.point("memory.before_share")
                self._share(number)
        _trim()

    @property
    def generation(self) -> int:
        """Grows whenever a parameter had moved away and was brought back."""
        return self._generation

    def binding(self, fingerprint: bytes) -> Binding:
        """Return where the storages lie, for the manifest with this fingerprint."""
        region = np.array([slot.region for slot in self._slots], np.int32)
        offset = np.array([slot.offset for slot in self._slots], np.int64)
        return Binding(fingerprint, self._generation, region, offset, dict(self.regions))

    def descriptors(self) -> dict[int, int]:
        """Return a read-only descriptor of each region, by region id; they stay owned by this object."""
        return {ARENA_ID: self.arena.fd, **self._shared_fds}

    def moved(self) -> list[int]:
        """Return the storages (numbers) of which some tensor lies no longer where it was put."""
        return [
            number
            for number, slot in enumerate(self._slots)
            if slot.nbytes and any(self._strayed(slot, i) for i in range(len(slot.tensors)))
        ]

    def readopt(self, groups: Sequence[Sequence[Tensor]] | None = None) -> bool:
        """Bring every parameter that moved back into its slot and re-point it; return whether any had.

        ``groups`` names the tensors anew, in the adopted order, where the objects themselves were replaced.
        The addresses of a binding do not change by this, its generation does.

        Raises:
            AdapterError: a dtype, shape or device changed; nothing was touched.
        """
        if groups is not None:
            self._rename(groups)
        for slot in self._slots:
            slot.check_same(slot.tensors)
        moved = self.moved()
        with torch.no_grad():
            for number in moved:
                faults.point("memory.before_readopt")
                self._bring_back(self._slots[number])
        if moved:
            self._generation += 1
            _trim()
        return bool(moved)

    def close(self) -> None:
        """Stop handing out descriptors. The parameters stay valid where they are."""
        self.arena.close()
        fds, self._shared_fds = self._shared_fds, {}
        for fd in fds.values():
            os.close(fd)

    def __del__(self) -> None:
        if "_shared_fds" in self.__dict__ and "arena" in self.__dict__:
            self.close()

    def _place(self, in_arena: Sequence[int]) -> int:
        end = 0
        for number in in_arena:
            slot = self._slots[number]
            slot.offset = end
            end += aligned(slot.nbytes)
        return end

    def _preflight(self, in_arena: Sequence[int]) -> None:
        arena = [self._slots[i] for i in in_arena]
        shared = [self._slots[i] for i in self.shared]
        kept = sum(slot.nbytes for slot in arena if lent_uncounted(slot.tensors))
        largest = max((slot.nbytes for slot in (*arena, *shared)), default=0)
        require_memory(largest + kept, "moving parameters into shared memory", Use.MEMFD, self._sources)
        for_shm = sum(slot.nbytes for slot in shared)
        require_memory(for_shm, "parameters with unknown aliases, in /dev/shm", Use.SHM, self._sources)
        for number in self.shared:
            slot = self._slots[number]
            if not slot.tensors[0].untyped_storage().resizable():
                raise AdapterError(
                    "a parameter whose memory is lent to, or borrowed from, something that nobody named",
                    tensor=slot.name,
                    expected="memory that torch allocated, or no other users of it",
                    found="borrowed memory with unknown users",
                    hint="drop numpy arrays and views of it, or clone it, before publishing",
                )

    def _move_all(self, in_arena: Sequence[int]) -> None:
        freed = 0
        for number in in_arena:
            slot = self._slots[number]
            if not slot.nbytes:
                continue
            faults.point("memory.before_move")
            self.arena.reserve(slot.offset, slot.nbytes)
            slab, old = self.arena.storage(slot.offset, slot.nbytes), whole(slot.tensors[0])
            if lent_uncounted(slot.tensors):
                self._kept.append(old)
                slab.copy_(old)
            else:
                _move(slab, old)
            del old
            self._point(slot, slab)
            freed += slot.nbytes
            if freed >= _TRIM_BYTES:
                freed = 0
                _trim()

    def _point(self, slot: _Slot, slab: Tensor) -> None:
        """Re-point every tensor of a slot into ``slab``, uint8 over the whole of its storage."""
        storage = slab.untyped_storage()
        for i, tensor in enumerate(slot.tensors):
            there = torch.empty(0, dtype=slot.dtypes[i])
            tensor.data = there.set_(storage, slot.starts[i], slot.shapes[i], slot.strides[i])

    def _share(self, number: int) -> None:
        slot = self._slots[number]
        storage = slot.tensors[0].untyped_storage()
        # The file_descriptor strategy whatever torch's global one is: the other leaves names in /dev/shm.
        fd, _ = storage._share_fd_cpu_()
        read_only = reopen_read_only(fd)
        region = ARENA_ID + 1 + len(self._shared_fds)
        self._shared_fds[region] = read_only
        self.regions[region] = Region(region, storage.data_ptr(), slot.nbytes, Kind.SHARED)
        slot.region, slot.offset = region, 0

    def _base(self, slot: _Slot) -> int:
        return self.regions[slot.region].ptr + slot.offset

    def _strayed(self, slot: _Slot, i: int) -> bool:
        tensor = slot.tensors[i]
        if not tensor.numel():
            return False
        there = self._base(slot) + slot.starts[i] * tensor.element_size()
        return tensor.data_ptr() != there or tensor.stride() != slot.strides[i]

    def _rename(self, groups: Sequence[Sequence[Tensor]]) -> None:
        if len(groups) != len(self._slots):
            raise AdapterError("another number of storages", expected=len(self._slots), found=len(groups))
        fresh = [aliases_of(group) for group in groups]
        for slot, tensors in zip(self._slots, fresh, strict=True):
            slot.check_same(tensors)
        for slot, tensors in zip(self._slots, fresh, strict=True):
            slot.tensors = tensors

    def _bring_back(self, slot: _Slot) -> None:
        if slot.region != ARENA_ID:
            raise AdapterError(
                "a parameter with unknown aliases moved away from them",
                tensor=slot.name,
                expected="in-place updates of a storage with unknown aliases",
                found="other memory",
                hint="rebuild the writer after replacing such parameters",
            )
        slab = self.arena.storage(slot.offset, slot.nbytes)
        home = torch.empty(0, dtype=slot.dtypes[0])
        home.set_(slab.untyped_storage(), slot.starts[0], slot.shapes[0], slot.strides[0])
        if self._strayed(slot, 0):
            home.copy_(slot.tensors[0])
        self._point(slot, slab)


def _name(names: Sequence[str] | None, number: int) -> str:
    return f"storage {number}" if names is None else names[number]


def _survey(name: str, group: Sequence[Tensor]) -> _Slot:
    tensors = aliases_of(group)
    if not tensors:
        raise AdapterError("a storage without a tensor", tensor=name)
    for tensor in tensors:
        on_host = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized
        if not on_host or hasattr(tensor, "_local_tensor"):
            raise AdapterError(
                "only dense tensors in host memory can be adopted",
                tensor=name,
                expected="a strided CPU tensor, for a DTensor its local one",
                found=f"{type(tensor).__name__}, {tensor.layout} on {tensor.device}",
            )
    storages = {storage_id(tensor) for tensor in tensors}
    if len(storages) != 1:
        raise AdapterError(
            "tensors that were said to share a storage do not", tensor=name, found=len(storages)
        )
    return _Slot(
        name,
        tensors,
        [t.dtype for t in tensors],
        [tuple(t.shape) for t in tensors],
        [t.stride() for t in tensors],
        [int(t.storage_offset()) for t in tensors],
        tensors[0].untyped_storage().nbytes(),
    )


def _move(slab: Tensor, old: Tensor) -> None:
    """Copy memory that is about to be freed, and give its pages back as they are copied: uint8, both whole.

    An interruption puts everything back: until it is re-pointed, a tensor still reads the old memory.
    """
    pinned, done = old.is_pinned(), 0
    try:
        for start in range(0, old.numel(), _MOVE_BYTES):
            part = old[start : start + _MOVE_BYTES]
            slab[start : start + _MOVE_BYTES].copy_(part)
            done = start + part.numel()
            faults.point("memory.before_discard")
            if not pinned:
                discard(part.data_ptr(), part.numel())
    except BaseException:
        old[:done].copy_(slab[:done])
        raise


def _check_distinct(slots: Sequence[_Slot]) -> None:
    seen: dict[int, str] = {}
    for slot in slots:
        pointer = slot.tensors[0].untyped_storage().data_ptr()
        if slot.nbytes and (other := seen.setdefault(pointer, slot.name)) != slot.name:
            raise AdapterError("one storage was passed twice", tensor=slot.name, found=f"also as {other}")


def _trim() -> None:
    """Give freed heap back: glibc keeps small blocks, which add up to a second copy of the model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def private_binding(fingerprint: bytes, groups: Sequence[Sequence[Tensor]], generation: int = 0) -> Binding:
    """Bind storages where they are, unmoved, for a rank that only receives; ``groups`` as in `Adoption`."""
    if any(not group for group in groups):
        raise SynclineError("a storage without a tensor")
    addresses = [group[0].untyped_storage().data_ptr() for group in groups]
    return Binding.private(fingerprint, np.array(addresses, np.int64), generation)
