"""The plan: who moves which box to whom, a pure function of the layouts, the hosts and the rules."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from syncline.errors import PlanError
from syncline.layout import Layout, Rules
from syncline.plan import balance, bundles, explain
from syncline.plan.alias import check_destinations
from syncline.plan.columns import sum_by
from syncline.plan.cover import Feed, Sources, Tiles, feed, source_tiles
from syncline.plan.joint import Joint
from syncline.plan.link import Links
from syncline.plan.lower import Stream
from syncline.plan.match import casts, match, reduced
from syncline.plan.meshed import MeshHeld
from syncline.plan.pieces import Numbering, PieceGrid, Pieces

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncline.layout.mesh import MeshLayout
    from syncline.plan.bundles import Bundles
    from syncline.plan.columns import I64, U8, Bools
    from syncline.plan.hops import DigestRows, Hops

#: Changes whenever equal inputs would give another plan: both sides of a link must run the same planner.
PLANNER_VERSION = 2

ID_BYTES = 16
_CACHED_PLANS = 4
_CACHED_HOPS = 4

_recent: OrderedDict[bytes, Plan] = OrderedDict()


def plan(writer: Layout | MeshLayout, readers: Mapping[str, Layout], rules: Rules | None = None) -> Plan:
    """Plan the transfer of one version from the writer's ranks to every instance's ranks.

    Equal inputs give equal plans, in every process; the last few are kept, so that planning again for layouts
    that did not change costs no more than comparing fingerprints.

    Args:
        writer: manifests and hosts of the trainer's ranks, or the rule of a mesh.
        readers: layout of each instance, by name; at least one.
        rules: what is allowed beyond equal names and dtypes; nothing, if left out.

    Raises:
        NameMismatchError: names on one side only that no rule declares.
        ShapeMismatchError: one name, two global shapes.
        UndeclaredCastError: a cast that is neither exact nor declared.
        CoverageError: an element without a source, writers' boxes that overlap without being the same, or a
            destination byte with two sources.
        LayoutError: writers that store one tensor in two dtypes, an unknown transform.
        PlanError: a side without ranks, or a transform that cannot be applied.
    """
    chosen = Rules() if rules is None else rules
    number = plan_id(writer, readers, chosen)
    found = _recent.get(number)
    if found is None:
        found = Plan(writer, readers, chosen)
        _recent[number] = found
        while len(_recent) > _CACHED_PLANS:
            _recent.popitem(last=False)
    return found


def plan_id(writer: Layout | MeshLayout, readers: Mapping[str, Layout], rules: Rules | None = None) -> bytes:
    """Return the id that `plan` gives these inputs, without planning: 16 bytes."""
    state = hashlib.blake2b(digest_size=ID_BYTES)
    state.update(b"syncline plan" + PLANNER_VERSION.to_bytes(4, "little"))
    state.update((Rules() if rules is None else rules).fingerprint + writer.fingerprint)
    for name in sorted(readers):
        data = name.encode()
        state.update(len(data).to_bytes(8, "little") + data + readers[name].fingerprint)
    return state.digest()


class Plan:
    """Who moves which box of which tensor to whom.

    Build it with `plan`, which validates everything. What is common to a class of tensors that everybody cuts
    alike is found once; rows of a rank are computed when they are asked for, without those of other ranks,
    and kept for the ranks asked last.

    Attributes:
        id: 16 bytes; both sides compare it before the first byte moves.
        instances: names of the reader instances, sorted.
        casts: (name, source dtype, destination dtype) of every cast, exact or declared, sorted.
        sender_load: i64[writer ranks], bytes each one sends in all.
        sender_bound: bytes that the busiest sender of no assignment of these holders could be below.
    """

    def __init__(self, writer: Layout | MeshLayout, readers: Mapping[str, Layout], rules: Rules) -> None:
        self.id = plan_id(writer, readers, rules)
        self.writer_hosts = writer.hosts
        self.instances = tuple(sorted(readers))
        self.reader_hosts = {name: readers[name].hosts for name in self.instances}
        self._matched = match(writer, readers, rules)
        held, self._classes, self._small = reduced(self._matched, writer)
        if isinstance(held, MeshHeld):
            sources = held.sources(self._classes)
        else:
            sources = Sources.of(held, self._classes)
        self.casts = list(casts(self._matched, self._classes, self._small, sources, rules))
        for table in self._matched.readers:
            check_destinations(self._matched, table)
        self._readers = Joint.of(self._small.readers)
        told = writer if isinstance(writer, Layout) else Layout((writer.whole,) * writer.ranks, writer.hosts)
        tiles = source_tiles(self._small, sources, told, self._classes)
        self._tiles, self._feed, self._assigned = self._balanced(tiles)
        self._pieces = Numbering.of(self._grid(), self._classes)
        self._links = Links(
            self._matched,
            self._classes,
            held,
            sources,
            self._tiles,
            self._readers,
            self._feed,
            self._assigned,
            self._pieces,
        )
        self.sender_load, self.sender_bound = self._assigned.load, self._assigned.bound
        self._hops: OrderedDict[tuple[str, int], Hops] = OrderedDict()

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names, sorted; hops and pieces speak of them by index."""
        return self._matched.names

    @property
    def global_shape(self) -> I64:
        """i64[T, D], padded with 1."""
        return self._matched.global_shape

    @property
    def ndim(self) -> U8:
        """u8[T]."""
        return self._matched.ndim

    @property
    def writers(self) -> int:
        """Number of writer ranks."""
        return len(self.writer_hosts)

    @property
    def classes(self) -> int:
        """Number of classes of tensors that everybody cuts and holds alike."""
        return len(self._classes.first)

    def ranks(self, instance: str) -> int:
        """Return the number of ranks of an instance."""
        return len(self.reader_hosts[self._known(instance)])

    @cached_property
    def pieces(self) -> Pieces:
        """All pieces. Ask `piece_rows` for those of one rank: of a large model there are millions."""
        return self._pieces.rows(np.arange(len(self._pieces)))

    @property
    def piece_count(self) -> int:
        """Number of pieces."""
        return len(self._pieces)

    def piece_rows(self, piece: Any) -> Pieces:
        """Return the rows of some pieces, by number."""
        return self._pieces.rows(np.asarray(piece, np.int64))

    def reader(self, instance: str, rank: int) -> Hops:
        """Return what one reader rank receives, see `Hops` for the order.

        Raises:
            PlanError: no such instance or rank.
        """
        key = (self._known(instance), self._rank(rank, self.ranks(instance), f"instance {instance}"))
        found = self._hops.get(key)
        if found is None:
            found = self._hops[key] = self._received(*key)
            while len(self._hops) > _CACHED_HOPS:
                self._hops.popitem(last=False)
        return found

    def writer(self, rank: int, instance: str | None = None) -> Hops:
        """Return what one writer rank sends to all instances, or to one.

        Raises:
            PlanError: no such rank or instance.
        """
        self._rank(rank, self.writers, "the writer")
        number = None if instance is None else self.instances.index(self._known(instance))
        shares = self._assigned.shares_of(rank)
        if number is not None:
            shares = shares.take(np.nonzero(self._assigned.instance[shares.item] == number)[0])
        return self._links.sent(rank, shares)

    def received_bundles(self, instance: str, rank: int) -> Bundles:
        """Return what one reader rank receives of a mesh, one row for all tensors that are cut alike.

        Raises:
            PlanError: no such instance or rank, or the writers are not a mesh.
        """
        self._rank(rank, self.ranks(instance), f"instance {instance}")
        number = self.instances.index(instance)
        return bundles.received(self._meshed(), number, instance, rank, self._first(instance, rank))

    def sent_bundles(self, rank: int) -> Bundles:
        """Return what one rank of a mesh sends to all instances, one row for all tensors that are cut alike.

        Raises:
            PlanError: no such rank, or the writers are not a mesh.
        """
        return bundles.sent(self._meshed(), self._rank(rank, self.writers, "the writer"))

    def hops(self, some: Bundles) -> Hops:
        """Return every copy of some bundles, bundle by bundle: those of a link, say, not of a whole rank."""
        return bundles.hops(self._meshed(), some)

    def digest_rows(self, rank: int) -> DigestRows:
        """Return the pieces that a writer rank holds; all replicas digest what they hold.

        Raises:
            PlanError: no such rank.
        """
        self._rank(rank, self.writers, "the writer")
        return self._links.held_rows(int(self._matched.writer_of[rank]))

    def position_stream(self, rows: Hops | DigestRows) -> Stream:
        """Return the canonical flat positions of hops or digest rows, in elements, for `lower`."""
        return Stream.of_positions(rows.offset, self.global_shape.take(rows.tensor, axis=0))

    def explain(self, *, runs: bool = False, bytes_per_second: float | None = None) -> dict[str, Any]:
        """Return bytes per link, host and rank, the busiest resource and the bound, ready for JSON.

        Args:
            runs: also lower every reader's hops and count the descriptors (slow for large fleets).
            bytes_per_second: what one rank sends or receives; adds the predicted seconds.
        """
        return explain.explain(self, runs=runs, bytes_per_second=bytes_per_second)

    def link_bytes(self, instance: str, rank: int) -> I64:
        """Return i64[writer ranks]: bytes one reader rank receives from each."""
        tile, nbytes = self._fed(instance, rank)
        load = np.zeros(self.writers, np.int64)
        if len(tile):
            wanted = sum_by(tile, nbytes, len(self._tiles))
            tile = np.nonzero(wanted)[0]
            shares = self._assigned.shares(self._assigned.item[self.instances.index(instance), tile])
            sent = wanted[self._assigned.tile[shares.item]] * (shares.high - shares.low)
            np.add.at(load, shares.rank, sent)
        return load

    def hop_count(self, instance: str, rank: int) -> int:
        """Return the number of hops of one reader rank."""
        return int(self._classes.sizes[self._tiles.tensor[self._fed(instance, rank)[0]]].sum())

    def _fed(self, instance: str, rank: int) -> tuple[Any, I64]:
        """Return (tile, bytes) of what a reader rank takes of the classes' first tensors."""
        m = int(self._matched.reader_of[self._known(instance)][rank])
        part = slice(int(self._feed.ptr[m]), int(self._feed.ptr[m + 1]))
        return self._feed.tile[part], self._feed.nbytes[part]

    def _grid(self) -> PieceGrid:
        found = self._feed
        dtype = self._readers.dtype[found.segment]
        return PieceGrid.of(self._tiles, found.tile, dtype, found.low, found.low + found.size)

    def _balanced(self, tiles: Tiles) -> tuple[Tiles, Feed, balance.Assignment]:
        """Feed all readers and choose the senders, with large tiles cut if that is needed for balance."""
        numbers = {host: i for i, host in enumerate(sorted(set(self.writer_hosts)))}
        hosts = np.array([numbers[h] for h in self.writer_hosts], np.int64)
        fed, sets, demands = self._demands(tiles, numbers, hosts)
        sizes = self._classes.sizes
        assigned = balance.assign(sets, demands, hosts, sizes[tiles.tensor])
        cuts = balance.parts(sets, demands, assigned.bound)
        if assigned.balanced or bool((cuts == 1).all()):
            return tiles, fed, assigned
        finer = tiles.split(cuts)
        finer_fed, sets, demands = self._demands(finer, numbers, hosts)
        again = balance.assign(sets, demands, hosts, sizes[finer.tensor])
        return (finer, finer_fed, again) if again.busiest < assigned.busiest else (tiles, fed, assigned)

    def _demands(
        self, tiles: Tiles, numbers: dict[str, int], hosts: I64
    ) -> tuple[Feed, balance.HolderSets, list[balance.Demand]]:
        fed = feed(self._small, tiles, self._readers)
        sets = balance.HolderSets.of(tiles, self._matched.writer_of)
        near = np.zeros((len(sets.ranks), len(numbers)), np.bool_)
        for s, ranks in enumerate(sets.ranks):
            near[s, hosts[ranks]] = True
        near = near[sets.of_tile]
        return fed, sets, [self._demand(name, tiles, fed, numbers, near) for name in self.instances]

    def _demand(
        self, instance: str, tiles: Tiles, fed: Feed, numbers: dict[str, int], near: Bools
    ) -> balance.Demand:
        """Return an instance's bytes of each tile, and which host with holders wants most of them."""
        total = np.zeros(len(tiles), np.int64)
        host, most = np.full(len(tiles), -1, np.int64), np.zeros(len(tiles), np.int64)
        manifests = self._matched.reader_of[instance]
        where = np.array([numbers.get(h, -1) for h in self.reader_hosts[instance]])
        owner = self._readers.owner[fed.segment]
        for h in np.unique(where).tolist():
            times = np.bincount(manifests[where == h], minlength=len(self._small.readers))
            wanted = sum_by(fed.tile, fed.nbytes * times[owner], len(tiles))
            total += wanted
            if h >= 0 and len(numbers) > 1:
                better = near[:, h] & (wanted > most)
                host[better], most[better] = h, wanted[better]
        return balance.Demand(total, host)

    def _received(self, instance: str, rank: int) -> Hops:
        return self._links.received(
            self.instances.index(instance), instance, rank, self._first(instance, rank)
        )

    def _first(self, instance: str, rank: int) -> int:
        """Return where a reader starts: readers are spread evenly over the writers."""
        before = sum(self.ranks(name) for name in self.instances[: self.instances.index(instance)])
        readers = sum(self.ranks(name) for name in self.instances)
        return (before + rank) * self.writers // readers

    def _meshed(self) -> Links:
        if not isinstance(self._links.held, MeshHeld):
            raise PlanError(
                "tensors of a class may lie in memory in different ways",
                expected="writers that are a mesh: MeshLayout",
                found=f"{self.writers} manifests",
                hint="ask for reader() and writer()",
            )
        return self._links

    def _known(self, instance: str) -> str:
        if instance not in self.reader_hosts:
            raise PlanError(
                "no such instance in the plan", expected=", ".join(self.instances), found=instance
            )
        return instance

    def _rank(self, rank: int, ranks: int, of: str) -> int:
        if not 0 <= rank < ranks:
            raise PlanError(f"no such rank of {of} in the plan", expected=f"0..{ranks - 1}", found=rank)
        return rank
