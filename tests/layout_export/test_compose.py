"""Composition of traced sources with shards of live tensors, against plain enumeration of elements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import LayoutError
from syncline.layout.box import Box
from syncline.layout.export import compose, trace_export
from syncline.layout.shard import Shard
from syncline.layout.view import View

SHAPE = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def chains(draw):
    """A chain of view operations, applied to any tensor of the drawn shape."""
    shape = draw(SHAPE)
    probe, steps, flattened = torch.empty(shape), [], False
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(
            st.sampled_from(["narrow", "step", "transpose", "squeeze", "unsqueeze", "split", "flatten"])
        )
        step = _step(draw, probe, kind)
        try:
            probe = step(probe)
        except RuntimeError:  # a view that this layout does not have
            continue
        steps.append(step)
        flattened |= kind == "flatten"

    def apply(tensor):
        for step in steps:
            tensor = step(tensor)
        return tensor

    return shape, apply, flattened


def _step(draw, probe, kind):
    dim = draw(st.integers(0, max(0, probe.ndim - 1)))
    if kind == "unsqueeze" or not probe.ndim:
        return lambda t: t.unsqueeze(0)
    if kind == "squeeze":
        return lambda t: t.select(dim, 0)
    if kind == "transpose":
        return lambda t: t.transpose(0, dim)
    if kind == "split":
        n = probe.shape[dim]
        factor = draw(st.sampled_from([f for f in range(1, n + 1) if n % f == 0] or [1]))
        return lambda t: t.unflatten(dim, (factor, n // factor))
    if kind == "flatten" and dim + 1 < probe.ndim:
        return lambda t: t.view(*t.shape[:dim], t.shape[dim] * t.shape[dim + 1], *t.shape[dim + 2 :])
    low = draw(st.integers(0, probe.shape[dim] - 1))
    high = draw(st.integers(low + 1, probe.shape[dim]))
    step = draw(st.integers(1, 3)) if kind == "step" else 1
    return lambda t: t[(slice(None),) * dim + (slice(low, high, step),)]


def _grid(draw, shape):
    """A random grid of boxes over the shape, each with padded storage of its own."""
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    spans = [list(itertools.pairwise(c)) for c in cuts]
    return [
        Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*spans)
    ]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_element_once_and_in_its_place(data):
    shape, view, flattened = data.draw(chains())
    meta = torch.empty(shape, device="meta")
    source = trace_export({"live": meta}, lambda state: {"ckpt": view(state["live"])})["ckpt"]
    live = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    want = view(torch.from_numpy(live)).numpy()
    assert source.shape == want.shape
    if flattened:  # cut in the middle of a row it is no union of boxes, and may only be refused
        try:
            compose(
                source,
                {"live": [Shard("live", shape, "int64", Box.whole(shape), View.contiguous(0, 0, shape))]},
            )
        except LayoutError:
            return

    got = np.full(want.shape, -1, np.int64)
    for number, box in enumerate(_grid(data.draw, shape)):
        block = live[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))]
        storage, local = _padded(block, data.draw(st.integers(0, 3)), data.draw(st.booleans()))
        shard = Shard("live", shape, "int64", box, View.simple(number, *local))
        for piece in compose(source, {"live": [shard]}):
            assert piece.global_shape == want.shape
            assert piece.view.storage == number
            for index in np.ndindex(*piece.box.size):
                at = tuple(o + i for o, i in zip(piece.box.offset, index, strict=True))
                assert got[at] == -1
                got[at] = storage[piece.view.element(index)]
    np.testing.assert_array_equal(got, want)


def _padded(block, pad, column_major):
    """Lay a block out with an offset and padding; return the storage and (offset, sizes, strides)."""
    order = range(block.ndim) if column_major else range(block.ndim - 1, -1, -1)
    strides, step = [0] * block.ndim, 1
    for d in order:
        strides[d], step = step, step * (block.shape[d] + pad)
    storage = np.full(pad + step + 1, -7, np.int64)
    for index in np.ndindex(*block.shape):
        storage[pad + sum(i * s for i, s in zip(index, strides, strict=True))] = block[index]
    return storage, (pad, block.shape, strides)


def test_joined_parts_and_scalars_compose():
    metas = {n: torch.empty(2, 3, device="meta") for n in "ab"} | {"s": torch.empty((), device="meta")}
    traced = trace_export(metas, lambda t: {"ab": torch.cat([t["a"], t["b"].t().t()]), "s": t["s"].clone()})
    shards = {
        n: [Shard(n, (2, 3), "float32", Box((1, 0), (1, 3)), View.simple(i, 0, (1, 3), (3, 1)))]
        for i, n in enumerate("ab")
    }
    shards["s"] = [Shard("s", (), "float32", Box((), ()), View.simple(2, 5, (), ()))]
    assert [(s.box.offset, s.box.size, s.view.storage) for s in compose(traced["ab"], shards)] == [
        ((1, 0), (1, 3), 0),
        ((3, 0), (1, 3), 1),
    ]
    assert [(s.box.numel, s.view.offset) for s in compose(traced["s"], shards)] == [(1, 5)]


def test_empty_shards_hold_nothing():
    traced = trace_export({"w": torch.empty(2, 3, device="meta")}, lambda t: {"w": t["w"]})
    empty = Shard("w", (2, 3), "float32", Box((2, 0), (0, 3)), View.simple(0, 0, (0, 3), (3, 1)))
    assert compose(traced["w"], {"w": [empty]}) == []


def test_what_is_no_union_of_boxes_is_refused_by_name():
    diagonal = trace_export({"w": torch.empty(4, 4, device="meta")}, lambda t: {"diag": t["w"].diagonal()})
    whole = Shard("w", (4, 4), "float32", Box.whole((4, 4)), View.contiguous(0, 0, (4, 4)))
    with pytest.raises(LayoutError, match="no union of boxes") as caught:
        compose(diagonal["diag"], {"w": [whole]})
    assert caught.value.tensor == "diag"
    with pytest.raises(LayoutError, match="no shards"):
        compose(diagonal["diag"], {})
