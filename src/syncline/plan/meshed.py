"""What the ranks of a mesh hold, in the place of the joint table `Held`: by rule, not row by row."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from syncline.layout.hashing import mixed, weighted
from syncline.plan.columns import row_major
from syncline.plan.cover import Sources
from syncline.plan.tables import padded

if TYPE_CHECKING:
    from syncline.layout.mesh import MeshLayout
    from syncline.plan.classes import Classes
    from syncline.plan.columns import I32, I64, U8, Ints

#: Ranks of which it is remembered where their pieces begin.
_REMEMBERED = 8


class MeshHeld:
    """The rows that `Held` would have: of each tensor one a rank that holds an element of it.

    Args:
        layout: of the mesh.
        number: i32[layout's tensors], the plan's number of each, or -1.
        tensors: of the plan.
        depth: dimensions of the plan's boxes.
    """

    #: Tensors of one class have the same strides everywhere.
    strided_alike = True

    def __init__(self, layout: MeshLayout, number: I32, tensors: int, depth: int) -> None:
        self._layout, self._depth = layout, depth
        # of two names of one tensor the first one's memory is read
        self._row = np.full(tensors, -1, np.int64)
        known = np.nonzero(number >= 0)[0][::-1]
        self._row[number[known]] = known
        self._starts: OrderedDict[int, I64] = OrderedDict()

    def sums(self) -> np.ndarray:
        """Return u64[T]: a hash of what decides, besides its shape, which boxes of a tensor ranks hold."""
        held = self._row >= 0
        cut = np.where(held[:, None], self._layout.cut[self._row].astype(np.int64), -2)
        dtype = np.where(held, self._layout.whole.dtype[self._row], 0).astype(np.int64)
        return mixed(weighted([cut, dtype[:, None]], 8))

    def sources(self, classes: Classes) -> Sources:
        """Return what all ranks hold of the classes' first tensors."""
        kinds = np.nonzero(self._row[classes.first] >= 0)[0]
        row = self._row[classes.first[kinds]]
        offset, size = self._layout.boxes(np.arange(self._layout.ranks), row)
        rank, at = np.nonzero((size > 0).all(axis=2))
        order = np.lexsort((rank, at))
        rank, at = rank[order], at[order]
        return Sources(
            tensor=kinds[at].astype(np.int32),
            manifest=rank.astype(np.int32),
            dtype=self._layout.whole.dtype[row[at]],
            offset=padded(offset[rank, at], self._depth, 0),
            size=padded(size[rank, at], self._depth, 1),
            local=rank,
        )

    def located(self, like: Sources, tensor: Ints, holder: I64, low: I64) -> tuple[I32, I64, I64, U8]:
        """Return (storage, base, stride, dtype) of boxes from ``low`` on of tensors.

        Args:
            like: the classes' first tensors.
            tensor: [N], of the class that the row of ``like`` is of.
            holder: i64[N], row of ``like``.
            low: i64[N, D], the box's corner.
        """
        row = self._row[tensor]
        stride = self.strides(like, holder)
        base = ((low - like.offset.take(holder, axis=0)) * stride).sum(axis=1)
        if not self._layout.alone:
            rank = like.manifest[holder]
            for r in np.unique(rank).tolist():
                mine = np.nonzero(rank == r)[0]
                base[mine] += self.starts(r)[row[mine]]
        whole = self._layout.whole
        return whole.storage[row], base, stride, whole.dtype[row]

    def strides(self, like: Sources, holder: I64) -> I64:
        """Return i64[N, D]: strides of rows of ``like``, in elements; 0 where there is one index."""
        size = like.size.take(holder, axis=0)
        return row_major(size) * (size != 1)

    def starts(self, rank: int) -> I64:
        """Return i64: where a rank's piece of each of the layout's tensors begins, in elements."""
        found = self._starts.get(rank)
        if found is None:
            found = self._starts[rank] = self._layout.starts(rank)
            while len(self._starts) > _REMEMBERED:
                self._starts.popitem(last=False)
        return found
