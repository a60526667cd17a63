"""`TensorTable`: versioned tensors under the user's own keys, put by some processes, read by any other.

The table is what weight sync stands on: a version is put by all of its writers, sealed when the last one says
`complete`, and read in place, under any other sharding. `WeightWriter` offers live memory; a table offers
copies, which stay until they are dropped.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from syncline import faults
from syncline.errors import DeadlineError, LayoutError, ProtocolError, SynclineError, UnknownVersionError
from syncline.kernels import host
from syncline.layout import Rules
from syncline.layout.dtensor import Storages
from syncline.layout.dtype import BY_CODE
from syncline.layout.manifest import Manifest
from syncline.layout.view import row_major
from syncline.memory import Binding
from syncline.protocol import messages as m
from syncline.protocol.ids import VersionKey
from syncline.store import join
from syncline.store.fetch import Fetcher
from syncline.store.keys import Key, local_part, shards
from syncline.store.member import Member
from syncline.store.offer import Offer
from syncline.store.segments import SegmentPool
from syncline.transport.base import Rights

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from syncline.layout import Shard
    from syncline.options import Options
    from syncline.protocol.ids import Fence
    from syncline.store.segments import Slot


@dataclass(frozen=True, slots=True)
class Entry:
    """What `TensorTable.scan` lists: one tensor of a version."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class TensorTable:
    """One process's access to a table.

    Args:
        name: of the table; any process of the job that names it shares it.
        job: name of the job.
        rank: of this process among the table's writers; None: it only reads.
        world: number of the table's writers: a version is sealed when all of them have completed it.
        keep: versions kept by a writer; completing one more drops the oldest.
        options: deadlines and bounds; from the environment if left out.
        serve: run the job's MetaServer here, unless there is one; rank 0 does, if left out.

    Raises:
        DeadlineError: no MetaServer within ``connect_timeout``.
    """

    def __init__(
        self,
        name: str,
        *,
        job: str = "default",
        rank: int | None = None,
        world: int = 1,
        keep: int = 2,
        options: Options | None = None,
        serve: bool | None = None,
    ) -> None:
        if keep < 1:
            raise ProtocolError("a table keeps at least one version", expected="keep >= 1", found=keep)
        self.name, self._rank, self._world, self._keep = name, rank, world, keep
        who = f"table {name}, " + ("a reader" if rank is None else f"writer {rank}")
        embedded = rank == 0 if serve is None else serve
        self.member = Member(job, who, options, serve=embedded, exports=rank is not None)
        try:
            self._reading = join.as_guest(self.member, self.name, "get")
        except BaseException as error:
            self.member.fail(error)
            self.member.close()
            raise
        self._writing: Fence | None = None
        self._fetcher = Fetcher(self.member, self._reading)
        self._pool = SegmentPool()
        self._open: dict[int, _Draft] = {}
        self._kept: list[tuple[VersionKey, _Draft]] = []
        self._generation = itertools.count(1)
        self._lock = threading.Lock()

    # --- writing

    def put(self, version: int, key: Key, tensor: torch.Tensor) -> None:
        """Copy one tensor into a version that this process is still writing; see `multi_put`."""
        self.multi_put(version, {key: tensor})

    def multi_put(self, version: int, tensors: Mapping[Key, torch.Tensor]) -> None:
        """Copy tensors into a version that this process is still writing. Nobody sees them before `complete`.

        Args:
            version: greater than every completed one.
            tensors: CPU tensors of any strides, or DTensors under a plain name.

        Raises:
            LayoutError: a key that does not fit its tensor, or was put before.
            MemoryBudgetError: too little memory; nothing of the call was put.
        """
        if self._rank is None:
            raise ProtocolError("this process only reads the table", hint="give rank= and world= to write")
        with self._lock:
            if self._kept and version <= self._kept[-1][0].number:
                raise ProtocolError(
                    "version numbers must grow",
                    expected=f"more than {self._kept[-1][0].number}",
                    found=version,
                )
            draft = self._open.get(version) or _Draft(self._pool)
            draft.add(tensors)
            self._open[version] = draft  # a version of which every put was refused was never begun

    def complete(self, version: int) -> VersionKey:
        """Say that this process has put all its tensors; the last writer's word seals the version.

        Raises:
            ProtocolError: this process has put nothing into it.
        """
        with self._lock:
            draft = self._open.pop(version, None)
            if draft is None:
                raise ProtocolError("nothing was put into this version", found=version)
            manifest, generation = draft.manifest(), next(self._generation)
            if self._writing is None:
                self._writing = join.as_writer(
                    self.member, self.name, manifest, rank=self._rank or 0, world=self._world
                )
            if manifest.fingerprint:
                self.member.client.put_manifest(self._writing, manifest)
            binding = draft.binding(manifest.fingerprint, generation)
            faults.point("table.before_complete")
            put = m.Put(
                self._writing,
                self.name,
                version,
                manifest.fingerprint,
                generation,
                "snapshot",
                self.member.client.put_binding(self._writing, self._offer(binding)),
            )
            done: m.PutDone = self.member.ask(put)
            self._kept.append((done.key, draft))
            self._drop_old()
            return done.key

    # --- reading

    def get(
        self,
        key: Key,
        into: torch.Tensor,
        version: int | None = None,
        *,
        timeout: float = 0.0,
        casts: bool = False,
    ) -> torch.Tensor:
        """Fill a tensor in place from a sealed version, under any sharding; return it. See `multi_get`."""
        self.multi_get({key: into}, version, timeout=timeout, casts=casts)
        return into

    def multi_get(
        self,
        tensors: Mapping[Key, torch.Tensor],
        version: int | None = None,
        *,
        timeout: float = 0.0,
        casts: bool = False,
    ) -> VersionKey:
        """Fill tensors in place from one sealed version; return which.

        Args:
            tensors: CPU tensors of any strides without overlaps, or DTensors under a plain name.
            version: None: the newest that is sealed.
            timeout: seconds to wait for the version.
            casts: allow narrowing to the tensors' dtypes; exact widening is always allowed.

        Raises:
            UnknownVersionError, DeadlineError: no such version (in time).
            NameMismatchError, ShapeMismatchError, UndeclaredCastError, CoverageError: the version does not
                hold what was asked for; nothing was written.
            RevokedError: the version was dropped while it was read.
        """
        pinned = self._pin(version, timeout)
        try:
            wanted, storages = _targets(tensors)
            rules = Rules(casts="reader") if casts else Rules()
            deadline = self.member.options.update_timeout
            self._fetcher.read(pinned.writers, wanted, storages, deadline=deadline, allowed=rules)
        finally:
            self.member.ask(m.Unpin(self._reading, self.name, pinned.key))
        return pinned.key

    def scan(self, prefix: str = "", version: int | None = None) -> list[Entry]:
        """List the tensors of a sealed version whose names begin with ``prefix``, by name."""
        pinned = self._pin(version, 0.0)
        try:
            found: dict[str, Entry] = {}
            for manifest in self._fetcher.layout(pinned.writers).manifests:
                dtypes = dict(zip(manifest.tensor.tolist(), manifest.dtype.tolist(), strict=True))
                for number, name in enumerate(manifest.names):
                    shape = tuple(manifest.global_shape[number, : int(manifest.ndim[number])].tolist())
                    found[name] = Entry(name, shape, BY_CODE[dtypes[number]].name)
            return [found[name] for name in sorted(found) if name.startswith(prefix)]
        finally:
            self.member.ask(m.Unpin(self._reading, self.name, pinned.key))

    def close(self) -> None:
        """Leave the job; what this process has put is gone with it."""
        self.member.close()
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.member.fail(error)
        self.close()

    # --- versions

    def _pin(self, version: int | None, timeout: float) -> m.Pinned:
        host.load()  # before a version is pinned, and progress watched: compiling them takes a while, once
        until = time.monotonic() + timeout
        while True:
            status: m.Status = self.member.ask(m.StatusQuery(self.name))
            key = _ready(status, version)
            if key is not None:
                return self.member.ask(
                    m.Pin(self._reading, self.name, key, self.member.options.update_timeout)
                )
            left = until - time.monotonic()
            if left <= 0:
                raise _missing(self.name, status, version, timeout)
            self.member.ask(m.Watch(status.seq, left), left + self.member.options.connect_timeout)

    def _offer(self, binding: Binding) -> bytes:
        tickets = []
        for region in binding.regions.values():
            registration = self.member.shm.register(region, self._pool.descriptor(region.id))
            ticket = self.member.shm.export(registration, Rights.READ, self._writing or self._reading)
            tickets.append(ticket.encode())
        return Offer(binding.to_wire(), tuple(tickets)).encode()

    def _drop_old(self) -> None:
        while len(self._kept) > self._keep:
            key, draft = self._kept.pop(0)
            seconds = self.member.options.update_timeout
            if self._writing is not None:
                close = m.CloseWindow(self._writing, self.name, key, seconds, "drained", evict=True)
                self.member.ask(close, seconds)
            draft.free()


