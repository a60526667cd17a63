"""What one rank proves before it reports: it received what was published, and that stands in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from syncline.errors import DigestMismatchError, SynclineError
from syncline.plan import DigestRows
from syncline.protocol import messages as m
from syncline.store.offer import decode_digests
from syncline.transport.base import Limits
from syncline.verify.delivered import Published, collect, mismatched

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from syncline.memory import Binding
    from syncline.plan import Hops, Plan
    from syncline.protocol.ids import Fence, VersionKey
    from syncline.protocol.parts import Level
    from syncline.store.member import Member
    from syncline.store.pull import Leg, Outcome, Route
    from syncline.transport.cuda_ipc_sources import DeviceSourceDigests
    from syncline.transport.sources import SourceDigests

_SHOWN = 5


class Rhythm:
    """Which updates are proved: the first one, then every n-th. One that failed is not counted.

    Args:
        every: n, at least 1.

    Raises:
        SynclineError: less than 1.
    """

    def __init__(self, every: int) -> None:
        if every < 1:
            raise SynclineError("cannot prove like that", expected="verify_every >= 1", found=every)
        self._every, self._made = every, 0

    def level(self, demanded: Level) -> Level:
        """Return the level of the next update: the demanded one, or ``"none"`` between two proofs."""
        return demanded if self._made % self._every == 0 else "none"

    def count(self) -> None:
        """Count an update that was made."""
        self._made += 1


class Proof:
    """Proofs of one reader rank.

    Args:
        member: the process.
        table: name of the table.
        who: the rank in words.
        binding: returns where this rank's storages lie now.
    """

    def __init__(self, member: Member, table: str, who: str, binding: Callable[[], Binding]) -> None:
        self._member, self._table, self._who, self._binding = member, table, who, binding
        self._programs: dict[int, SourceDigests | DeviceSourceDigests] = {}
        self._plan = b""
        self._published: tuple[VersionKey, bytes, Published] | None = None

    def check(
        self, fence: Fence, begun: m.Begun, route: Route, index: int, outcome: Outcome, deadline: float
    ) -> None:
        """Prove one leg of an update at the update's level.

        ``installed`` reads where the leg was written to, before an engine that takes stages makes something
        else of it.

        Raises:
            DigestMismatchError: bytes differ; names tensor, rank and place.
            ReplicaDivergenceError: writers' replicas differ.
            DeadlineError: a writer's digests did not come; names the writers.
        """
        if begun.level == "none" or outcome.digests is None:
            return
        published = self._fetched(fence, begun.key, route.plan, deadline)
        self._compare(published, route.plan, route.legs[index], outcome.digests, "delivered")
        if begun.level == "installed":
            again = self._read_again(route, index, deadline)
            self._compare(published, route.plan, route.legs[index], again, "installed")

    def _read_again(self, route: Route, index: int, deadline: float) -> NDArray[np.uint64]:
        """Return u64[H]: digests of what stands in memory now."""
        if self._plan != route.plan.id:
            self._plan, self._programs = route.plan.id, {}
        program = self._programs.get(index)
        if program is None:
            rows = _live_rows(route.legs[index].hops)
            program = self._programs[index] = self._member.digests(route.plan, rows)
        program.rebind(self._binding())
        running = program.start(Limits(deadline=deadline, threads=self._member.options.threads))
        running.wait(deadline)
        return running.digests if running.digests is not None else np.zeros(0, np.uint64)

    def _fetched(self, fence: Fence, key: VersionKey, plan: Plan, deadline: float) -> Published:
        known = self._published
        if known is not None and known[:2] == (key, plan.id):
            return known[2]
        reply: m.DigestBlobs = self._member.ask(
            m.FetchDigests(fence, self._table, key, plan.id, deadline), deadline
        )
        columns = [
            decode_digests(blob, plan.piece_count, f"writer {rank}") for rank, blob in enumerate(reply.blobs)
        ]
        found = collect(plan, columns)
        self._published = key, plan.id, found
        return found

    def _compare(
        self, published: Published, plan: Plan, leg: Leg, digests: NDArray[np.uint64], level: str
    ) -> None:
        bad = mismatched(published, leg.hops, digests)
        if len(bad):
            raise self._mismatch(plan, leg, bad, level)

    def _mismatch(self, plan: Plan, leg: Leg, bad: NDArray[np.int64], level: str) -> DigestMismatchError:
        hops = leg.hops
        first = int(bad[0])
        name = plan.names[int(hops.tensor[first])]
        ndim = int(plan.ndim[int(hops.tensor[first])])
        corner, size = hops.offset[first, :ndim].tolist(), hops.size[first, :ndim].tolist()
        box = ", ".join(f"{o}:{o + s}" for o, s in zip(corner, size, strict=True))
        also = sorted({plan.names[int(t)] for t in hops.tensor[bad]} - {name})[:_SHOWN]
        return DigestMismatchError(
            f"the {level} bytes are not the published ones, in {len(bad)} of {len(hops)} boxes",
            tensor=name,
            rank=f"{self._who}, from writer {int(hops.src[first])}",
            expected=f"the digest of [{box}] as its writer published it",
            found=_second_pass(leg, first) + (f"; also in {', '.join(also)}" if also else ""),
            hint="the instance stays paused until a full update succeeds",
        )


def _live_rows(hops: Hops) -> DigestRows:
    """Return rows that digest the destinations of hops, one a hop."""
    return DigestRows(
        piece=np.arange(len(hops), dtype=np.int32),
        tensor=hops.tensor,
        offset=hops.offset,
        size=hops.size,
        src_storage=hops.dst_storage,
        src_base=hops.dst_base,
        src_stride=hops.dst_stride,
        src_dtype=hops.dst_dtype,
        dtype=hops.dst_dtype,
        nbytes=hops.nbytes,
    )


def _second_pass(leg: Leg, hop: int) -> str:
    """Compare source and destination element by element, where the source can still be read."""
    for lane in leg.lanes:
        at = np.flatnonzero(lane.rows == hop)
        locate = getattr(lane.program, "locate", None)
        if len(at) == 0 or locate is None:
            continue
        found = locate(int(at[0]))
        if found is None:
            return "bytes equal to the writer's memory now: it changed inside its read window"
        return f"first differing element {found.index}, in digest block {found.block}"
    return "another digest; the source cannot be read again over this transport"
