"""The order of descriptors: the same work, in the order that memory likes best."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from syncline.transport.tables import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray


def alike_together(table: Table) -> Table:
    """Return a table of the same work in which hops that are one run come first, by length, then by source.

    The kernel copies runs of one length abreast if they follow each other; an expert's matrices, by name, do
    not. The descriptors of a hop stay together, and hops of one kind are in the order of `as_it_lies`.
    """
    if len(table) == 0:
        return table
    new = np.append([True], table.hop[1:] != table.hop[:-1])
    first = np.flatnonzero(new)[np.cumsum(new) - 1]  # of each descriptor, the first of its hop
    single = (table.rows[first] == 1) & (np.bincount(first, minlength=len(table))[first] == 1)
    order = np.lexsort((table.src_slot, np.where(single, table.nbytes[first], 0), ~single))
    return _taken(table, order)


def as_it_lies(table: Table) -> Table:
    """Return a table of the same work in the order of the storages that it reads, the same for every reader.

    Readers of one host begin together and read the same memory: in one order, what one has fetched for its
    columns of a row is still near when the other comes for its own.
    """
    return _taken(table, np.argsort(table.src_slot, kind="stable"))


def _taken(table: Table, at: NDArray[np.int64]) -> Table:
    columns: dict[str, Any] = {one.name: getattr(table, one.name) for one in fields(Table) if one.init}
    columns |= {name: value[at] for name, value in columns.items() if isinstance(value, np.ndarray)}
    return Table(**columns)


def by_source(table: Table, span: int) -> Table:
    """Return a table of the same work in the order of its source, in blocks of rows of ``span`` bytes.

    Column cuts read every row in several places at different times, half a cache line and a memory page here
    and there; read together, a row comes from memory once.
    """
    step = np.abs(table.src_stride)
    per = np.maximum(1, span // np.maximum(1, step))
    blocks = np.where(table.rows > 1, -(-table.rows // per), 1)
    at = np.repeat(np.arange(len(table)), blocks)
    skipped = (np.arange(len(at)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * per[at]
    rows = np.where(table.rows[at] > 1, np.minimum(per[at], table.rows[at] - skipped), table.rows[at])
    base = table.src_base[at] + skipped * table.src_stride[at]
    order = np.lexsort((base, table.src_slot[at]))
    at, skipped = at[order], skipped[order]
    return Table(
        src_dtype=table.src_dtype,
        wire_dtype=table.wire_dtype,
        rows=rows[order],
        elems=table.elems[at],
        nbytes=table.nbytes[at],
        itemsize=table.itemsize[at],
        hop=table.hop[at],
        position=table.position[at] + skipped * table.position_stride[at],
        position_stride=table.position_stride[at],
        src_base=base[order],
        src_stride=table.src_stride[at],
        src_slot=table.src_slot[at],
        dst_base=table.dst_base[at] + skipped * table.dst_stride[at],
        dst_stride=table.dst_stride[at],
        dst_slot=table.dst_slot[at],
        box=table.box[at],
    )
