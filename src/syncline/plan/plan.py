"""The plan: who moves which box to whom, a pure function of the layouts, the hosts and the rules."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from syncline.errors import PlanError
from syncline.layout import Rules
from syncline.plan import balance, explain
from syncline.plan.alias import check_destinations
from syncline.plan.cover import Feed, Sources, Tiles, feed, source_tiles, tile_index
from syncline.plan.hops import DigestRows, Hops
from syncline.plan.lower import Stream
from syncline.plan.match import match
from syncline.plan.pieces import PieceGrid, Pieces

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from syncline.layout import Layout
    from syncline.plan.columns import I64, U8, Bools
    from syncline.plan.match import Table

#: Changes whenever equal inputs would give another plan: both sides of a link must run the same planner.
PLANNER_VERSION = 1

ID_BYTES = 16
_CACHED_PLANS = 4
_CACHED_HOPS = 4

_recent: OrderedDict[bytes, Plan] = OrderedDict()


def plan(writer: Layout, readers: Mapping[str, Layout], rules: Rules | None = None) -> Plan:
    """Plan the transfer of one version from the writer's ranks to every instance's ranks.

    Equal inputs give equal plans, in every process; the last few are kept, so that planning again for layouts
    that did not change costs no more than comparing fingerprints.

    Args:
        writer: manifests and hosts of the trainer's ranks.
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


