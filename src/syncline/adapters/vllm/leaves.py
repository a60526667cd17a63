"""What a layer holds beside its parameters: tensors and values behind its attributes, and inside closures.

Post-processing of weights may hide a second copy of them anywhere: in a kernel object, in a lambda, behind a
handle of a library. Two walks over one layer say what post-processing added or changed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NO_STATE = (type, ModuleType, nn.Module, BuiltinFunctionType, torch.device, torch.dtype, torch.Size)
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
_MAX_OBJECTS = 200_000
_FEW = 1 << 16  # bytes that are fetched from a device to be compared
_WORDS = 1 << 22  # words of a device that are summed at a time
_STEP = 0x5851F42D4C957F2D  # between two of them
_CONFIGURATION = ("vllm.config", "transformers.", "logging", "torch.distributed", "vllm.distributed", "enum")


@dataclass(frozen=True, slots=True)
class Leaf:
    """The end of a path.

    Attributes:
        tensor: if it is one.
        value: a number or text; an object that cannot be looked into stands for itself.
    """

    tensor: torch.Tensor | None
    value: object = None

    def bits(self) -> object:
        """Return something that is equal for equal contents."""
        if self.tensor is None:
            return self.value if isinstance(self.value, _PLAIN) else _Identity(self.value)
        return content(self.tensor)


class _Identity:
    """An object that equals only itself; keeps it alive, so that its identity stays its own."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


def content(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a tensor's shape, dtype and bytes as something hashable; no bytes for one without memory.

    Many bytes on a device stay there: two sums of 64 bits stand for them.
    """
    kind = (tuple(tensor.shape), str(tensor.dtype))
    if tensor.is_meta:
        return (*kind, None)
    flat = tensor.detach().contiguous().reshape(-1)
    if not flat.numel():
        return (*kind, b"")
    octets = flat.view(torch.uint8)
    if octets.device.type == "cpu" or octets.numel() <= _FEW:
        return (*kind, octets.cpu().numpy().tobytes())
    return (*kind, _sums(octets))


def _sums(octets: torch.Tensor) -> tuple[int, ...]:
    """Return two sums over the words of uint8[N], each word times a random factor of its place."""
    whole = octets.numel() // 4 * 4
    rest = octets[whole:].cpu().numpy().tobytes()
    words = octets[:whole].view(torch.int32)
    generator = torch.Generator(octets.device).manual_seed(0)
    size = min(_WORDS, words.numel())
    factors = torch.randint(-(2**63), 2**63 - 1, (2, size), generator=generator, device=octets.device)
    total = torch.zeros(2, dtype=torch.int64, device=octets.device)
    for part in words.split(size):
        total = total * _STEP + (factors[:, : len(part)] * part.to(torch.int64)).sum(1)
    return (*total.tolist(), *rest)


def leaves(module: nn.Module) -> dict[str, Leaf]:
    """Return every leaf behind a module's attributes, by path; no registered tensor, and no other module.

    A tensor that shares memory with one of the module's registered tensors is left out: it follows them.
    """
    registered = {_storage(t) for t in (*module._parameters.values(), *module._buffers.values())}  # noqa: SLF001
    found: dict[str, Leaf] = {}
    seen: dict[int, object] = {id(module): module}
    start = {key: value for key, value in vars(module).items() if key not in _REGISTRIES}
    stack: list[tuple[str, object]] = [(f".{key}", value) for key, value in start.items()]
    while stack and len(seen) < _MAX_OBJECTS:
        path, held = stack.pop()
        if isinstance(held, torch.Tensor):
            if held.is_meta or _storage(held) not in registered:
                found[path] = Leaf(held)
        elif isinstance(held, _PLAIN):
            found[path] = Leaf(None, held)
        elif not _without_state(held) and id(held) not in seen:
            seen[id(held)] = held
            inner = list(_inside(held))
            if not inner and not _transparent(held):
                found[path] = Leaf(None, held)
            stack += [(path + step, value) for step, value in inner]
    return found


def _storage(tensor: torch.Tensor | None) -> object:
    if tensor is None or tensor.numel() == 0:
        return None
    return tensor.untyped_storage()._cdata  # noqa: SLF001 (identity of the storage behind views)


def _without_state(held: object) -> bool:
    return isinstance(held, _NO_STATE) or type(held).__module__.startswith(_CONFIGURATION)


def _transparent(held: object) -> bool:
    """Return whether an object without parts is known to hide nothing."""
    return isinstance(
        held, Mapping | list | tuple | set | frozenset | FunctionType | functools.partial
    ) or hasattr(held, "__dict__")


def _inside(held: Any) -> Iterator[tuple[str, object]]:
    if isinstance(held, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in held.items())
    elif isinstance(held, list | tuple):
        yield from ((f"[{index}]", value) for index, value in enumerate(held))
    elif isinstance(held, FunctionType):
        free = inspect.getclosurevars(held).nonlocals if held.__closure__ else {}
        yield from ((f"<{key}>", value) for key, value in free.items())
        yield from ((f"<default {index}>", value) for index, value in enumerate(held.__defaults__ or ()))
    elif isinstance(held, MethodType):
        yield ".__self__", held.__self__
    elif isinstance(held, functools.partial):
        yield from ((f"<argument {index}>", value) for index, value in enumerate(held.args))
        yield from ((f"<argument {key}>", value) for key, value in held.keywords.items())
    elif hasattr(held, "__dict__"):
        yield from ((f".{key}", value) for key, value in vars(held).items())
    else:
        for name in getattr(type(held), "__slots__", ()):
            if hasattr(held, name):
                yield f".{name}", getattr(held, name)
