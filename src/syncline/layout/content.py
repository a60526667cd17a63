"""What a storage holds, as pieces of other storages: the bookkeeping of a trace.

A storage begins as something of its own (a checkpoint tensor, the memory of a live tensor, the result of an
operation) or as nothing. Writes lay pieces over it; a later one replaces exactly the elements it covers.
Nothing here reads a tensor.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from syncline.errors import LayoutError
from syncline.layout.lattice import Axis, Map, disjoint, split

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Origin:
    """Where values come from; two origins are the same only as objects. Kinds: `syncline.layout.replay`."""

    __slots__ = ()


class _Unwritten(Origin):
    __slots__ = ()


UNWRITTEN = _Unwritten()
"""The origin of memory that was allocated and not written."""


class Piece(NamedTuple):
    """Elements of a storage (side a) that are elements of an origin (side b).

    Attributes:
        origin: where the values come from.
        map: which elements.
        cast: name of the dtype that the values were converted to on the way; None where the bits are the
            origin's own, whatever dtype they are read as.
    """

    origin: Origin
    map: Map
    cast: str | None = None


@dataclass(slots=True)
class _Cluster:
    """Pieces whose places interleave; clusters do not."""

    low: int
    high: int
    pieces: list[Piece]
    numel: int


class Content:
    """What one storage holds.

    Args:
        itemsize: bytes of the elements that the maps count.
        numel: number of elements.
        base: what it held first, element by element.
    """

    def __init__(self, itemsize: int, numel: int, base: Origin = UNWRITTEN) -> None:
        self.itemsize, self.numel, self.base = itemsize, numel, base
        self._lows: list[int] = []
        self._clusters: list[_Cluster] = []

    @property
    def written(self) -> bool:
        """Whether anything was laid over the base."""
        return bool(self._clusters)

    def read(self, view: Map) -> list[Piece]:
        """Return what a view holds, as pieces on the view's side a.

        Args:
            view: any numbering of the elements (side a), and the elements of this storage (side b).
        """
        if not self._clusters:
            return [Piece(self.base, view)]
        seen = view.flipped()
        run = seen.axes in ((), (Axis(seen.numel, 1, 1),))
        pieces: list[Piece] = []
        rest = [seen]
        for cluster in self._clusters[slice(*self._range(seen.a, seen.end))]:
            filled = run and cluster.numel == cluster.high - cluster.low
            if filled and rest and _contains(rest[-1], cluster.low, cluster.high):
                by = seen.b - seen.a
                pieces += (Piece(p.origin, p.map.shifted(by, 0), p.cast) for p in cluster.pieces)
                rest = [*rest[:-1], *_without(rest[-1], cluster.low, cluster.high)]
                continue
            for old in cluster.pieces:
                # a piece that a run contains stays whole, however the run is cut
                whole = run and seen.a <= old.map.a and old.map.end <= seen.end
                kept: list[Map] = []
                for part in rest:
                    if disjoint(part, old.map):
                        kept.append(part)
                        continue
                    hits, misses = split(part, old.map)
                    kept += misses
                    if not whole:
                        pieces += (old._replace(map=hit) for hit in hits)
                if whole:
                    pieces.append(old._replace(map=old.map.shifted(seen.b - seen.a, 0)))
                rest = kept
            rest.sort(key=lambda part: part.end)
        return [*pieces, *(Piece(self.base, part.flipped()) for part in rest)]

    def write(self, region: Map, pieces: list[Piece]) -> list[Piece]:
        """Lay pieces over a region and return what they replaced.

        Args:
            region: all elements that are written, on side a; nested.
            pieces: what they hold now, all of them.
        """
        low, high = region.a, region.end
        first, last = self._range(low, high)
        if first == last:
            self._clusters.insert(first, _Cluster(low, high, pieces, region.numel))
            self._lows.insert(first, low)
            return []
        kept: list[Piece] = []
        replaced: list[Piece] = []
        for cluster in self._clusters[first:last]:
            low, high = min(low, cluster.low), max(high, cluster.high)
            for old in cluster.pieces:
                if disjoint(old.map, region):
                    kept.append(old)
                    continue
                hits, misses = split(old.map, region)
                kept += (old._replace(map=part) for part in misses)
                if hits:
                    replaced.append(old)
        every = [*kept, *pieces]
        self._clusters[first:last] = [_Cluster(low, high, every, sum(p.map.numel for p in every))]
        self._lows[first:last] = [low]
        return replaced

    def _range(self, low: int, high: int) -> tuple[int, int]:
        """Return the range of clusters that have an element in [low, high), as far as bounds tell."""
        first = bisect_right(self._lows, low)
        if first and self._clusters[first - 1].high > low:
            first -= 1
        return first, max(first, bisect_left(self._lows, high))


def _contains(part: Map, low: int, high: int) -> bool:
    """Return whether a map is a run of neighbours that holds all of [low, high)."""
    return part.end - part.a == part.numel and part.a <= low and high <= part.end


def _without(part: Map, low: int, high: int) -> list[Map]:
    """Return a run of neighbours without those in [low, high), which lie inside it."""
    before, behind = low - part.a, part.end - high
    found = [Map.run(part.a, part.b, before)] if before else []
    return [*found, Map.run(high, part.b + high - part.a, behind)] if behind else found


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the same pieces, fewer where equal ones follow each other at equal distances.

    A loop over experts, or over the rows of an interleaved tensor, leaves one piece a turn; as one piece with
    one more axis they are what the loop meant.
    """
    current = list(pieces)
    while True:
        groups: dict[tuple[int, str | None, tuple[Axis, ...]], list[Piece]] = {}
        for piece in current:
            groups.setdefault((id(piece.origin), piece.cast, piece.map.axes), []).append(piece)
        if len(groups) == len(current):
            return current
        joined = [piece for group in groups.values() for piece in _progressions(group)]
        if len(joined) == len(current):
            return joined
        current = joined


def _progressions(group: list[Piece]) -> Iterable[Piece]:
    """Yield the runs of equal distance, in the order of the origin, each as one piece."""
    group.sort(key=lambda piece: (piece.map.b, piece.map.a))
    start = 0
    while start < len(group):
        here = group[start].map
        end, step = start + 1, (0, 0)
        while end < len(group):
            previous, following = group[end - 1].map, group[end].map
            this = (following.a - previous.a, following.b - previous.b)
            if (end > start + 1 and this != step) or min(this) <= 0:
                break
            step, end = this, end + 1
        joined = Map.of(here.a, here.b, [*here.axes, (end - start, *step)])
        if joined.nested():
            yield group[start]._replace(map=joined)
        else:
            yield from group[start:end]
        start = end


def require_nested(region: Map, tensor: str | None) -> None:
    """Refuse a written region that no order of digits describes.

    Raises:
        LayoutError: the region overlaps itself, or its strides are unrelated.
    """
    if not region.nested():
        raise LayoutError(
            "a loader writes through a view that cannot be described",
            expected="strides that nest",
            found=[axis[:2] for axis in region.axes],
            tensor=tensor,
        )
