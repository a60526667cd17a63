"""Lattices: affine maps between the elements of two flat storages, with exact intersection and difference.

A strided view is a lattice: nested steps through a storage. A copy is a pair of them, walked in step. `Map`
is that pair; `split` says which steps of one map meet the places of another, and which do not. Views of
tensors cut, transposed, flattened and interleaved in any order need nothing else. Pure integers; no tensor
is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from syncline.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

LIMIT = 1 << 20  # pieces of one operation; beyond it two lattices have nothing in common worth recording


class Axis(NamedTuple):
    """``n`` steps: each moves ``a`` elements on the one side and ``b`` on the other."""

    n: int
    a: int
    b: int


class Map(NamedTuple):
    """Elements ``a + sum(i*axis.a)`` of one storage, paired with ``b + sum(i*axis.b)`` of another.

    Attributes:
        a: first element on side a.
        b: first element on side b.
        axes: steps, no extent of 1; steps are >= 0 wherever a map came from views of tensors.
    """

    a: int
    b: int
    axes: tuple[Axis, ...] = ()

    @classmethod
    def of(cls, a: int, b: int, axes: Iterable[tuple[int, int, int]]) -> Map:
        """Return the map in normal form: largest steps of side a first, mergeable neighbours merged."""
        moving = [x for x in axes if x[0] != 1]
        if len(moving) > 1:
            moving.sort(key=_by_step, reverse=True)
            return cls(a, b, tuple(_merged(moving)))
        return cls(a, b, (Axis(*moving[0]),) if moving else ())

    @classmethod
    def between(cls, sizes: Sequence[int], a: tuple[int, Sequence[int]], b: tuple[int, Sequence[int]]) -> Map:
        """Return the map of two views of the same sizes, each given by its (offset, strides)."""
        return cls.of(a[0], b[0], zip(sizes, a[1], b[1], strict=True))

    @classmethod
    def run(cls, a: int, b: int, n: int) -> Map:
        """Return the map of ``n`` neighbours on both sides."""
        return cls(a, b, (Axis(n, 1, 1),) if n != 1 else ())

    @property
    def numel(self) -> int:
        """Number of pairs."""
        count = 1
        for axis in self.axes:
            count *= axis.n
        return count

    @property
    def end(self) -> int:
        """First element behind the highest of side a."""
        return self.a + sum((n - 1) * a for n, a, _ in self.axes) + 1

    @property
    def b_end(self) -> int:
        """First element behind the highest of side b."""
        return self.b + sum((n - 1) * b for n, _, b in self.axes) + 1

    def holds(self, place: int) -> bool:
        """Return whether an element of a nested map's side a is that one."""
        rest = place - self.a
        for n, a, _ in self.axes:
            digit = rest // a
            if not 0 <= digit < n:
                return False
            rest -= digit * a
        return rest == 0

    def flipped(self) -> Map:
        """Return the map with its sides exchanged."""
        return Map.of(self.b, self.a, ((n, b, a) for n, a, b in self.axes))

    def shifted(self, a: int, b: int) -> Map:
        """Return the map moved by ``a`` and ``b`` elements."""
        return Map(self.a + a, self.b + b, self.axes)

    def nested(self) -> bool:
        """Return whether side a is read like digits: every step larger than all inner ones together.

        Then no element of side a occurs twice, and each has one index.
        """
        reach = 0
        for n, a, _ in reversed(self.axes):
            if a <= reach:
                return False
            reach += (n - 1) * a
        return True

    def identical(self) -> bool:
        """Return whether both sides are the same elements, each paired with itself."""
        return self.a == self.b and all(a == b for _, a, b in self.axes)


def _by_step(axis: tuple[int, int, int]) -> tuple[int, int]:
    return axis[1], axis[2]


