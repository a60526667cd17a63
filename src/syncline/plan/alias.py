"""Destination bytes: no byte of a reader's storages may be written twice.

Most views of one storage are apart as byte ranges, which a sort shows. Views that interleave (fused columns,
rows of two operands in turn) are compared in the mixed radix of their common strides, where each is a box;
what does not fit a radix is written out run by run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from syncline.errors import CoverageError, PlanError
from syncline.layout.dtype import ITEMSIZE
from syncline.layout.overlap import nested, spans
from syncline.plan.columns import Line, changes, expand, group_sets, overlaps, pointers
from syncline.plan.lower import Stream, lower

if TYPE_CHECKING:
    from syncline.plan.columns import I64, Ints
    from syncline.plan.match import Matched
    from syncline.plan.tables import Table

#: Most runs that are written out to compare views that fit no common radix.
MAX_RUNS = 1 << 24


def check_destinations(matched: Matched, table: Table) -> None:
    """Check that a reader's segments write every byte at most once.

    Raises:
        CoverageError: a destination of stride 0, or two destinations (or one with itself) that share bytes.
        PlanError: views too irregular and too large to compare.
    """
    suspects = table.manifest.tangled
    if not len(suspects):
        return
    rows = suspects if table.segment is None else np.nonzero(np.isin(table.segment, suspects))[0]
    if len(rows):
        _check(matched, table, rows)


def _check(matched: Matched, table: Table, rows: I64) -> None:
    """Check some segments against each other."""
    storage, base, stride = table.views(rows)
    size, item = table.size.take(rows, axis=0), ITEMSIZE[table.dtype[rows]]
    frozen = ((size > 1) & (stride == 0)).any(axis=1)
    if frozen.any():
        at = int(np.argmax(frozen))
        raise CoverageError(
            "a destination whose elements share memory (stride 0)",
            tensor=matched.names[int(table.tensor[rows[at]])],
            rank=table.label,
            expected="an own place for every element",
            found=f"strides {stride[at].tolist()} for sizes {size[at].tolist()}",
            hint="make the parameter contiguous before it is registered",
        )
    step = np.where(size > 1, np.abs(stride) * item[:, None], 0)
    low, high = spans(size, base, stride, item)
    cluster = _clusters(storage, low, high)
    kept = np.nonzero((np.bincount(cluster)[cluster] > 1) | ~nested(size, step, item))[0]
    if len(kept):
        clash = _clash(cluster[kept], low[kept], size[kept], step[kept], item[kept])
        if clash:
            i, j = (int(kept[k]) for k in clash)
            names = [matched.names[int(table.tensor[rows[k]])] for k in (i, j)]
            raise _shared(names, [int(base[i]), int(base[j])], int(storage[i]), table.label)


def _clusters(storage: Ints, low: I64, high: I64) -> I64:
    """Return i64[N]: numbers of the connected byte ranges; only rows of one number can share a byte."""
    extents = np.zeros(int(storage.max()) + 1, np.int64)
    np.maximum.at(extents, storage, high)
    line = Line.of(extents)
    start, stop = line.at(storage, low), line.at(storage, high)
    order = np.argsort(start, kind="stable")
    reach = np.maximum.accumulate(stop[order])
    apart = np.ones(len(order), np.bool_)
    apart[1:] = start[order][1:] >= reach[:-1]
    cluster = np.empty(len(order), np.int64)
    cluster[order] = np.cumsum(apart) - 1
    return cluster


def _clash(cluster: I64, low: I64, size: I64, step: I64, item: I64) -> tuple[int, int] | None:
    """Return two rows that share a byte (the same one twice, if it meets itself), or None."""
    rows, dims = size.shape
    flat = np.concatenate([step.ravel(), np.ones(rows, np.int64)])
    owner = np.concatenate([np.repeat(cluster, dims), cluster])
    pair = np.unique(np.stack([owner, flat], axis=1)[flat > 0], axis=0)
    first = np.nonzero(changes(pair[:, 0]))[0]
    present = pair[first, 0]
    _, level = np.unique(pair[:, 1], return_inverse=True)
    kind, sample = group_sets(np.append(first, len(pair)), level)
    kind_of_row = kind[np.searchsorted(present, cluster)]
    for k, at in enumerate(sample.tolist()):
        mine = np.nonzero(kind_of_row == k)[0]
        radix = pair[pair[:, 0] == present[at], 1][::-1]
        boxes = _digits(radix, low[mine], size[mine], step[mine], item[mine])
        if boxes is None:
            found = _clash_of_runs(low[mine], size[mine], step[mine], item[mine], cluster[mine])
        else:
            one, other = overlaps(np.unique(cluster[mine], return_inverse=True)[1], *boxes)
            found = (int(one[0]), int(other[0])) if len(one) else None
        if found:
            return int(mine[found[0]]), int(mine[found[1]])
    return None


def _digits(radix: I64, low: I64, size: I64, step: I64, item: I64) -> tuple[I64, I64] | None:
    """Return (offset, size) i64[N, K]: byte views as boxes over the digits of ``radix`` (falling to 1)."""
    if (radix[:-1] % radix[1:]).any():
        return None
    rows = np.arange(len(low))
    offset = np.empty((len(low), len(radix)), np.int64)
    count = np.ones_like(offset)
    rest = low
    for k, weight in enumerate(radix.tolist()):
        offset[:, k], rest = rest // weight, rest % weight
    for d in range(size.shape[1]):
        wide = np.nonzero(size[:, d] > 1)[0]
        level = np.searchsorted(-radix, -step[wide, d])
        if (count[wide, level] > 1).any():
            return None
        count[wide, level] = size[wide, d]
    last = len(radix) - 1
    if ((item > 1) & (count[:, last] > 1)).any():
        return None
    count[rows, last] = np.where(item > 1, item, count[:, last])
    room = radix[:-1] // radix[1:]
    fits = offset[:, 1:] + count[:, 1:] <= room
    return (offset, count) if bool(fits.all()) else None


def _clash_of_runs(low: I64, size: I64, step: I64, item: I64, cluster: I64) -> tuple[int, int] | None:
    runs = lower(size, [Stream(low, step, item)])
    if int(runs.rows.sum()) > MAX_RUNS:
        raise PlanError(
            "destination views too irregular to check for shared bytes",
            expected=f"at most {MAX_RUNS} runs",
            found=int(runs.rows.sum()),
        )
    run, place = expand(runs.rows)
    start = runs.base[0][run] + place * runs.stride[0][run]
    owner = runs.hop[run]
    order = np.lexsort((start, cluster[owner]))
    start, owner = start[order], owner[order]
    stop = start + runs.row_elems[run][order] * item[owner]
    ptr = pointers(np.bincount(cluster[owner]))
    line = Line.of(np.maximum.reduceat(stop, ptr[:-1][np.diff(ptr) > 0]))
    group = np.cumsum(changes(cluster[owner])) - 1
    meets = line.at(group[1:], start[1:]) < np.maximum.accumulate(line.at(group, stop))[:-1]
    if not meets.any():
        return None
    at = int(np.argmax(meets)) + 1
    before = np.nonzero((group[:at] == group[at]) & (stop[:at] > start[at]))[0]
    return int(owner[before[0]]), int(owner[at])


def _shared(names: list[str], bases: list[int], storage: int, label: str) -> CoverageError:
    places = [f"{name} at element {base}" for name, base in zip(names, bases, strict=True)]
    return CoverageError(
        "a destination byte that would be written twice",
        tensor=names[1],
        rank=label,
        expected="an own place for every element, or one source for both names",
        found=f"{places[0]} and {places[1]} share bytes of storage {storage}",
        hint="tied tensors need an alias: Rules(aliases={name: canonical name})",
    )