class _Draft:
    """One version's copies, as one process writes them."""

    def __init__(self, pool: SegmentPool) -> None:
        self._pool = pool
        self._storages = Storages()
        self._shards: list[Shard] = []
        self._slots: list[Slot] = []
        self._seen: set[tuple[str, tuple[int, ...]]] = set()

    def add(self, tensors: Mapping[Key, torch.Tensor]) -> None:
        """Copy tensors; all of them, or none."""
        wanted = [(key, tensor, local_part(_name(key), tensor)) for key, tensor in tensors.items()]
        fresh = {box for key, tensor, local in wanted for box in self._check(key, tensor, local)}
        slots = self._pool.take([local.numel() * local.element_size() for _, _, local in wanted])
        for slot, (key, tensor, local) in zip(slots, wanted, strict=True):
            # a storage of its own that ends where the slot ends: the manifest numbers it like any other
            copy = torch.empty(0, dtype=local.dtype).set_(
                slot.tensor.untyped_storage(), 0, local.shape, row_major(tuple(local.shape))
            )
            copy.copy_(local)
            self._shards += shards(key, tensor, copy, self._storages)
        self._slots += slots
        self._seen |= fresh

    def manifest(self) -> Manifest:
        """Return the manifest of everything put so far."""
        return Manifest.from_shards(self._shards, [s.nbytes() for s in self._storages.listed])

    def binding(self, fingerprint: bytes, generation: int) -> Binding:
        """Return where the copies lie."""
        region = np.array([slot.region for slot in self._slots], np.int32)
        offset = np.array([slot.offset for slot in self._slots], np.int64)
        used = {slot.region: self._pool.region(slot.region) for slot in self._slots}
        return Binding(fingerprint, generation, region, offset, used)

    def free(self) -> None:
        """Give the memory back to the pool."""
        self._pool.give(self._slots)
        self._slots, self._shards, self._storages = [], [], Storages()

    def _check(
        self, key: Key, tensor: torch.Tensor, local: torch.Tensor
    ) -> list[tuple[str, tuple[int, ...]]]:
        boxes = [(s.name, s.box.offset) for s in shards(key, tensor, local, Storages())]
        twice = next((box for box in boxes if box in self._seen), None)
        if twice is not None:
            raise LayoutError("this box was put before", tensor=twice[0], found=f"offset {twice[1]}")
        return boxes


