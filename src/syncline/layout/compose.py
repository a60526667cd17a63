"""Composition: checkpoint tensors that are views of live tensors, cut down to the boxes that a rank holds.

A live tensor may be fused (all experts of a layer) and sharded (over FSDP or tensor-parallel ranks) at once.
Where a traced checkpoint tensor lies in the full live tensor, and which boxes of that a rank holds, together
say which boxes of the checkpoint tensor it holds, and where in its storage.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncline.errors import LayoutError
from syncline.layout.box import Box
from syncline.layout.shard import Shard
from syncline.layout.view import View, row_major

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a checkpoint tensor that is one strided view of one live tensor.

    Attributes:
        live: the live tensor's name.
        offset: element offset in the contiguous full live tensor of the box's first element.
        box: where in the checkpoint tensor.
        stride: in elements of the contiguous full live tensor, one for each dimension of the box.
    """

    live: str
    offset: int
    box: Box
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Where the elements of one checkpoint tensor live.

    Attributes:
        name: the checkpoint name.
        shape: the checkpoint tensor's shape.
        dtype: torch's name of its dtype, that of the live tensors.
        parts: disjoint, covering the whole tensor; nearly always one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class _Axis:
    """One factor of a checkpoint dimension: ``extent`` steps of ``step`` along live dimension ``live``."""

    extent: int
    live: int
    step: int


def compose(source: Source, live_shards: Mapping[str, Sequence[Shard]]) -> list[Shard]:
    """Return the shards of a checkpoint tensor that one rank holds.

    Args:
        source: where the checkpoint tensor's elements are in full live tensors.
        live_shards: by live name, the boxes of the full live tensor that this rank holds, with views into its
            storages (an FSDP or TP shard). One stride for each dimension.

    Raises:
        LayoutError: the live tensor is missing or of another shape than traced, or the checkpoint tensor
            is not made of boxes of it.
    """
    found: list[Shard] = []
    for part in source.parts:
        if part.live not in live_shards:
            raise LayoutError("a traced live tensor has no shards", expected=part.live, tensor=source.name)
        for shard in live_shards[part.live]:
            found += _compose(source, part, shard)
    return found


def _compose(source: Source, part: Part, shard: Shard) -> Iterator[Shard]:
    if shard.box.numel == 0 or part.box.numel == 0:
        return
    if _is_identity(source, part, shard):
        yield Shard(source.name, source.shape, shard.dtype, shard.box, shard.view, shard.transforms)
        return
    axes = _factor(source.name, part, shard.global_shape)
    start = _unravel(part.offset, shard.global_shape)
    flat = list(itertools.chain.from_iterable(axes))
    owner = [d for d, nest in enumerate(axes) for _ in nest]
    strides = _strides(source.name, shard)
    for ranges in _intersect(flat, start, shard.box):
        first = list(start)
        for axis, (low, _) in zip(flat, ranges, strict=True):
            first[axis.live] += low * axis.step
        base = shard.view.offset + sum(
            (c - lo) * s for c, lo, s in zip(first, shard.box.offset, strides, strict=True)
        )
        yield from _boxes(source, part, shard, base, flat, owner, ranges, strides)


def _is_identity(source: Source, part: Part, shard: Shard) -> bool:
    return (
        part.offset == 0
        and part.box.size == source.shape == shard.global_shape
        and part.stride == row_major(source.shape)
    )


def _unravel(offset: int, shape: Sequence[int]) -> list[int]:
    coordinates = []
    for n in reversed(shape):
        offset, c = divmod(offset, n)
        coordinates.append(c)
    return coordinates[::-1]


def _strides(name: str, shard: Shard) -> list[int]:
    """Return one stride for each live dimension of the shard's view."""
    strides: list[int] = []
    for extents, nest in zip(shard.view.shape, shard.view.stride, strict=True):
        moving = [s for n, s in zip(extents, nest, strict=True) if n > 1]
        if len(moving) > 1:
            raise LayoutError(
                "a live shard with nested strides cannot be composed", found=shard.view, tensor=name
            )
        strides.append(moving[0] if moving else 0)
    return strides


def _factor(name: str, part: Part, shape: Sequence[int]) -> list[list[_Axis]]:
    """Return, for each dimension of the part, its factors along live dimensions, outermost first."""
    weights = row_major(shape)
    start = _unravel(part.offset, shape)
    axes = [
        _factor_one(name, n, s, shape, weights, start)
        for n, s in zip(part.box.size, part.stride, strict=True)
    ]
    reach = list(start)
    for axis in itertools.chain.from_iterable(axes):
        reach[axis.live] += (axis.extent - 1) * axis.step
    if any(last >= n for last, n in zip(reach, shape, strict=True)):
        raise _not_boxes(name, part)
    return axes


