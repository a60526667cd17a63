"""A reader rank's half of a plan over shared memory: gather from mapped regions into live parameters."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from syncline.errors import RevokedError, TransportError
from syncline.faults import point
from syncline.kernels import host
from syncline.transport import work
from syncline.transport.base import Side
from syncline.transport.locate import Difference, first_difference
from syncline.transport.order import alike_together, as_it_lies
from syncline.transport.running import Running
from syncline.transport.shm_link import ShmLink
from syncline.transport.tables import SLICE_BYTES, Boxes, Place, Table, boxes_of, sliced, tables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from syncline.memory.binding import Binding
    from syncline.memory.region import Region
    from syncline.plan import Hops, Plan
    from syncline.transport.base import Limits, Remote
    from syncline.transport.shm_link import Key

    I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Use:
    """The regions of one writer that a program is bound to, and where they were mapped at that time."""

    link: ShmLink
    keys: tuple[Key, ...]
    pointers: Mapping[int, int]


@dataclass(frozen=True)
class Bound:
    """Where a program's slots lie now, and through which links.

    Attributes:
        src, dst: i64[slots], addresses.
        uses: of the writers' regions.
        local: this process's regions.
    """

    src: I64  # address of each source slot
    dst: I64
    uses: tuple[Use, ...]
    local: tuple[Region, ...]


class ShmProgram:
    """Compiled once; runs any number of times, one at a time.

    Two sets of tables exist, each made at its first use: for plain copies, whose runs need not follow the
    order of the checkpoint tensor and are as long as memory allows, and for copies with digests.
    """

    def __init__(self, plan: Plan, hops: Hops, side: Side) -> None:
        self._side, self.plan_id = side, plan.id
        self._plan, self._hops = plan, hops
        self._mutex = threading.Lock()
        self._busy = False
        self._bound: Bound | None = None
        self._tables: dict[bool, list[Table]] = {}
        self._parts: dict[bool, list[work.Part]] = {}
        self._empty = side is Side.SOURCE or len(hops.tensor) == 0
        if self._empty:
            self.nbytes = 0
            return
        self.nbytes = int(hops.nbytes.sum())
        boxes, self._src, self._dst = boxes_of(plan, hops)
        self._compile(boxes)

    def _compile(self, boxes: Boxes) -> None:
        """Make what a run needs, from the hops' boxes; called once, at the end of the constructor."""
        host.load()  # compiling kernels is no part of a transfer and its deadline
        self._boxes = sliced(boxes, SLICE_BYTES)
        self._made(digest=False)

    @property
    def side(self) -> Side:
        """Which half."""
        return self._side

    @property
    def hops(self) -> int:
        """Number of hops planned for this half."""
        return 0 if self._empty else len(self._hops.tensor)

    @property
    def local_regions(self) -> tuple[Region, ...]:
        """The regions of this process that the program is bound to."""
        return () if self._bound is None else self._bound.local

    def rebind(self, local: Binding, remote: Mapping[int, Remote]) -> None:
        """Point the program at where storages lie now; see `Program.rebind`.

        Raises:
            RevokedError: the link has not mapped the generation that a remote binding names.
        """
        if self._empty:
            return
        with self._mutex:
            if self._busy:
                raise TransportError("the program is running", hint="wait for its transfer, or cancel it")
            dst = self._dst.resolve(dict.fromkeys(self._dst.ranks, Place.local(local)), "reader")
            places: dict[int, Place] = {}
            uses: list[Use] = []
            for rank in self._src.ranks:
                link, binding = _source(remote, rank)
                used = _regions(binding, self._src.storages(rank))
                keys = tuple((r, binding.regions[r].generation) for r in used)
                uses.append(Use(link, keys, link.pointers(keys)))
                places[rank] = Place(binding, uses[-1].pointers)
            src = self._src.resolve(places, "writer")
            self._bound = Bound(src, dst, tuple(uses), tuple(local.regions.values()))
            self._point(self._bound)

    def _point(self, bound: Bound) -> None:
        """Fill in addresses; nothing of this program runs meanwhile."""
        for made in self._tables.values():
            _bind(made, bound)

    def run(self, limits: Limits, *, digest: bool) -> Running:
        """Start one run in a thread of its own. The regions stay mapped until it ends.

        Raises:
            TransportError: not bound, or still running.
            RevokedError: a region it is bound to was revoked or replaced.
        """
        if self._empty:
            return Running("pull of an empty half", lambda _running: None, 0, 0, limits)
        with self._mutex:
            bound = self._ready()
            parts = self._made(digest=digest)
            hold = Hold(bound.uses)
            self._busy = True
        peers = tuple(use.link.peer.name for use in bound.uses)

        def body(running: Running) -> None:
            try:
                self._gather(running, parts, hold, digest=digest)
            finally:
                self._rest(hold)
            hold.check()  # revoked while the last bytes came: they may be torn

        try:
            return Running("pull", body, self.nbytes, self.hops, limits, peers)
        except RuntimeError as error:
            self._rest(hold)
            raise TransportError("no thread for a transfer", found=error) from error

    def _rest(self, hold: Hold) -> None:
        with self._mutex:
            self._busy = False
        hold.release()

    def locate(self, hop: int) -> Difference | None:
        """Compare a hop's destination with its source, cast to the wire dtype, element by element.

        The second pass after a digest mismatch: sound only while the source has not changed since.

        Returns:
            The difference that comes first in the checkpoint tensor; None if there is none.
        """
        with self._mutex:
            bound = self._ready()
            hold = Hold(bound.uses)
        try:
            with_positions = self.tables(digest=True)
            return first_difference(self._plan, self._hops, hop, with_positions)
        finally:
            hold.release()

    def _gather(self, running: Running, parts: list[work.Part], hold: Hold, *, digest: bool) -> None:
        point("shm.before_first_byte")
        out = np.zeros(self.hops, np.uint64) if digest else None
        running.add(0, int(np.count_nonzero(self._hops.nbytes == 0)))

        def before() -> None:
            point("shm.before_part")
            hold.check()

        work.run(running, parts, work.move, out, before=before)
        point("shm.after_last_byte")
        running.digests = out

    def _ready(self) -> Bound:
        if self._bound is None:
            raise TransportError("the program is not bound to any addresses", hint="call rebind first")
        if self._busy:
            raise TransportError("the program is running", hint="wait for its transfer, or cancel it")
        return self._bound

    def _made(self, *, digest: bool) -> list[work.Part]:
        if digest not in self._parts:
            self._parts[digest] = work.parts(self.tables(digest=digest))
        return self._parts[digest]

    def tables(self, *, digest: bool) -> list[Table]:
        """Return the descriptor tables of a run, with or without digests, made at their first use."""
        if digest not in self._tables:
            made = tables(self._boxes, positions=digest)
            made = [as_it_lies(table) if digest else alike_together(table) for table in made]
            if self._bound is not None:
                _bind(made, self._bound)
            self._tables[digest] = made
        return self._tables[digest]


