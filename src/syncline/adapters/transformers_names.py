"""Checkpoint names of a model's live tensors, learned from the model itself: no tables of models.

A Transformers model may hold other tensors than its checkpoint: experts stay fused in memory and are split on
disk. Its own reverse conversion, traced on weightless tensors, says where every checkpoint tensor lies. Any
other module's checkpoint is its ``state_dict``.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from syncline.adapters.modules import Tree, ties, unwrap
from syncline.errors import AdapterError, LayoutError
from syncline.layout.box import Box
from syncline.layout.export import Part, Source, dtype_name, trace_export
from syncline.layout.view import row_major

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """What a model's checkpoint carries.

    Attributes:
        sources: by checkpoint name, where its elements lie in full live tensors. A tied tensor is there once.
        aliases: other checkpoint names of tied tensors -> the name in ``sources``.
        unsaved: live names that the checkpoint does not carry.
    """

    sources: dict[str, Source]
    aliases: dict[str, str]
    unsaved: frozenset[str]


def is_transformers(model: nn.Module) -> bool:
    """Return whether this is a Transformers model, without importing Transformers."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(unwrap(model), library.PreTrainedModel)


def learn_names(model: nn.Module, tree: Tree) -> CheckpointNames:
    """Learn the checkpoint form of a walked model.

    Raises:
        AdapterError: the model's conversion is not made of views, names the tensor; or no weightless twin
            of the model can be built.
    """
    metas = {name: _weightless(name, cell.get()) for name, cell in tree.state.items()}
    if is_transformers(model):
        traced, targets, unsaved = _trace_transformers(unwrap(model), metas)
    else:
        traced, targets, unsaved = (
            {name: _identity(name, meta) for name, meta in metas.items()},
            set[str](),
            set[str](),
        )
    aliases = _aliases(traced, ties(tree.state), targets)
    sources = {name: source for name, source in traced.items() if name not in aliases}
    return CheckpointNames(sources, aliases, frozenset(unsaved))


def _weightless(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tuple(tensor.shape) == (0,):
        raise AdapterError(
            "a parameter has no elements: its weights are offloaded",
            expected="the parameter's own shape",
            found=tuple(tensor.shape),
            tensor=name,
            hint="load the weights back before the adapter's manifest is first needed",
        )
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")


def _identity(name: str, tensor: torch.Tensor) -> Source:
    shape = tuple(tensor.shape)
    return Source(name, shape, dtype_name(tensor.dtype), (Part(name, 0, Box.whole(shape), row_major(shape)),))


def _trace_transformers(
    model: Any, metas: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Source], set[str], set[str]]:
    """Return traced sources, live names that Transformers ties to others, and live names it does not save."""
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415 (heavy, lazily)

    twin = meta_twin(model)
    ignored: set[str] = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    unsaved = {name for name in metas if name in ignored}
    saved = {name: meta for name, meta in metas.items() if name not in unsaved}
    try:
        traced = trace_export(saved, lambda state: revert_weight_conversion(twin, state))
    except LayoutError as error:
        raise AdapterError(
            f"the checkpoint form of {type(model).__name__} cannot be learned: {error.what}",
            expected=error.expected,
            found=error.found,
            tensor=error.tensor,
            hint=error.hint,
        ) from error
    return traced, set(getattr(model, "all_tied_weights_keys", None) or ()), unsaved


def meta_twin(model: Any) -> Any:
    """Build a weightless model of the same class, configuration and weight conversions."""
    library = sys.modules["transformers.modeling_utils"]
    wrapped = {cls for cls in type(model).__mro__ if cls.__name__.startswith("FSDP")}
    kinds = (c for c in type(model).__mro__ if issubclass(c, library.PreTrainedModel) and c not in wrapped)
    kind: Any = next(kinds)
    config = copy.deepcopy(model.config)
    if getattr(config, "distributed_config", None) is not None:
        config.distributed_config = None  # a twin is whole: names and shapes do not depend on sharding
    try:
        with torch.device("meta"):
            twin = kind._from_config(config)  # noqa: SLF001 (what AutoModel.from_config itself calls)
    except Exception as error:
        raise AdapterError(
            f"no weightless twin of {kind.__name__} can be built",
            found=f"{type(error).__name__}: {error}",
            hint="the class must be constructible from its configuration on the meta device",
        ) from error
    if "_weight_conversions" in vars(model):
        twin._weight_conversions = model._weight_conversions  # noqa: SLF001 (what the model was loaded with)
    return twin


def _aliases(traced: Mapping[str, Source], groups: list[list[str]], targets: set[str]) -> dict[str, str]:
    """Return checkpoint alias -> checkpoint name for every tie; Transformers' own choice of the name wins."""
    main: dict[str, str] = {}
    for group in groups:
        free = [name for name in group if name not in targets] or group
        main |= {name: free[0] for name in group if name != free[0]}
    return _same_parts(traced, main)


def _same_parts(sources: Mapping[str, Source], main: Mapping[str, str]) -> dict[str, str]:
    """Return alias -> name of checkpoint tensors that are equal when live names are replaced by ``main``."""
    by_parts = {_geometry(source, {}): name for name, source in sources.items()}
    aliases = {}
    for name, source in sources.items():
        if any(part.live in main for part in source.parts):
            canonical = by_parts.get(_geometry(source, main))
            if canonical is not None and canonical != name:
                aliases[name] = canonical
    return aliases


def declared_aliases(model: nn.Module, tree: Tree, names: CheckpointNames) -> dict[str, str]:
    """Return aliases of tensors that Transformers ties but that live apart here, as some shardings make them.

    Such a copy keeps its own name and shards; the alias says from which checkpoint tensor it is fed.
    """
    tied: Mapping[str, str] = getattr(unwrap(model), "all_tied_weights_keys", None) or {}
    apart = {
        target: source for target, source in tied.items() if target in tree.state and source in tree.state
    }
    return _same_parts(names.sources, apart)


def _geometry(source: Source, main: Mapping[str, str]) -> tuple[object, ...]:
    return tuple((main.get(p.live, p.live), p.offset, p.box, p.stride) for p in source.parts)
