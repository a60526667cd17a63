"""Live tensors of a module tree: their names without wrappers, where each hangs, which are tied.

A live tensor is found by where it hangs (a module's own dictionary and a key), never remembered as an object:
frameworks replace parameters when they offload, load or reshard.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from syncline.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, slots=True)
class Cell:
    """Where a live tensor hangs: ``owner[key]``."""

    owner: dict[str, Any]
    key: str

    def get(self) -> torch.Tensor:
        """Return the tensor that hangs there now."""
        return self.owner[self.key]


@dataclass(slots=True)
class Tree:
    """A walked module tree.

    Attributes:
        state: parameters and persistent buffers by name, tied ones under each of their names.
        local: non-persistent buffers by name: the module makes them itself.
        links: (dictionary, key, module) of every module below the root, to notice a replaced one.
        fsdp: FSDP's own records of sharded parameters by name, where the tree is wrapped by FSDP2.
    """

    state: dict[str, Cell] = field(default_factory=dict)
    local: dict[str, Cell] = field(default_factory=dict)
    links: list[tuple[dict[str, Any], str, nn.Module]] = field(default_factory=list)
    fsdp: dict[str, Any] = field(default_factory=dict)
    _columns: tuple[list[dict[str, Any]], list[str], list[nn.Module]] | None = None  # of `links`

    def check_links(self) -> None:
        """Refuse a tree in which a module was replaced since it was walked."""
        if self._columns is None or len(self._columns[0]) != len(self.links):
            links = self.links
            self._columns = [a for a, _, _ in links], [b for _, b, _ in links], [c for _, _, c in links]
        owners, keys, modules = self._columns
        if list(map(dict.get, owners, keys)) == modules:
            return  # lists compare by identity first: tens of thousands of modules in a few milliseconds
        for owner, key, module in self.links:
            if owner.get(key) is not module:
                raise AdapterError(
                    "a module was replaced after the adapter was made",
                    expected=type(module).__name__,
                    found=type(owner.get(key)).__name__,
                    tensor=key,
                    hint="make a new adapter for the changed model",
                )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a DTensor, without communication; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def walk(model: nn.Module) -> Tree:
    """Walk a module tree and name its tensors as its unwrapped ``state_dict`` would."""
    tree = Tree()
    records = fsdp_records(model)
    _walk(model, "", tree, records)
    return tree


def _walk(module: nn.Module, prefix: str, tree: Tree, records: Mapping[tuple[int, str], Any]) -> None:
    inner = wrapped_key(module)
    for key, parameter in module._parameters.items():  # noqa: SLF001 (where parameters hang)
        if parameter is None:
            continue
        record = records.get((id(module), key))
        if record is None:
            tree.state[prefix + key] = Cell(module._parameters, key)  # noqa: SLF001
        else:
            # while a module is unsharded, full parameters hang at it; the sharded one stays the truth
            tree.fsdp[prefix + key] = record
            tree.state[prefix + key] = Cell(record.__dict__, "sharded_param")
    for key, buffer in module._buffers.items():  # noqa: SLF001
        if buffer is not None:
            kept = tree.local if key in module._non_persistent_buffers_set else tree.state  # noqa: SLF001
            kept[prefix + key] = Cell(module._buffers, key)  # noqa: SLF001
    for key, child in module._modules.items():  # noqa: SLF001
        if child is not None:
            tree.links.append((module._modules, key, child))  # noqa: SLF001
            _walk(child, prefix if key == inner else f"{prefix}{key}.", tree, records)


def wrapped_key(module: nn.Module) -> str | None:
    """Return the key of the module that a transparent wrapper wraps; None for any other module."""
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    if kind == "torch._dynamo.eval_frame.OptimizedModule":
        return "_orig_mod"
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    names = {
        cls.__qualname__ for cls in type(module).__mro__ if cls.__module__.startswith("torch.distributed.")
    }
    return "_checkpoint_wrapped_module" if "ActivationWrapper" in names else None


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside any number of transparent wrappers."""
    while (key := wrapped_key(module)) is not None:
        module = module._modules[key] or module  # noqa: SLF001
    return module


def fsdp_records(model: nn.Module) -> dict[tuple[int, str], Any]:
    """Return FSDP2's record of each sharded parameter by (id of a module it hangs at, key)."""
    found: dict[tuple[int, str], Any] = {}
    for record in iter_fsdp_params(model):
        info = record._module_info  # noqa: SLF001 (FSDP2 has no public way from a module to its shards)
        found[id(info.module), info.param_name] = record
        for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
            found[id(module), name] = record
    return found


def iter_fsdp_params(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's records of sharded parameters, each once."""
    seen: set[int] = set()
    for module in model.modules():
        if not hasattr(module, "_get_fsdp_state"):
            continue
        state: Any = module._get_fsdp_state()  # noqa: SLF001 # pyright: ignore[reportCallIssue]
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # noqa: SLF001
        for group in filter(None, groups):
            for record in group.fsdp_params:
                if id(record) not in seen:
                    seen.add(id(record))
                    yield record


def ties(state: Mapping[str, Cell]) -> list[list[str]]:
    """Return the groups of names that are one tensor, in the tree's order; single names are left out."""
    groups: dict[object, list[str]] = {}
    for name, cell in state.items():
        tensor = cell.get()
        part = local_part(tensor)
        place: object = id(tensor)
        if part.numel() and not part.is_meta:
            place = (part.data_ptr(), part.shape, part.stride(), part.dtype)
        groups.setdefault(place, []).append(name)
    return [names for names in groups.values() if len(names) > 1]