def plan_id(writer: Layout, readers: Mapping[str, Layout], rules: Rules | None = None) -> bytes:
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

    Build it with `plan`, which validates everything. Rows of a rank are computed when they are asked for,
    without those of other ranks, and kept for the ranks asked last.

    Attributes:
        id: 16 bytes; both sides compare it before the first byte moves.
        instances: names of the reader instances, sorted.
        names: canonical names of the synced tensors, sorted.
        global_shape: i64[T, D], padded with 1.
        ndim: u8[T].
        casts: (name, source dtype, destination dtype) of every cast, exact or declared, sorted.
        sender_load: i64[writer ranks], bytes each one sends in all.
        sender_bound: bytes that the busiest sender of no assignment of these holders could be below.
    """

    def __init__(self, writer: Layout, readers: Mapping[str, Layout], rules: Rules) -> None:
        self.id = plan_id(writer, readers, rules)
        self.writer_hosts = writer.hosts
        self.instances = tuple(sorted(readers))
        self.reader_hosts = {name: readers[name].hosts for name in self.instances}
        self._matched = match(writer, readers, rules)
        self._sources = Sources.of(self._matched.writers)
        for table in self._matched.readers:
            check_destinations(self._matched, table)
        tiles = source_tiles(self._matched, self._sources, writer)
        self._tiles, self._feeds, assigned = self._balanced(tiles)
        self._sender = assigned.sender
        self.sender_load, self.sender_bound = assigned.load, assigned.bound
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
    def casts(self) -> list[tuple[str, str, str]]:
        """(name, source dtype, destination dtype) of every cast, exact or declared, sorted."""
        return list(self._matched.casts)

    @property
    def writers(self) -> int:
        """Number of writer ranks."""
        return len(self.writer_hosts)

    def ranks(self, instance: str) -> int:
        """Return the number of ranks of an instance."""
        return len(self.reader_hosts[self._known(instance)])

    @cached_property
    def pieces(self) -> Pieces:
        """All pieces. Ask `piece_rows` for those of one rank: of a large model there are millions."""
        return self._grid.rows()

    @property
    def piece_count(self) -> int:
        """Number of pieces."""
        return len(self._grid)

    def piece_rows(self, piece: Any) -> Pieces:
        """Return the rows of some pieces, by number."""
        return self._grid.rows(np.asarray(piece, np.int64))

    def reader(self, instance: str, rank: int) -> Hops:
        """Return what one reader rank receives, see `Hops` for the order.

        Raises:
            PlanError: no such instance or rank.
        """
        key = (self._known(instance), self._rank(rank, self.ranks(instance), f"instance {instance}"))
        found = self._hops.get(key)
        if found is None:
            found = self._hops[key] = self._reader_hops(*key, senders=None)
            while len(self._hops) > _CACHED_HOPS:
                self._hops.popitem(last=False)
        return found

    def writer(self, rank: int, instance: str | None = None) -> Hops:
        """Return what one writer rank sends to all instances, or to one.

        Raises:
            PlanError: no such rank or instance.
        """
        self._rank(rank, self.writers, "the writer")
        names = self.instances if instance is None else (self._known(instance),)
        senders = np.zeros(self.writers, np.bool_)
        senders[rank] = True
        parts = [self._reader_hops(name, r, senders) for name in names for r in range(self.ranks(name))]
        return Hops.concatenate(parts)

    def digest_rows(self, rank: int) -> DigestRows:
        """Return the pieces that a writer rank holds; all replicas digest what they hold.

        Raises:
            PlanError: no such rank.
        """
        self._rank(rank, self.writers, "the writer")
        tile, source = self._tiles.held_by(int(self._matched.writer_of[rank]))
        at, piece = self._grid.of_tiles(tile)
        order = np.argsort(piece, kind="stable")
        at, piece = at[order], piece[order]
        rows, row = self._grid.rows(piece), source[at]
        s = self._sources
        return DigestRows(
            piece=piece,
            tensor=rows.tensor,
            offset=rows.offset,
            size=rows.size,
            src_storage=s.storage[row],
            src_base=_corner(s, row, rows.offset),
            src_stride=s.stride[row],
            src_dtype=s.dtype[row],
            dtype=rows.dtype,
            nbytes=rows.nbytes,
        )

    def position_stream(self, rows: Hops | DigestRows) -> Stream:
        """Return the canonical flat positions of hops or digest rows, in elements, for `lower`."""
        return Stream.of_positions(rows.offset, self.global_shape[rows.tensor])

    def explain(self, *, runs: bool = False, bytes_per_second: float | None = None) -> dict[str, Any]:
        """Return bytes per link, host and rank, the busiest resource and the bound, ready for JSON.

        Args:
            runs: also lower every reader's hops and count the descriptors (slow for large fleets).
            bytes_per_second: what one rank sends or receives; adds the predicted seconds.
        """
        return explain.explain(self, runs=runs, bytes_per_second=bytes_per_second)

    def link_bytes(self, instance: str, rank: int) -> I64:
        """Return i64[writer ranks]: bytes one reader rank receives from each."""
        m = int(self._matched.reader_of[instance][rank])
        found, senders = self._feeds[m], self._sender[self.instances.index(instance)]
        load = np.zeros(self.writers, np.int64)
        np.add.at(load, senders[found.tile], found.nbytes)
        return load

    def hop_count(self, instance: str, rank: int) -> int:
        """Return the number of hops of one reader rank."""
        return len(self._feeds[int(self._matched.reader_of[instance][rank])].tile)

    @cached_property
    def _grid(self) -> PieceGrid:
        return PieceGrid.of(self._tiles, self._wanted)

    def _wanted(self) -> Iterator[tuple[Any, U8, I64, I64]]:
        for table, found in zip(self._matched.readers, self._feeds, strict=True):
            yield (found.tile, table.dtype[found.segment], *found.boxes(table, self._tiles))

    def _balanced(self, tiles: Tiles) -> tuple[Tiles, list[Feed], balance.Assignment]:
        """Feed all readers and choose the senders, with large tiles cut if that is needed for balance."""
        numbers = {host: i for i, host in enumerate(sorted(set(self.writer_hosts)))}
        hosts = np.array([numbers[h] for h in self.writer_hosts], np.int64)
        feeds, sets, demands = self._demands(tiles, numbers, hosts)
        assigned = balance.assign(sets, demands, hosts)
        cuts = balance.parts(sets, demands, assigned.bound)
        if assigned.balanced or bool((cuts == 1).all()):
            return tiles, feeds, assigned
        finer = tiles.split(cuts)
        finer_feeds, sets, demands = self._demands(finer, numbers, hosts)
        again = balance.assign(sets, demands, hosts)
        return (finer, finer_feeds, again) if again.busiest < assigned.busiest else (tiles, feeds, assigned)

    def _demands(
        self, tiles: Tiles, numbers: dict[str, int], hosts: I64
    ) -> tuple[list[Feed], balance.HolderSets, list[balance.Demand]]:
        index = tile_index(self._matched, tiles)
        feeds = [feed(self._matched, tiles, index, table) for table in self._matched.readers]
        sets = balance.HolderSets.of(tiles, self._matched.writer_of)
        near = np.zeros((len(sets.ranks), len(numbers)), np.bool_)
        for s, ranks in enumerate(sets.ranks):
            near[s, hosts[ranks]] = True
        return (
            feeds,
            sets,
            [self._demand(name, tiles, feeds, numbers, near[sets.of_tile]) for name in self.instances],
        )

    def _demand(
        self, instance: str, tiles: Tiles, feeds: list[Feed], numbers: dict[str, int], near: Bools
    ) -> balance.Demand:
        """Return an instance's bytes of each tile, and which host with holders wants most of them."""
        total = np.zeros(len(tiles), np.int64)
        host, most = np.full(len(tiles), -1, np.int64), np.zeros(len(tiles), np.int64)
        manifests = self._matched.reader_of[instance]
        where = np.array([numbers.get(h, -1) for h in self.reader_hosts[instance]])
        for h in np.unique(where).tolist():
            wanted = np.zeros(len(tiles), np.int64)
            for m, times in zip(*np.unique(manifests[where == h], return_counts=True), strict=True):
                found = feeds[int(m)]
                np.add.at(wanted, found.tile, found.nbytes * int(times))
            total += wanted
            if h >= 0 and len(numbers) > 1:
                better = near[:, h] & (wanted > most)
                host[better], most[better] = h, wanted[better]
        return balance.Demand(total, host)

    def _reader_hops(self, instance: str, rank: int, senders: Bools | None) -> Hops:
        """Return the hops of one reader rank, only those from some writer ranks if a mask is given."""
        number = self.instances.index(instance)
        m = int(self._matched.reader_of[instance][rank])
        table, found = self._matched.readers[m], self._feeds[m]
        src = self._sender[number][found.tile]
        if senders is not None:
            found, src = found.take(np.nonzero(senders[src])[0]), src[senders[src]]
        order = np.argsort((src - self._first_sender(instance, rank)) % self.writers, kind="stable")
        return self._columns(number, rank, table, found.take(order), src[order])

    def _first_sender(self, instance: str, rank: int) -> int:
        """Return where a reader starts: readers are spread evenly over the writers."""
        before = sum(self.ranks(name) for name in self.instances[: self.instances.index(instance)])
        readers = sum(self.ranks(name) for name in self.instances)
        return (before + rank) * self.writers // readers

    def _columns(self, number: int, rank: int, table: Table, found: Feed, src: Any) -> Hops:
        s, dst = self._sources, found.segment
        low, high = found.boxes(table, self._tiles)
        row = self._tiles.find(found.tile, self._matched.writer_of[src])
        size, dtype = high - low, table.dtype[dst]
        piece_ptr, piece = self._grid.of_boxes(found.tile, dtype, low, high)
        return Hops(
            src=src.astype(np.int32),
            dst=np.full(len(dst), rank, np.int32),
            instance=np.full(len(dst), number, np.int32),
            tensor=table.tensor[dst],
            offset=low,
            size=size,
            src_storage=s.storage[row],
            src_base=_corner(s, row, low),
            src_stride=s.stride[row],
            src_dtype=s.dtype[row],
            dst_storage=table.storage[dst],
            dst_base=_corner(table, dst, low),
            dst_stride=table.stride[dst],
            dst_dtype=dtype,
            piece_ptr=piece_ptr,
            piece=piece,
            nbytes=found.nbytes,
        )

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


def _corner(views: Sources | Table, row: Any, offset: I64) -> I64:
    """Return i64[N]: the storage element of ``offset`` i64[N, D] in the views ``row`` i64[N]."""
    return views.base[row] + ((offset - views.offset[row]) * views.stride[row]).sum(axis=1)
