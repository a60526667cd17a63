"""Staged loading: bytes that a kernel cannot read as they are, received aside and put through the engine.

What is staged shares one arena of the size of the largest stage; it is allocated once. When a stage's bytes
are verified, each of its modules is brought into loadable form by SGLang's own hook, filled from the arena,
and processed by SGLang again; what moved by this is copied back to where it was, since captured graphs keep
addresses.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from syncline.adapters.sglang.postload import restore
from syncline.adapters.sglang.tensors import slots
from syncline.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from syncline.adapters.sglang.tensors import Geometry
    from syncline.layout.box import Box
    from syncline.layout.replay import Replay

_ALIGNMENT = 64  # bytes: every storage of a stage begins on a line of the cache
_LAYER = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")  # up to the first position in a list of modules


@dataclass(slots=True)
class Lot:
    """One storage of a stage: a tensor in loadable form, or a part of a checkpoint tensor for a replay.

    Attributes:
        shape: of the tensor, contiguous.
        dtype: its dtype.
        offset: bytes from the arena's start.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True)
class Group:
    """What is received, and then put through the engine, at once.

    Attributes:
        name: of the stage.
        modules: names of the modules to process at its end.
        live: storages of their tensors in loadable form, by live name.
        replays: recorded computations of the loader to run before that, each with the storages of its inputs.
    """

    name: str
    modules: list[str] = field(default_factory=list)
    live: dict[str, Lot] = field(default_factory=dict)
    replays: list[tuple[Replay, dict[str, Lot]]] = field(default_factory=list)

    @property
    def lots(self) -> list[Lot]:
        """All storages, in the order of the manifest."""
        return [*self.live.values(), *(lot for _, inputs in self.replays for lot in inputs.values())]

    def add(self, replay: Replay) -> None:
        """Add a replay, with storages for its inputs."""
        lots = {
            name: Lot(replay.boxes[name].size, getattr(torch, replay.dtypes[name])) for name in replay.inputs
        }
        self.replays.append((replay, lots))

    def place(self) -> int:
        """Give every storage its offset; return the stage's size in bytes."""
        at = 0
        for lot in self.lots:
            lot.offset = at
            at += -(-lot.nbytes // _ALIGNMENT) * _ALIGNMENT
        return at


def layer_of(name: str) -> str:
    """Return the part of a name up to its first position in a list of modules; else its first part."""
    found = _LAYER.match(name)
    return found.group() if found else name.split(".", 1)[0]


class Arena:
    """The memory that all stages share, one after the other."""

    def __init__(self, groups: Iterable[Group], device: torch.device | str) -> None:
        nbytes = max((group.place() for group in groups), default=0)
        self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self._memory.data_ptr()

    def tensor(self, lot: Lot) -> torch.Tensor:
        """Return a storage of the stage at hand as a tensor of its shape and dtype."""
        part = self._memory[lot.offset : lot.offset + lot.nbytes]
        return part.view(lot.dtype).view(lot.shape)


def process(
    model: nn.Module,
    name: str,
    group: Group,
    arena: Arena,
    forms: Mapping[str, Geometry],
    holes: Mapping[str, Sequence[Box]],
) -> None:
    """Load one module from the arena and let SGLang process it; nothing of it moves.

    Args:
        model: the live model.
        name: of the module in it.
        group: the stage at hand, whose bytes have arrived.
        arena: where.
        forms: of every live tensor, as a load needs it.
        holes: by live name, what no checkpoint tensor fills and stays as it is.

    Raises:
        AdapterError: the module cannot be brought back into the form that a load needs.
    """
    module = model.get_submodule(name)
    method: Any = module.quant_method
    before = {key: slot.get().data for key, slot in slots(module).items()}
    restore(method, module)
    now = slots(module)
    for live, lot in group.live.items():
        if not live.startswith(f"{name}."):
            continue
        key = live.removeprefix(f"{name}.")
        target = now[key].get().data if key in now else None
        if target is None or tuple(target.shape) != forms[live].shape:
            raise AdapterError(
                "a module did not come back into the form that a load needs",
                expected=forms[live].shape,
                found="nothing" if target is None else tuple(target.shape),
                tensor=live,
            )
        _fill(target, arena.tensor(lot), holes.get(live, ()))
    method.process_weights_after_loading(module)
    _put_back(module, before)


def _fill(target: torch.Tensor, source: torch.Tensor, holes: Sequence[Box]) -> None:
    for hole in holes:
        part = tuple(slice(o, o + n) for o, n in zip(hole.offset, hole.size, strict=True))
        source[part] = target[part]
    target.copy_(source)


def _put_back(module: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    """Copy what processing put elsewhere to where it was, and let the module refer to that again."""
    now = slots(module)
    for key, old in before.items():
        if key not in now:
            continue
        new = now[key].get()
        same = new.shape == old.shape and new.stride() == old.stride() and new.dtype == old.dtype
        if same and new.data_ptr() != old.data_ptr():
            old.copy_(new.data)
            new.data = old
