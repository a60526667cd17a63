"""Where the bytes of an update land: in kernels' own memory, or in a staging arena for one stage at a time.

Tensors that are received together form a group: those of layers that share one, and what one replay writes.
Groups are packed into stages; the arena has the size of the largest group, or more where stages cost time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from syncline.layout.dtype import itemsize
from syncline.store.adapter import Stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncline.layout.replay import Replay
    from syncline.layout.written import LoaderTrace

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """A piece of the arena.

    Attributes:
        storage: number in the manifest.
        offset: bytes from the arena's start.
        nbytes: its size.
        shape, stride: of the tensor in it, in elements.
        dtype: torch's name of its dtype.
    """

    storage: int
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    def tensor(self, arena: torch.Tensor) -> torch.Tensor:
        """Return the tensor that lies in the arena's slot."""
        flat = arena[self.offset : self.offset + self.nbytes].view(getattr(torch, self.dtype))
        return flat.as_strided(self.shape, self.stride)


@dataclass(slots=True)
class Group:
    """What is received, and put in, together.

    Attributes:
        layers: names of the layers that are put in from it.
        live: staged live tensors, by the trace's name -> slot.
        replays: run before the layers are put in.
        inputs: replays' inputs, by checkpoint name -> slot.
    """

    layers: tuple[str, ...]
    live: dict[str, Slot] = field(default_factory=dict)
    replays: tuple[Replay, ...] = ()
    inputs: dict[str, Slot] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """All of an update's destinations in one process.

    Attributes:
        direct: live name (the trace's) -> storage, for tensors written in place.
        groups: by stage, after the direct one if there is one.
        stages: for the store.
        storage_nbytes: by storage.
        arena_nbytes: size of the staging arena.
    """

    direct: Mapping[str, int]
    groups: tuple[tuple[Group, ...], ...]
    stages: tuple[Stage, ...]
    storage_nbytes: tuple[int, ...]
    arena_nbytes: int

    def slots(self) -> dict[int, Slot]:
        """Return the arena's slots by storage."""
        listed = (s for stage in self.groups for g in stage for s in (*g.live.values(), *g.inputs.values()))
        return {slot.storage: slot for slot in listed}


def make_plan(trace: LoaderTrace, staged: Mapping[str, Sequence[str]], *, room: int = 0) -> Plan:
    """Lay out an update.

    Args:
        trace: of the engine's loader.
        staged: live names (the trace's) that go through staging -> layers that are put in from them. All
            other live tensors are written in place.
        room: bytes that the arena may have, if that makes fewer stages; it always holds the largest group.
    """
    filled = [name for name in trace.live if name in trace.writes]
    sizes: list[int] = []
    direct: dict[str, int] = {}
    for name in filled:
        if name not in staged:
            direct[name] = len(sizes)
            sizes.append(_nbytes(trace, name))
    packed: list[list[Group]] = []
    filled_up, arena, total = 0, 0, 0
    built = []
    for names, replays in _components(trace, staged):
        base = len(sizes)
        group, used = _group(trace, names, replays, staged, sizes)
        built.append((group, used, base))
        arena, total = max(arena, used), total + used
    arena = max(arena, min(room, total))
    for group, used, _ in built:
        if not packed or filled_up + used > arena:
            packed.append([])
            filled_up = 0
        packed[-1].append(_moved(group, filled_up))
        filled_up += used
    stages = [Stage("direct", tuple(direct.values()))] if direct else []
    for groups in packed:
        storages = tuple(s.storage for g in groups for s in (*g.live.values(), *g.inputs.values()))
        stages.append(Stage(_title(groups), storages))
    return Plan(direct, tuple(map(tuple, packed)), tuple(stages), tuple(sizes), arena)


def _title(groups: Sequence[Group]) -> str:
    names = [layer for group in groups for layer in group.layers]
    names = names or [name for group in groups for replay in group.replays for name in replay.live]
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def _nbytes(trace: LoaderTrace, name: str) -> int:
    spec = trace.live[name]
    if 0 in spec.shape:
        return 0
    span = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
    return span * itemsize(spec.dtype)


def _components(
    trace: LoaderTrace, staged: Mapping[str, Sequence[str]]
) -> Iterable[tuple[list[str], list[Replay]]]:
    """Yield staged names and replays that hang together through layers and replays, in the trace's order."""
    parent: dict[object, object] = {}

    def root(key: object) -> object:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    for name, layers in staged.items():
        for layer in layers:
            parent[root(("layer", layer))] = root(name)
    for number, replay in enumerate(trace.replays):
        for name in replay.live:
            parent[root(("replay", number))] = root(name)
    found: dict[object, tuple[list[str], list[Replay]]] = {}
    for name in trace.live:
        if name in staged:
            found.setdefault(root(name), ([], []))[0].append(name)
    for number, replay in enumerate(trace.replays):
        found.setdefault(root(("replay", number)), ([], []))[1].append(replay)
    return found.values()


def _group(
    trace: LoaderTrace,
    names: Sequence[str],
    replays: Sequence[Replay],
    staged: Mapping[str, Sequence[str]],
    sizes: list[int],
) -> tuple[Group, int]:
    """Return a group laid out from byte 0, and its size; its storages are appended to ``sizes``."""
    used = 0
    group = Group(
        tuple(dict.fromkeys(layer for name in names for layer in staged[name])), replays=tuple(replays)
    )

    def slot(nbytes: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: str) -> Slot:
        nonlocal used
        made = Slot(len(sizes), used, nbytes, shape, stride, dtype)
        sizes.append(nbytes)
        used += -(-nbytes // _ALIGN) * _ALIGN
        return made

    for name in names:
        spec = trace.live[name]
        group.live[name] = slot(_nbytes(trace, name), spec.shape, spec.stride, spec.dtype)
    for replay in replays:
        for name in replay.inputs:
            if name not in group.inputs:
                size, kind = _input_size(replays, name)
                nbytes = torch.Size(size).numel() * itemsize(kind)
                stride = torch.empty(size, device="meta").stride()
                group.inputs[name] = slot(nbytes, size, stride, kind)
    return group, used


def _input_size(replays: Sequence[Replay], name: str) -> tuple[tuple[int, ...], str]:
    """Return the shape that serves all replays of a group: the box of the only reader, or the whole."""
    readers = [replay for replay in replays if name in replay.inputs]
    if len(readers) == 1:
        return readers[0].boxes[name].size, readers[0].dtypes[name]
    return readers[0].shapes[name], readers[0].dtypes[name]


def _moved(group: Group, by: int) -> Group:
    def move(slots: Mapping[str, Slot]) -> dict[str, Slot]:
        return {
            n: Slot(s.storage, s.offset + by, s.nbytes, s.shape, s.stride, s.dtype) for n, s in slots.items()
        }

    return Group(group.layers, move(group.live), group.replays, move(group.inputs))