def _factor_one(
    name: str, extent: int, stride: int, shape: Sequence[int], weights: Sequence[int], start: Sequence[int]
) -> list[_Axis]:
    axes: list[_Axis] = []
    while extent > 1:
        live = next((k for k, w in enumerate(weights) if shape[k] > 1 and 0 < w <= stride), None)
        if live is None or stride % weights[live]:
            raise _not_boxes(name, (extent, stride))
        step = stride // weights[live]
        if extent <= -(-(shape[live] - start[live]) // step):
            axes.append(_Axis(extent, live, step))
            break
        # runs over the end of this live dimension into the next outer one: a flattened pair
        inner, odd = divmod(shape[live], step)
        if odd or start[live] >= step or extent % inner:
            raise _not_boxes(name, (extent, stride))
        axes.append(_Axis(inner, live, step))
        extent, stride = extent // inner, shape[live] * weights[live]
    return axes[::-1]


def _not_boxes(name: str, found: object) -> LayoutError:
    return LayoutError(
        "a checkpoint tensor is no union of boxes of a live tensor",
        expected="strides along the live tensor's dimensions",
        found=found,
        tensor=name,
    )


Ranges = tuple[tuple[int, int], ...]


def _intersect(flat: Sequence[_Axis], start: Sequence[int], box: Box) -> Iterator[Ranges]:
    """Yield for each axis a half-open range of steps, so that together they are the steps inside ``box``."""
    by_live: list[list[int]] = [[] for _ in start]
    for index, axis in enumerate(flat):
        by_live[axis.live].append(index)
    choices = []
    for live, members in enumerate(by_live):
        low, high = box.offset[live], box.offset[live] + box.size[live]
        members.sort(key=lambda index: -flat[index].step)
        choices.append(list(_along(flat, members, start[live], low, high)))
    for chosen in itertools.product(*choices):
        ranges = [(0, 1)] * len(flat)
        for live, picked in enumerate(chosen):
            for index, span in zip(by_live[live], picked, strict=True):
                ranges[index] = span
        yield tuple(ranges)


def _along(
    flat: Sequence[_Axis], members: Sequence[int], start: int, low: int, high: int
) -> Iterator[Ranges]:
    """Yield ranges of the axes ``members`` (largest step first) whose positions lie in [low, high)."""
    if not members:
        if low <= start < high:
            yield ()
        return
    axis, rest = flat[members[0]], members[1:]
    if not rest:
        first, last = max(0, -((start - low) // axis.step)), min(axis.extent, -((start - high) // axis.step))
        if first < last:
            yield ((first, last),)
        return
    span = sum((flat[index].extent - 1) * flat[index].step for index in members)
    if low <= start and start + span < high:
        yield tuple((0, flat[index].extent) for index in members)
        return
    for step in range(axis.extent):
        for picked in _along(flat, rest, start + step * axis.step, low, high):
            yield ((step, step + 1), *picked)


def _boxes(
    source: Source,
    part: Part,
    shard: Shard,
    base: int,
    flat: Sequence[_Axis],
    owner: Sequence[int],
    ranges: Ranges,
    strides: Sequence[int],
) -> Iterator[Shard]:
    """Yield the boxes of a product of ranges: one, unless a flattened dimension is cut inside."""
    per_dim = []
    for dim in range(len(source.shape)):
        mine = [i for i, d in enumerate(owner) if d == dim]
        nest = [(flat[i], ranges[i], strides[flat[i].live] * flat[i].step) for i in mine]
        per_dim.append(list(_runs(nest)))
    for chosen in itertools.product(*per_dim):
        offset = tuple(o + run.offset for o, run in zip(part.box.offset, chosen, strict=True))
        box = Box(offset, tuple(math.prod(run.extents) for run in chosen))
        view = View(
            shard.view.storage,
            base + sum(run.shift for run in chosen),
            tuple(run.extents for run in chosen),
            tuple(run.strides for run in chosen),
        )
        yield Shard(source.name, source.shape, shard.dtype, box, view, shard.transforms)


@dataclass(frozen=True, slots=True)
class _Run:
    """A contiguous range of one checkpoint dimension and its nest of storage strides."""

    offset: int
    shift: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]


def _runs(nest: Sequence[tuple[_Axis, tuple[int, int], int]]) -> Iterator[_Run]:
    """Split a product of ranges over a dimension's factors into contiguous runs of the whole dimension."""
    full = len(nest)
    while full and nest[full - 1][1] == (0, nest[full - 1][0].extent):
        full -= 1
    cut = max(0, full - 1)  # factors from `cut` on form one run; those before it are enumerated
    sizes = [axis.extent for axis, _, _ in nest]
    outer = [range(high - low) for _, (low, high), _ in nest[:cut]]
    tail = nest[cut:]
    extents = tuple(high - low for _, (low, high), _ in tail) or (1,)
    strides = tuple(stride for _, _, stride in tail) or (1,)
    for steps in itertools.product(*outer):
        offset, shift = 0, 0
        for i, (_, (low, _), stride) in enumerate(nest):
            step = steps[i] if i < cut else 0
            offset = offset * sizes[i] + low + step
            shift += step * stride
        yield _Run(offset, shift, extents, strides)
