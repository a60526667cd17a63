"""Where two sides of a copy differ: what the second pass after a digest mismatch reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from syncline.kernels import host
from syncline.kernels.constants import BLOCK_WORDS
from syncline.kernels.reference import memory_at

if TYPE_CHECKING:
    from syncline.kernels.table import Table

BLOCK_BYTES = 4 * BLOCK_WORDS


@dataclass(frozen=True, slots=True)
class Difference:
    """The first differing element of a table.

    Attributes:
        run: index of the run in the table.
        row: row within the run.
        elem: element within the row.
        position: canonical flat position of the element in its checkpoint tensor.
        block: the digest block it lies in: ``BLOCK_BYTES`` canonical bytes, numbered from the tensor's start.
        expected: the element's bytes on the source side, in hexadecimal, lowest address first.
        found: those on the destination side.
    """

    run: int
    row: int
    elem: int
    position: int
    block: int
    expected: str
    found: str


def first_difference(table: Table, start: int = 0, stop: int | None = None) -> Difference | None:
    """Compare source and destination of a table without casts; both must be mapped in this process."""
    sizes = table.itemsize.astype(np.int64)
    sides = (table.dst, table.src, table.rows, table.elems * sizes, table.dst_stride, table.src_stride)
    hit = host.first_difference(*sides, start, stop)
    if hit is None:
        return None
    run, row, byte = hit
    size = int(sizes[run])
    elem = byte // size
    position = int(table.pos[run]) + row * int(table.pos_stride[run]) + elem
    addresses = (
        int(base[run]) + row * int(stride[run]) + elem * size
        for base, stride in ((table.src, table.src_stride), (table.dst, table.dst_stride))
    )
    expected, found = (memory_at(address, size).tobytes().hex() for address in addresses)
    return Difference(run, row, elem, position, position * size // BLOCK_BYTES, expected, found)
