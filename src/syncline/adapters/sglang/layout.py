"""From what a twin taught to one rank's layout: which checkpoint boxes lie where in its live memory.

Every live tensor is explained here, or named in an error: written directly, staged and put through the
engine, derived by the engine's hook, or local.
"""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from syncline.adapters.sglang.postload import Processed, inspect
from syncline.adapters.sglang.staging import Group, Lot, layer_of, process
from syncline.adapters.sglang.tensors import Geometry, Slot, slots
from syncline.errors import AdapterError
from syncline.layout.manifest import Manifest
from syncline.store.adapter import Stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from syncline.adapters.sglang.staging import Arena
    from syncline.adapters.sglang.twin import Learned
    from syncline.layout.box import Box
    from syncline.layout.replay import Replay
    from syncline.layout.shard import Shard

Pin = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(slots=True)
class Plot:
    """One rank's layout.

    Attributes:
        manifest: in checkpoint names; direct storages first, then those of the stages.
        stages: direct, then one a layer; empty if everything is direct.
        groups: the staged ones, in order.
        forms: of every live tensor by name, as a load needs it.
        holes: by live name, boxes that no checkpoint tensor fills.
        names: by live name, the checkpoint names whose elements it holds.
        derived: live names that the engine's hook recomputes.
        local: live names that are neither.
        replayed: live names of which the loader computes elements.
        constants: what the loader writes whatever the checkpoint holds; it is written with every update.
    """

    manifest: Manifest
    stages: tuple[Stage, ...]
    groups: list[Group]
    forms: Mapping[str, Geometry]
    holes: Mapping[str, Sequence[Box]]
    names: Mapping[str, tuple[str, ...]]
    derived: frozenset[str]
    local: frozenset[str]
    replayed: frozenset[str]
    constants: tuple[Replay, ...]
    _live: Mapping[str, Slot]
    _direct: list[torch.UntypedStorage]
    _pins: dict[str, Pin]
    _who: str

    def counts(self) -> dict[str, int]:
        """Return how many live tensors are of which kind, and how many stages there are."""
        return {
            "tensors": len(self.names) + len(self.derived) + len(self.local),
            "traced": len(self.names.keys() - self.replayed),
            "replayed": len(self.replayed),
            "derived": len(self.derived),
            "local": len(self.local),
            "staged": sum(len(group.live) for group in self.groups),
            "stages": len(self.stages),
        }

    def addresses(self, arena: int) -> list[int]:
        """Return the address of each storage of the manifest; the stages' lie in the arena, at ``arena``."""
        direct = [storage.data_ptr() for storage in self._direct]
        return direct + [arena + lot.offset for group in self.groups for lot in group.lots]

    def group_of(self, stage: int) -> Group | None:
        """Return what is staged in a stage; None for the direct one."""
        staged = stage - (len(self.stages) - len(self.groups))
        return self.groups[staged] if staged >= 0 else None

    def check_pins(self) -> None:
        """Refuse a live tensor that moved, or changed its form, since the layout was made."""
        for name, pin in self._pins.items():
            found = _pin(self._live[name])
            if found != pin:
                raise AdapterError(
                    "a live tensor moved or changed its form",
                    expected=_readable(pin),
                    found="it is gone" if found is None else _readable(found),
                    rank=self._who,
                    tensor=name,
                    hint="captured graphs keep addresses; restart the engine, or join again",
                )

    def put_through(self, model: nn.Module, group: Group, arena: Arena) -> None:
        """Run a stage's recorded computations, then let its modules be loaded and processed.

        Args:
            model: the live one.
            group: the stage; its bytes have arrived.
            arena: where.
        """
        self._replay(group, arena)
        for name in group.modules:
            process(model, name, group, arena, self.forms, self.holes)

    def put_constants(self) -> None:
        """Write what the loader writes whatever the checkpoint holds: zeros in place of absent heads, say."""
        for one in self.constants:
            one.run({}, {name: self._live[name].get().data for name in one.live})

    def _replay(self, group: Group, arena: Arena) -> None:
        """Run a stage's recorded computations from what arrived into live tensors, or into the stage."""
        for one, inputs in group.replays:
            targets = {
                name: arena.tensor(group.live[name]) if name in group.live else self._live[name].get().data
                for name in one.live
            }
            one.run({name: arena.tensor(lot) for name, lot in inputs.items()}, targets)


