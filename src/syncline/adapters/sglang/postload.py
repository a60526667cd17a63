"""What SGLang does to loaded weights before its kernels read them, found out by doing it, module by module.

A quantisation method may repack, transpose, quantise or copy a module's parameters after they were loaded
(``process_weights_after_loading``). Into a parameter that it leaves alone, an update may write directly; any
other must be loaded as a load loads it, and processed again. Which of the two holds is not assumed: each
module of the twin gets real memory of its own for a moment, filled with a known pattern, and is processed
under watch.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from syncline.adapters.sglang.tensors import Geometry, Slot, registered_slots, slots, storage_key
from syncline.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

_PATTERN = 0x11  # every byte; a small positive number in every floating-point format


@dataclass(frozen=True, slots=True)
class Processed:
    """A module whose loaded parameters are not what its kernels read.

    Attributes:
        name: of the module.
        reason: what was seen.
        made: names, within the module, of tensors that processing hangs there.
    """

    name: str
    reason: str
    made: frozenset[str]


def inspect(twin: nn.Module, device: torch.device | str) -> list[Processed]:
    """Return the modules of a twin that post-processing transforms, in the order of the model.

    Args:
        twin: weightless, as its loader leaves it. It is left as it was, but for what processing hangs at
            modules besides parameters.
        device: on which the live model's kernels run.

    Raises:
        AdapterError: a module is repacked and cannot be brought back to the form that a load needs; named.
    """
    found = []
    for name, module in twin.named_modules():
        method = getattr(module, "quant_method", None)
        if hasattr(method, "process_weights_after_loading"):
            one = _inspect_one(name, module, method, torch.device(device))
            if one is not None:
                found.append(one)
    return found


def _inspect_one(name: str, module: nn.Module, method: Any, device: torch.device) -> Processed | None:
    known = frozenset(slots(module))
    with _real_memory(module, device) as forms:
        if not forms:
            return None
        try:
            reason = _watch(module, method, forms)
        except Exception as error:
            raise AdapterError(
                "what the engine does to a module after loading cannot be found out",
                expected="process_weights_after_loading to run on freshly loaded weights",
                found=f"{type(error).__name__}: {error}",
                tensor=name,
            ) from error
        made = frozenset(slots(module)) - known
        if made and reason is None:
            reason = f"makes {', '.join(sorted(made))}"
        if reason is not None:
            _check_way_back(name, module, method, forms)
    return None if reason is None else Processed(name, reason, made)


def _watch(module: nn.Module, method: Any, forms: Mapping[str, Geometry]) -> str | None:
    """Process a module and return what happened to its parameters; None if nothing did."""
    kept = [slot.get() for slot in registered_slots(module).values()]  # storages stay their own
    watched = _Watch({form.storage for form in forms.values()})
    with watched:
        method.process_weights_after_loading(module)
    now = registered_slots(module)
    for key, form in forms.items():
        if key not in now:
            return f"drops {key}"
        tensor = now[key].get()
        if Geometry.of(tensor) != form:
            return f"replaces {key}: {form.shape} becomes {tuple(tensor.shape)}"
        if not _holds_pattern(tensor):
            return f"rewrites {key}"
    kept.clear()
    return f"reads weights by {sorted(watched.ops)[0]}" if watched.ops else None


def _check_way_back(name: str, module: nn.Module, method: Any, forms: Mapping[str, Geometry]) -> None:
    """Refuse a module that the engine's own restore hook does not bring back into its loadable form."""
    restore(method, module)
    now = registered_slots(module)
    for key, form in forms.items():
        found = now[key].get() if key in now else None
        if found is None or (tuple(found.shape), found.dtype) != (form.shape, form.dtype):
            raise AdapterError(
                "the engine repacks a module after loading and has no way back",
                expected=f"{key} as a load needs it: {form.shape}, {form.dtype}",
                found="gone" if found is None else f"{tuple(found.shape)}, {found.dtype}",
                tensor=f"{name}.{key}",
                hint="an update in place would not reach its kernels; start the engine without this packing",
            )


def restore(method: Any, module: nn.Module) -> None:
    """Undo a module's post-processing by SGLang's own hook, if its method has one."""
    hook = getattr(method, "restore_weights_before_loading", None)
    if hook is not None:
        hook(module)


class _Watch(TorchDispatchMode):
    """Notes operators, other than those that only make views, that get one of the watched storages."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self._storages = storages
        self.ops: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _only_views(func):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and storage_key(leaf) in self._storages:
                    self.ops.add(str(func))
        return func(*args, **(kwargs or {}))


def _only_views(func: Any) -> bool:
    returns = func._schema.returns  # noqa: SLF001 (the operator's schema has no public accessor)
    infos = [one.alias_info for one in returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


@contextmanager
def _real_memory(module: nn.Module, device: torch.device) -> Iterator[dict[str, Geometry]]:
    """Give a weightless module's tensors real memory, filled with the pattern; take it away afterwards.

    Yields the geometry of each tensor that got memory, by its name in the module.
    """
    weightless = [
        (name, slot, slot.get())
        for name, slot in registered_slots(module).items()
        if slot.get().device.type == "meta"
    ]
    registries = [(registry, dict(registry)) for registry in _registries(module)]
    made: dict[int, torch.Tensor] = {}
    forms: dict[str, Geometry] = {}
    try:
        for name, slot, tensor in weightless:
            if id(tensor) not in made:
                made[id(tensor)] = _materialised(tensor, device)
            slot.owner[slot.key] = made[id(tensor)]
            forms[name] = Geometry.of(made[id(tensor)])
        yield forms
    finally:
        for registry, before in registries:
            registry.clear()
            registry.update(before)


def _registries(module: nn.Module) -> Iterator[dict[str, Any]]:
    for inner in module.modules():
        yield inner._parameters  # noqa: SLF001 (where parameters and buffers hang)
        yield inner._buffers  # noqa: SLF001


def _materialised(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the same class and attributes with memory of its own."""
    real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    _bytes_of(real).fill_(_PATTERN)
    if isinstance(tensor, torch.nn.Parameter) or type(tensor) is not torch.Tensor:
        real = torch.Tensor._make_subclass(type(tensor), real, False)  # noqa: SLF001 (as torch itself does)
        for key, value in vars(tensor).items():
            setattr(real, key, value)
    return real


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))


def _holds_pattern(tensor: torch.Tensor) -> bool:
    return bool((_bytes_of(tensor) == _PATTERN).all())


__all__ = ["Processed", "Slot", "inspect", "restore"]