def _merged(axes: list[tuple[int, int, int]]) -> Iterator[Axis]:
    n, a, b = axes[0]
    for m, x, y in axes[1:]:
        if a == x * m and b == y * m:
            n *= m
        else:
            yield Axis(n, a, b)
            n = m
        a, b = x, y
    yield Axis(n, a, b)


def disjoint(one: Map, other: Map) -> bool:
    """Return whether sides a of two nested maps surely have no element in common; False where unknown."""
    if one.end <= other.a or other.end <= one.a:
        return True
    if not one.axes or not other.axes:
        return False
    step = max(one.axes[0].a, other.axes[0].a)
    ends = []
    for m in (one, other):
        inner = 0
        for n, a, _ in m.axes:
            if a < step:
                inner += (n - 1) * a
            elif a % step:
                return False
        low = m.a % step
        if low + inner >= step:
            return False
        ends.append((low, low + inner))
    (low, high), (other_low, other_high) = ends
    return high < other_low or other_high < low


def split(view: Map, by: Map, *, merge: bool = True) -> tuple[list[Map], list[Map]]:
    """Return what of ``view`` meets ``by`` on side a, and what does not.

    Args:
        view: any map.
        by: a nested map.
        merge: whether hits come in normal form; if not, each axis of a hit stays within one axis of ``by``.

    Returns:
        Maps from side b of ``view`` to side b of ``by``, where their sides a are the same element; and the
        rest of ``view``. Together they are all of ``view``, each pair once.

    Raises:
        LayoutError: the two are so unlike that more than `LIMIT` pieces would come out.
    """
    work = _Split(by, merge)
    work.descend(0, _State(view.a - by.a, view.a, view.b, 0, list(view.axes), []))
    return work.hits, work.misses


@dataclass(slots=True)
class _State:
    """A part of the view on its way down the levels.

    Attributes:
        rest: side a relative to ``by``, what the levels above left of it.
        a, b, c: first element of the view's side a, its side b, and ``by``'s side b.
        free: axes that no level has taken.
        done: (axis, step on ``by``'s side b) of those that were taken.
    """

    rest: int
    a: int
    b: int
    c: int
    free: list[Axis]
    done: list[tuple[Axis, int]]

    def narrowed(self, axis: Axis, low: int, n: int) -> _State:
        """Return the part with ``axis`` cut to ``n`` steps from ``low``; the axis is gone where n is 1."""
        free = [x for x in self.free if x is not axis]
        if n > 1:
            free.append(Axis(n, axis.a, axis.b))
        move = low * axis.a
        return _State(self.rest + move, self.a + move, self.b + low * axis.b, self.c, free, list(self.done))

    def blocked(self, axis: Axis, low: int, blocks: int, every: int, run: int, at: int = 0) -> _State:
        """Return ``blocks`` blocks of ``every`` steps from ``low``; of each, ``run`` steps from ``at``."""
        part = self.narrowed(axis, low + at, 1)
        if run > 1:
            part.free.append(Axis(run, axis.a, axis.b))
        if blocks > 1:
            part.free.append(Axis(blocks, axis.a * every, axis.b * every))
        return part