def survey(model: nn.Module, learned: Learned, device: str, local: Sequence[str], who: str) -> Plot:
    """Lay a live model out.

    Args:
        model: the live one.
        learned: from its twin.
        device: on which its kernels run.
        local: fnmatch patterns of live names that the engine keeps for itself.
        who: this rank, for errors.

    Raises:
        AdapterError: a live tensor that nothing explains, or one that cannot be updated; named.
    """
    live = slots(model)
    processed = inspect(learned.twin, device)
    made = frozenset(f"{one.name}.{key}" for one in processed for key in one.made)
    names = {name: found for name, found in learned.trace.names.items() if found}
    staged = _staged(processed, names)
    direct = {name: live[name] for name in names if name not in staged and name in live}
    _check_forms(live, learned, names, staged, who)
    groups = _groups(learned, staged, processed)
    storages, where = _direct_places(direct, learned)
    ordered = list(groups.values())
    shards: list[Shard] = []
    sizes = [storage.nbytes() for storage in storages]
    for group in ordered:
        first = len(sizes)
        sizes += [lot.nbytes for lot in group.lots]
        where |= {name: (number, 0) for number, name in enumerate(group.live, start=first)}
        shards += _inputs(group, first + len(group.live))
    shards += learned.trace.shards(where)
    derived = frozenset((learned.derived & live.keys()) | (made & live.keys())) - names.keys()
    rest = frozenset(live) - names.keys() - derived
    _check_explained(rest, learned, local, who)
    pinned = [*direct, *derived, *(name for name in staged if name in live)]
    return Plot(
        manifest=Manifest.from_shards(shards, sizes),
        stages=_stages(len(storages), ordered),
        groups=ordered,
        forms=learned.forms,
        holes=learned.trace.holes,
        names=names,
        derived=derived,
        local=rest,
        replayed=frozenset(name for replay in learned.trace.replays if replay.inputs for name in replay.live),
        constants=tuple(_constants(learned, live, staged)),
        _live=live,
        _direct=storages,
        _pins={name: pin for name in pinned if (pin := _pin(live[name])) is not None},
        _who=who,
    )


def _constants(learned: Learned, live: Mapping[str, Slot], staged: Mapping[str, str]) -> Iterator[Replay]:
    """Yield the loader's constants that stand in live tensors of the form that a load leaves them in."""
    for replay in learned.trace.replays:
        places = [name for name in replay.live if name in live and name not in staged]
        if replay.inputs or len(places) < len(replay.live):
            continue
        if all(Geometry.of(live[name].get()).form == learned.forms[name].form for name in places):
            yield replay


def _staged(processed: Iterable[Processed], names: Mapping[str, object]) -> dict[str, str]:
    """Return, for each live tensor that must be put through post-processing, its module."""
    modules = [one.name for one in processed]
    return {name: module for name in names for module in modules if name.startswith(f"{module}.")}


def _check_forms(
    live: Mapping[str, Slot],
    learned: Learned,
    names: Mapping[str, object],
    staged: Mapping[str, str],
    who: str,
) -> None:
    """Refuse a synced tensor that the live model holds in another form than a load leaves it in."""
    for name in names:
        if name in staged:
            continue
        expected = learned.forms[name].form
        found = Geometry.of(live[name].get()).form if name in live else None
        if found != expected:
            raise AdapterError(
                "a live tensor has another form than SGLang's loader leaves it in, and no hook explains it",
                expected=expected,
                found="it is gone" if found is None else found,
                rank=who,
                tensor=name,
                hint="something repacked it after loading: a write in place would not reach the kernels",
            )


