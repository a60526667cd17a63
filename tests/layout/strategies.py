"""Random but valid shards: nested views of any stride, several names, boxes cut on a grid."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from syncline.layout import Box, Shard, View
from syncline.layout.dtype import itemsize

NAMES = ("a", "b.weight", "layers.10.w", "layers.2.w", "layers.2.wé", "lm_head")
DTYPES = ("float32", "bfloat16", "uint8", "float64")


@st.composite
def nests(draw: st.DrawFn, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A nest of 1..3 extents that multiply to ``size``."""
    extents = [size]
    for _ in range(draw(st.integers(0, 2))):
        last = extents.pop()
        choices = [d for d in range(1, last + 1) if last % d == 0] or [1]
        d = draw(st.sampled_from(choices))
        extents += [d, last // d]
    # strides that merge with their neighbour now and then
    strides = [draw(st.sampled_from((0, 1, 2, 3, 6, -2)))]
    for extent in reversed(extents[1:]):
        strides.append(strides[-1] * extent if draw(st.booleans()) else draw(st.integers(-3, 8)))
    return tuple(extents), tuple(reversed(strides))


@st.composite
def shard_of(draw: st.DrawFn, name: str, shape: tuple[int, ...], box: Box, storages: int) -> Shard:
    drawn = [draw(nests(n)) for n in box.size]
    flat = View(0, 0, tuple(e for e, _ in drawn), tuple(s for _, s in drawn))
    offset = draw(st.integers(0, 5)) - flat.bounds()[0]
    view = View(draw(st.integers(0, storages - 1)), offset, flat.shape, flat.stride)
    chain = draw(st.sampled_from(((), (), ("cast:float32->bfloat16",), ("t", "cast:float32->bfloat16"))))
    return Shard(name, shape, draw(st.sampled_from(DTYPES)), box, view, chain)


@st.composite
def shard_lists(draw: st.DrawFn) -> tuple[list[Shard], list[int]]:
    """(shards in any order, sizes of the storages): every name cut on a grid, some cells held."""
    storages = draw(st.integers(1, 3))
    shards: list[Shard] = []
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4)):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        cuts = [sorted({0, n, draw(st.integers(0, n))}) for n in shape]
        cells = list(itertools.product(*(itertools.pairwise(c) for c in cuts)))
        held = draw(st.lists(st.sampled_from(cells), unique=True, max_size=3)) if cells else []
        boxes = [Box(tuple(a for a, _ in c), tuple(b - a for a, b in c)) for c in held]
        shards += [draw(shard_of(name, shape, box, storages)) for box in boxes]
    sizes = [0] * storages
    for s in shards:
        if s.box.numel:
            end = s.view.bounds()[1] * itemsize(s.dtype)
            sizes[s.view.storage] = max(sizes[s.view.storage], end)
    return draw(st.permutations(shards)), sizes
