"""Names by number: many manifests of one job name the same tensors, and numbers compare a column at a time.

A pool gives every name that it has seen a number. Numbers mean something only within their pool; a pool that
has seen very many names is replaced by a new one, so that a process that lives through many jobs does not
keep all their names.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncline.layout.columns import I32, I64

#: Names after which a new pool is begun.
LIMIT = 1 << 20


class NamePool:
    """Numbers names from 0, about in the order in which they are first seen; thread-safe."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._next = itertools.count()
        self.end = 0
        """Above every number given so far."""

    def __len__(self) -> int:
        return len(self._numbers)

    def numbers(self, names: Sequence[str]) -> I32:
        """Return i32: the number of each name, as a read-only array."""
        known = self._numbers
        found = np.fromiter((known.get(name, -1) for name in names), np.int32, len(names))
        for i in np.nonzero(found < 0)[0].tolist():
            # setdefault is atomic: two threads that meet a name at once agree, and one number stays unused
            found[i] = known.setdefault(names[i], next(self._next))
        self.end = max(self.end, int(found.max(initial=-1)) + 1)
        found.setflags(write=False)
        return found


class NameTable:
    """The names of a manifest, and their numbers, found once for all manifests that share the table.

    Attributes:
        names: distinct and sorted.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._numbered: tuple[NamePool, I32] | None = None

    @cached_property
    def coded(self) -> tuple[I64, I64, bytes]:
        """The names front-coded, see `front_code`."""
        return front_code(self.names)

    def numbers(self, pool: NamePool) -> I32:
        """Return i32[T]: the number of each name in a pool."""
        if self._numbered is None or self._numbered[0] is not pool:
            self._numbered = (pool, pool.numbers(self.names))
        return self._numbered[1]


_current = NamePool()


def current() -> NamePool:
    """Return the pool in which names are numbered now."""
    global _current  # noqa: PLW0603 (one pool a process is the point of it)
    if len(_current) > LIMIT:
        _current = NamePool()
    return _current


def front_code(names: Sequence[str]) -> tuple[I64, I64, bytes]:
    """Return per name (bytes shared with the one before, bytes of the rest) and the rests, joined."""
    shared, rests = np.zeros(len(names), np.int64), []
    before = b""
    for i, text in enumerate(names):
        name = text.encode()
        same = _common_prefix(before, name)
        shared[i] = same
        rests.append(name[same:])
        before = name
    return shared, np.array([len(rest) for rest in rests], np.int64), b"".join(rests)


def _common_prefix(a: bytes, b: bytes) -> int:
    if b.startswith(a):
        return len(a)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