class Hold:
    """Keeps the regions of one run mapped, and knows when one of them is revoked meanwhile."""

    def __init__(self, uses: tuple[Use, ...]) -> None:
        self._acquired: list[Use] = []
        self._revoked = threading.Event()
        try:
            for use in uses:
                use.link.acquire(use.keys, self._revoked.set)
                self._acquired.append(use)
                found = use.link.pointers(use.keys)
                if found is not use.pointers and found != use.pointers:
                    raise RevokedError(  # noqa: TRY301 - released below, like every other refusal
                        "a region was mapped anew since the program was bound", hint="rebind the program"
                    )
        except RevokedError:
            self.release()
            raise

    @property
    def links(self) -> list[ShmLink]:
        """The links whose regions are held."""
        return [use.link for use in self._acquired]

    def check(self) -> None:
        """Raise if a region was revoked."""
        if self._revoked.is_set():
            raise RevokedError(
                "a writer revoked its memory while it was read: what came may be torn",
                hint="pull a newer version",
            )

    def release(self) -> None:
        """Let go of the regions; a second call does nothing."""
        acquired, self._acquired = self._acquired, []
        for use in acquired:
            use.link.release(use.keys, self._revoked.set)


def _source(remote: Mapping[int, Remote], rank: int) -> tuple[ShmLink, Binding]:
    end = remote.get(rank)
    if end is None:
        raise TransportError("a writer rank that the plan reads from is not linked", found=f"writer {rank}")
    if not isinstance(end.link, ShmLink) or end.binding is None:
        raise TransportError(
            "shared memory needs the writer's binding and a link of this transport",
            found=type(end.link).__name__,
            rank=f"writer {rank}",
        )
    return end.link, end.binding


def _regions(binding: Binding, storages: I64) -> list[int]:
    """Return the ids of the regions that some storages lie in."""
    if len(storages) and int(storages.max()) >= len(binding):
        raise TransportError(
            "a binding of fewer storages than its manifest",
            expected=f"more than {int(storages.max())}",
            found=len(binding),
        )
    if len(binding.regions) == 1:
        return list(binding.regions)
    return np.unique(binding.region[storages]).tolist()


def _bind(made: list[Table], bound: Bound) -> None:
    for table in made:
        table.bind_src(bound.src)
        table.bind_dst(bound.dst)
