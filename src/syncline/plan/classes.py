"""Classes of tensors: those that everybody cuts and holds alike are planned once, for one of them.

A large mixture of experts has tens of thousands of tensors and a few hundred classes. Two tensors are of one
class if they have one shape and every manifest holds the same boxes of both, in the same dtypes; where the
boxes lie in memory does not count. Classes are found by comparing sums of hashes, one a tensor; what a rank
moves is compared with its class once more, box by box (see `Plan`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from syncline.layout.hashing import constants, mixed, weighted
from syncline.plan.columns import changes, pointers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncline.layout.hashing import U64
    from syncline.plan.columns import I32, I64, U8
    from syncline.plan.joint import Held
    from syncline.plan.meshed import MeshHeld
    from syncline.plan.tables import Table


@dataclass(frozen=True, slots=True)
class Classes:
    """C classes of T tensors.

    Attributes:
        of: i32[T], the class of each tensor; classes are numbered by their first tensors.
        place: i32[T], number of each tensor within its class.
        first: i64[C], the first tensor of each class.
        ptr: i64[C + 1]; members: i32[T]: the tensors of class c are ``members[ptr[c]:ptr[c + 1]]``.
    """

    of: I32
    place: I32
    first: I64
    ptr: I64
    members: I32

    @property
    def sizes(self) -> I64:
        """i64[C], tensors of each class."""
        return np.diff(self.ptr)

    @classmethod
    def by_key(cls, key: U64) -> Classes:
        """Return the classes of equal keys u64[T]."""
        order = np.argsort(key)
        start = np.nonzero(changes(key[order]))[0]
        first = np.minimum.reduceat(order, start) if len(order) else order
        rank = np.empty(len(start), np.int64)
        rank[np.argsort(first)] = np.arange(len(start))
        of = np.empty(len(key), np.int32)
        of[order] = np.repeat(rank, np.diff(np.append(start, len(order))))
        members = np.argsort(of.astype(np.int16) if len(start) < 1 << 15 else of, kind="stable")
        ptr = pointers(np.bincount(of, minlength=len(start)))
        place = np.empty(len(key), np.int32)
        place[members] = np.arange(len(key)) - np.repeat(ptr[:-1], np.diff(ptr))
        return cls(of, place, np.sort(first), ptr, members.astype(np.int32))

    def reduce(self, table: Table) -> Table:
        """Return the rows of the classes' first tensors, numbered by class."""
        number, rows = table.rows_of(self.first)
        return table.take(rows, number.astype(np.int32))


def classify(held: Held | MeshHeld, readers: Sequence[Table], shape: I64, ndim: U8) -> Classes:
    """Return the classes of all tensors; ``shape`` i64[T, D] and ``ndim`` u8[T] are the plan's.

    With the rows of a mesh, tensors of a class also have the same strides at every reader.
    """
    total = mixed(weighted([shape, ndim.astype(np.int64)[:, None]], 1))
    total += held.sums()
    for table, factor in zip(readers, constants(0, len(readers), 6), strict=True):
        hashes = table.hashes()
        if held.strided_alike:
            hashes = mixed(weighted([table.views()[2]], 7) + hashes)
        hashes = hashes * factor
        if table.single and len(table) == len(total):
            total += hashes
        elif table.single:
            total[table.tensor] += hashes
        else:
            hashes += mixed(table.places().view(np.uint64) + hashes)
            np.add.at(total, table.tensor, hashes)
    return Classes.by_key(mixed(total))
