"""What manifests hold in the plan's numbering, without copying their columns where that can be avoided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from syncline.layout.segments import strides
from syncline.plan.columns import changes, distinct, expand, lex_order

if TYPE_CHECKING:
    from syncline.layout import Manifest
    from syncline.layout.hashing import U64
    from syncline.plan.columns import I32, I64, U8, Ints


@dataclass(frozen=True, slots=True)
class Table:
    """The segments of one manifest by tensor; unmatched tensors are left out.

    Attributes:
        manifest: whose segments they are.
        label: who holds it, for messages.
        tensor: i32[M], number in the plan, ascending.
        dtype: u8[M], code of the stored dtype.
        offset, size: i64[M, D], the segment's box.
        segment: i64[M], which of the manifest's segments; None where row i is segment i.
        whole: whether every segment is a whole shard.
        single: whether no tensor has two segments.
    """

    manifest: Manifest
    label: str
    tensor: I32
    dtype: U8
    offset: I64
    size: I64
    segment: I64 | None
    whole: bool
    single: bool

    def __len__(self) -> int:
        return len(self.tensor)

    def shards(self, rows: Ints) -> I64:
        """Return i64: the rows of the manifest that segments belong to."""
        found = rows.astype(np.int64, copy=False) if self.segment is None else self.segment[rows]
        return found if self.manifest.plain else self.manifest.segments().shard[found].astype(np.int64)

    def views(self, rows: Ints | None = None) -> tuple[I32, I64, I64]:
        """Return (storage i32[N], base i64[N], stride i64[N, D]) of segments (all, if left out)."""
        if rows is None:
            if self.segment is None and self.manifest.plain:
                stride = padded(strides(self.manifest), self.offset.shape[1], 0)
                return self.manifest.storage, self.manifest.view_offset, stride
            rows = np.arange(len(self))
        found = rows.astype(np.int64, copy=False) if self.segment is None else self.segment[rows]
        m, depth = self.manifest, self.offset.shape[1]
        if m.plain:
            return m.storage[found], m.view_offset[found], padded(strides(m, found), depth, 0)
        s = m.segments()
        return s.storage[found], s.base[found], padded(s.stride.take(found, axis=0), depth, 0)

    def hashes(self) -> U64:
        """Return u64[M]: hashes of the boxes, see `Manifest.box_hashes`."""
        found = self.manifest.box_hashes
        return found if self.segment is None else found[self.segment]

    def take(self, rows: I64, tensor: I32) -> Table:
        """Return some of the rows, ascending, under other numbers."""
        segment = rows if self.segment is None else self.segment[rows]
        offset, size = self.offset.take(rows, axis=0), self.size.take(rows, axis=0)
        return Table(
            self.manifest,
            self.label,
            tensor,
            self.dtype[rows],
            offset,
            size,
            segment,
            self.whole,
            self.single,
        )

    def rows_of(self, tensors: Ints) -> tuple[I64, I64]:
        """Return (which of ``tensors``, row): all rows of some tensors."""
        low = np.searchsorted(self.tensor, tensors, side="left")
        which, place = expand(np.searchsorted(self.tensor, tensors, side="right") - low)
        return which, low[which] + place

    def first_rows(self, tensors: Ints) -> I64:
        """Return i64: the first row of each of some tensors that the table has."""
        if self.single and len(self) == int(self.tensor[-1]) + 1:
            return tensors.astype(np.int64)
        return np.searchsorted(self.tensor, tensors)

    def places(self) -> I64:
        """Return i64[M]: the number of each row within its tensor."""
        if self.single:
            return np.zeros(len(self), np.int64)
        first = np.nonzero(changes(self.tensor))[0]
        return np.arange(len(self)) - np.repeat(first, np.diff(np.append(first, len(self))))


@dataclass(frozen=True, slots=True)
class Numbered:
    """The plan's numbers of a table of names.

    Attributes:
        number: i32, -1 for names that are not synced.
        rising: whether all are synced and in the plan's order.
        same: whether they are the plan's first names.
    """

    number: I32
    rising: bool
    same: bool


def padded(rows: I64, depth: int, fill: int) -> I64:
    """Return columns widened to ``depth`` dimensions; the same array if they are that wide."""
    if rows.shape[1] == depth:
        return rows
    return np.pad(rows, ((0, 0), (0, depth - rows.shape[1])), constant_values=fill)


def table(manifest: Manifest, numbered: Numbered, label: str, depth: int) -> Table:
    """Return the segments of a manifest whose names are numbered so."""
    number = numbered.number
    source: Any = manifest
    columns = (manifest.box_offset, manifest.box_size)
    whole = True
    if not manifest.plain:
        source = manifest.segments()
        columns = (source.offset, source.size)
        whole = not bool((source.shard[1:] == source.shard[:-1]).any())
    tensor = source.tensor if numbered.same else number[source.tensor]
    offset, size = padded(columns[0], depth, 0), padded(columns[1], depth, 1)
    if numbered.rising:
        single = len(tensor) <= len(number) and manifest.plain  # every name has a row
        single = single or bool((tensor[1:] > tensor[:-1]).all())
        return Table(manifest, label, tensor, source.dtype, offset, size, None, whole, single)
    kept = np.nonzero(tensor >= 0)[0]
    synced = number[number >= 0]
    if len(distinct(synced)) < len(synced):
        kept = _once(manifest, kept, tensor, offset, size)
    else:
        kept = kept[np.argsort(tensor[kept], kind="stable")]
    single = bool((np.diff(tensor[kept]) > 0).all())
    boxes = offset.take(kept, axis=0), size.take(kept, axis=0)
    return Table(manifest, label, tensor[kept], source.dtype[kept], *boxes, kept, whole, single)


def _once(manifest: Manifest, rows: I64, tensor: I32, offset: I64, size: I64) -> I64:
    """Return the rows by tensor and box, without repetitions: aliases may name one view twice."""
    s = manifest.segments()
    keys = [tensor, offset, size, s.dtype, s.storage, s.base, s.stride]
    order = rows[lex_order(*(k[rows] for k in keys))]
    return order[changes(*(k[order] for k in keys))]