def _name(key: Key) -> str:
    return key if isinstance(key, str) else key.name


def _targets(tensors: Mapping[Key, torch.Tensor]) -> tuple[list[Shard], Storages]:
    storages = Storages()
    found: list[Shard] = []
    for key, tensor in tensors.items():
        found += shards(key, tensor, local_part(_name(key), tensor), storages)
    return found, storages


def _ready(status: m.Status, version: int | None) -> VersionKey | None:
    """Return the version that is meant, if it can be pinned now."""
    for table in status.tables:
        keys = [v.key for v in table.versions if v.state == "SEALED" and not v.closed]
        if version is not None:
            keys = [key for key in keys if key == VersionKey(table.epoch, version)]
        if keys:
            return max(keys)
    return None


def _missing(name: str, status: m.Status, version: int | None, timeout: float) -> SynclineError:
    known = [f"{v.key} {v.state}" for table in status.tables for v in table.versions]
    wanted = "any version" if version is None else f"version {version}"
    if timeout > 0:
        lacking = [f"writers {table.missing}" for table in status.tables if table.missing]
        return DeadlineError(
            f"table {name!r} has no sealed {wanted} after {timeout:g} s",
            found=", ".join(known) or "nothing",
            expected=f"`complete` by every writer{'; missing: ' + ', '.join(lacking) if lacking else ''}",
        )
    return UnknownVersionError(f"table {name!r} has no sealed {wanted}", found=", ".join(known) or "nothing")