def _check_explained(rest: Iterable[str], learned: Learned, local: Sequence[str], who: str) -> None:
    """Refuse live tensors that are neither in the twin nor declared."""
    for name in sorted(rest):
        if name in learned.forms or any(fnmatch.fnmatchcase(name, pattern) for pattern in local):
            continue
        raise AdapterError(
            "a live tensor that nothing explains",
            expected="synced by a checkpoint name, derived by the engine's hook, or made by its constructor",
            rank=who,
            tensor=name,
            hint="declare it in Rules(frozen=...) if it does not depend on the weights",
        )


def _groups(
    learned: Learned,
    staged: Mapping[str, str],
    processed: Iterable[Processed],
) -> dict[str, Group]:
    """Return the stages: one a layer, of the modules and replays in it."""
    groups: dict[str, Group] = {}
    for one in processed:
        mine = [name for name, module in staged.items() if module == one.name]
        if not mine:
            continue
        group = groups.setdefault(layer_of(one.name), Group(layer_of(one.name)))
        group.modules.append(one.name)
        group.live |= {name: Lot(learned.forms[name].shape, learned.forms[name].dtype) for name in mine}
    for replay in learned.trace.replays:
        aside = [staged[name] for name in replay.live if name in staged]
        if not replay.inputs and not aside:
            continue  # constants: nothing has to arrive for them
        layers = {layer_of(name) for name in aside or replay.live[:1]}
        if len(layers) > 1 or len(aside) not in {0, len(replay.live)}:
            raise AdapterError(
                "one computation of the loader fills tensors of several stages",
                expected="tensors of one layer",
                found=", ".join(replay.live),
                tensor=replay.live[0],
            )
        layer = layers.pop()
        groups.setdefault(layer, Group(layer)).add(replay)
    return groups


def _inputs(group: Group, first: int) -> list[Shard]:
    """Return the shards of what a stage's replays read; their storages are numbered from ``first``."""
    found: list[Shard] = []
    for replay, lots in group.replays:
        numbers = {name: (first + index, 0) for index, name in enumerate(lots)}
        found += replay.input_shards(numbers)
        first += len(lots)
    return found


def _stages(direct: int, groups: Sequence[Group]) -> tuple[Stage, ...]:
    """Return the direct storages as one stage, then one for each group; none if everything is direct."""
    if not groups:
        return ()
    found = [Stage("direct", tuple(range(direct)))] if direct else []
    first = direct
    for group in groups:
        found.append(Stage(group.name, tuple(range(first, first + len(group.lots)))))
        first += len(group.lots)
    return tuple(found)


def _direct_places(
    direct: Mapping[str, Slot], learned: Learned
) -> tuple[list[torch.UntypedStorage], dict[str, tuple[int, int]]]:
    """Return the distinct storages of live tensors, and each tensor's number and element offset in it."""
    storages: list[torch.UntypedStorage] = []
    numbers: dict[int, int] = {}
    where: dict[str, tuple[int, int]] = {}
    for name, slot in direct.items():
        tensor = slot.get()
        key = Geometry.of(tensor).storage
        if key not in numbers:
            numbers[key] = len(storages)
            storages.append(tensor.untyped_storage())
        where[name] = (numbers[key], int(tensor.storage_offset()))
    return storages, where


def _pin(slot: Slot) -> Pin | None:
    try:
        tensor: Any = slot.get()
    except (KeyError, IndexError):
        return None
    if not isinstance(tensor, torch.Tensor):
        return None
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _readable(pin: Pin) -> str:
    address, shape, stride, dtype = pin
    size = math.prod(shape) * dtype.itemsize
    return f"{shape} {dtype} strides {stride} at {address:#x} ({size} bytes)"