class _Split:
    """The levels of ``by``, largest step first, and what has been decided so far."""

    def __init__(self, by: Map, merge: bool) -> None:
        self.merge = merge
        self.levels = list(by.axes)
        if not self.levels or self.levels[-1].a != 1:
            self.levels.append(Axis(1, 1, 0))  # what is left must be nothing
        self.base = by.b
        self.hits: list[Map] = []
        self.misses: list[Map] = []
        self._count = 0

    def descend(self, level: int, state: _State) -> None:
        """Decide a part from this level down: cut it until each piece is inside or outside as a whole."""
        self._count += 1
        if self._count > LIMIT:
            raise LayoutError(
                "two views of one storage have too little in common",
                expected=f"at most {LIMIT} pieces",
                hint="the loader addresses the same tensor by unrelated strides",
            )
        if level == len(self.levels):
            axes = [(x.n, x.b, step) for x, step in state.done] + [(x.n, x.b, 0) for x in state.free]
            c = self.base + state.c
            self.hits.append(
                Map.of(state.b, c, axes) if self.merge else Map(state.b, c, tuple(map(Axis._make, axes)))
            )
            return
        step = self.levels[level].a
        parts = self._without_carry(state, step)
        if parts is None:
            self._take(level, state)
            return
        for part in parts:
            self.descend(level, part)

    def _without_carry(self, state: _State, step: int) -> list[_State] | None:
        """Cut a part so that inner steps never carry into this level's digit; None if they do not."""
        odd = next((x for x in state.free if x.a >= step and x.a % step), None)
        if odd is not None:
            return [state.narrowed(odd, i, 1) for i in range(odd.n)]
        inner = [x for x in state.free if 0 < x.a < step]
        reach = sum((x.n - 1) * x.a for x in inner)
        if state.rest % step + reach < step:
            return None
        axis = max(inner, key=lambda x: x.a)
        return list(_carried(state, axis, step, reach - (axis.n - 1) * axis.a))

    def _take(self, level: int, state: _State) -> None:
        """Match this level's digit; the part is inside, outside, or cut and looked at again."""
        step, limit, c = self.levels[level].a, self.levels[level].n, self.levels[level].b
        digit, rest = divmod(state.rest, step)
        outer = [x for x in state.free if x.a >= step]
        high = digit + sum((x.n - 1) * (x.a // step) for x in outer)
        if high < 0 or digit >= limit:
            axes = [(x.n, x.a, x.b) for x in state.free] + [(x.n, x.a, x.b) for x, _ in state.done]
            self.misses.append(Map.of(state.a, state.b, axes))
            return
        if digit < 0 or high >= limit:
            axis = max(outer, key=lambda x: x.a)
            for low, n in _ranges(axis.n, axis.a // step, digit, high, limit):
                self.descend(level, state.narrowed(axis, low, n))
            return
        state.done += [(x, x.a // step * c) for x in outer]
        state.free = [x for x in state.free if x.a < step]
        state.rest, state.c = rest, state.c + digit * c
        self.descend(level + 1, state)


def _carried(state: _State, axis: Axis, step: int, rho: int) -> Iterator[_State]:
    """Cut ``axis`` where it crosses a multiple of ``step``; ``rho`` is the reach of the axes inside it."""
    n, a = axis.n, axis.a
    if rho >= a:  # a view that overlaps itself: no two steps alike
        yield from (state.narrowed(axis, i, 1) for i in range(n))
        return
    i = 0
    while i < n:
        place = (state.rest + i * a) % step
        run = min(n - i, -((place - step) // a))  # steps that start before the next multiple
        aligned = step % a == 0 and place < a
        every = step // a
        blocks = (n - i) // every if aligned else 1
        if blocks < 2:
            blocks, every = 1, run
        crosses = place + (run - 1) * a + rho >= step  # the last of them begins before and ends behind
        if crosses:
            if run > 1:
                yield state.blocked(axis, i, blocks, every, run - 1)
            yield state.blocked(axis, i, blocks, every, 1, run - 1)
        else:
            yield state.blocked(axis, i, blocks, every, run)
        i += blocks * every


def _ranges(n: int, step: int, digit: int, high: int, limit: int) -> Iterator[tuple[int, int]]:
    """Cut ``n`` steps into (low, count) runs that are outside or inside [0, limit), and single mixed ones."""
    rho = high - digit - (n - 1) * step
    start = 0
    while start < n:
        low = digit + start * step
        if low + rho < 0:  # below
            end = -(-(-rho - digit) // step)
        elif low >= limit:
            end = n
        elif low >= 0 and low + rho < limit:  # inside
            end = (limit - 1 - rho - digit) // step + 1
        else:
            end = start + 1
        end = min(n, max(end, start + 1))
        yield start, end - start
        start = end
