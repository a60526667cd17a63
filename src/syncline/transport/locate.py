"""Where a destination first differs from its source: the second pass, after a digest said that it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from syncline.errors import TransportError
from syncline.kernels.generic import tensor_at, torch_dtype
from syncline.kernels.locate import BLOCK_BYTES
from syncline.layout.dtype import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncline.plan import Hops, Plan
    from syncline.transport.tables import Table


@dataclass(frozen=True, slots=True)
class Difference:
    """One element that differs.

    Attributes:
        tensor: checkpoint name.
        index: global index in the checkpoint tensor.
        position: its flat position there.
        block: digest block it lies in: `BLOCK_BYTES` canonical bytes, numbered from the tensor's start.
        src: writer rank it came from.
    """

    tensor: str
    index: tuple[int, ...]
    position: int
    block: int
    src: int


def first_difference(plan: Plan, hops: Hops, hop: int, tables: Sequence[Table]) -> Difference | None:
    """Compare one hop's bound source and destination, cast to the wire dtype, bit by bit.

    Returns:
        The differing element of the smallest position in the checkpoint tensor, or None.
    """
    if not 0 <= hop < len(hops.tensor):
        raise TransportError("no such hop", expected=f"0..{len(hops.tensor) - 1}", found=hop)
    found = [_first_in(t, i) for t in tables for i in np.nonzero(t.hop == hop)[0].tolist()]
    positions = [p for p in found if p is not None]
    if not positions:
        return None
    position, tensor = min(positions), int(hops.tensor[hop])
    shape = tuple(int(n) for n in plan.global_shape[tensor][: int(plan.ndim[tensor])])
    index = tuple(int(i) for i in np.unravel_index(position, shape)) if shape else ()
    block = position * int(ITEMSIZE[hops.dst_dtype[hop]]) // BLOCK_BYTES
    return Difference(plan.names[tensor], index, position, block, int(hops.src[hop]))


def _first_in(table: Table, run: int) -> int | None:
    rows, elems = int(table.rows[run]), int(table.elems[run])
    if table.casts:
        source, wire = torch_dtype(table.src_dtype), torch_dtype(table.wire_dtype)
    else:  # a table of plain copies mixes dtypes: their bits are compared, as bytes
        source = wire = torch.uint8
        elems *= int(table.itemsize[run])
    src = _rows(int(table.src[run]), rows, elems, int(table.src_stride[run]), source).to(wire)
    dst = _rows(int(table.dst[run]), rows, elems, int(table.dst_stride[run]), wire)
    where = (_bits(src) != _bits(dst)).nonzero()
    if not len(where):
        return None
    elem = where[:, 1] // int(table.itemsize[run])
    return int(table.position[run]) + int((where[:, 0] * int(table.position_stride[run]) + elem).min())


def _rows(address: int, rows: int, elems: int, stride: int, dtype: torch.dtype) -> torch.Tensor:
    step = stride // dtype.itemsize if rows > 1 else elems
    return tensor_at(address, (rows - 1) * step + elems, dtype).as_strided((rows, elems), (step, 1))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
