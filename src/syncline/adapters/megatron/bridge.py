"""Megatron-Bridge as the exporter: its own conversion loop, on this rank's weightless tensors.

The mappings, their names and their order are the library's. Copies of them get process groups of which only
size and rank are true, so that each rank learns its own part without any other.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from syncline.adapters.megatron.quiet import Group, Quiet, quiet
from syncline.errors import AdapterError, SynclineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import nn

_GROUPS = {"pp_group": "pipeline", "ep_group": "expert", "_tp_group": "tensor", "_etp_group": "expert tensor"}
_CACHES = frozenset({"_broadcast_obj_cache", "_tensor_spec_output_cache"})


def as_bridge(given: Any) -> Any:
    """Return a Megatron-Bridge ``AutoBridge`` for a Hugging Face configuration; a bridge as it is.

    Raises:
        AdapterError: Megatron-Bridge cannot be imported, or does not know the architecture.
    """
    if hasattr(given, "export_hf_weights"):
        return given
    try:
        library: Any = importlib.import_module("megatron.bridge")  # heavy, optional

        return library.AutoBridge.from_hf_config(given)
    except ImportError as error:
        raise AdapterError(
            "Megatron-Bridge cannot be imported",
            expected="megatron-bridge beside megatron-core, or MegatronTrainer(..., exporter=...)",
            found=error,
            hint="an exporter is a function from whole Megatron tensors to checkpoint tensors",
        ) from error
    except ValueError as error:
        raise AdapterError("Megatron-Bridge does not know this architecture", found=error) from error


@dataclass(frozen=True, slots=True)
class Replica:
    """A live tensor that is a second copy of one that another pipeline stage exports.

    Attributes:
        live: its name here.
        task: the conversion that its own name has in Megatron-Bridge.
    """

    live: str
    task: Any


class BridgeExport:
    """What Megatron-Bridge does with one rank's tensors, callable on any tensors of the same shapes.

    Args:
        bridge: an ``AutoBridge``; the user's own is only read.
        chunks: the model chunks of this rank.
        tensors: its live tensors by name.

    A live tensor without a mapping is not refused here; see `unmapped`.
    """

    def __init__(self, bridge: Any, chunks: Sequence[nn.Module], tensors: Mapping[str, torch.Tensor]) -> None:
        self._chunks, self._source = list(chunks), bridge.hf_pretrained
        # one of its own for each call: names that it remembers are this stage's only
        self._own: Callable[[], Any] = lambda: bridge._model_bridge  # noqa: SLF001 (no public way for a configuration)
        names = {id(tensor): name for name, tensor in tensors.items()}
        with quiet(Quiet(_no_peers, objects=True)):
            listed = self._own().build_conversion_tasks(self._source, self._chunks)
        self.tasks = {
            names[id(task.param_weight)]: task
            for task in listed
            if task is not None and id(task.param_weight) in names
        }
        self.replicas = {one.live: one for one in self._replicas(tensors)}
        for live in self.replicas:
            self.tasks.pop(live, None)
        self.aliases = dict(self._aliases())

    def unmapped(self, name: str) -> bool:
        """Return whether a live tensor has no mapping."""
        return name not in self.tasks and name not in self.replicas

    def _aliases(self) -> Iterator[tuple[str, str]]:
        """Yield (second name, first name) of what Megatron-Bridge takes to be tied."""
        own = self._own()
        registry = own.mapping_registry()
        for task in self.tasks.values():
            config = getattr(task.megatron_module, "config", None)
            if config is not None and own._share_embeddings_and_output_weights(config):  # noqa: SLF001 (its own rule)
                second = own._get_tied_output_hf_name(task, registry)  # noqa: SLF001 (its own rule)
                if second is not None:
                    yield second, task.mapping.hf_param

    def _replicas(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[Replica]:
        """Yield copies of tied tensors: Megatron marks them, Megatron-Bridge leaves them out."""
        own = self._own()
        for live, task in self.tasks.items():
            if own._should_skip_mtp_duplicate_embedding_export(task, self._chunks):  # noqa: SLF001 (its own rule)
                yield Replica(live, task)
        registry = own.mapping_registry()
        for name, tensor in tensors.items():
            if name in self.tasks or not getattr(tensor, "shared_embedding", False):
                continue
            module, local = _owner(self._chunks, tensor)
            mapping = registry.megatron_to_hf_lookup(local) if module is not None else None
            if mapping is not None:
                task = next(iter(self.tasks.values()))
                yield Replica(name, replace(
                    task, param_name=local, global_param_name=local, megatron_module=module,
                    param_weight=tensor, mapping=mapping,
                ))  # fmt: skip

    def export(
        self, weights: Mapping[str, torch.Tensor], answers: Quiet
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield checkpoint tensors by name, made of ``weights``; to be run under `quiet`.

        Raises:
            AdapterError: a conversion failed; the Megatron tensor is named.
        """
        tasks = _Announced(self.tasks, weights, answers)
        stream = self._own().stream_weights_megatron_to_hf(
            self._chunks,
            self._source,
            cpu=False,
            show_progress=False,
            conversion_tasks=tasks,
            merge_adapter_weights=False,
        )
        yield from _named(stream, answers)
        for live, one in self.replicas.items():
            answers.current = live
            task = _apart(one.task, weights[live])
            yield from _named(
                task.mapping.megatron_to_hf(task.param_weight, task.megatron_module).items(), answers
            )


class _Announced(list[Any]):
    """Tasks on other tensors, each announced when its turn comes."""

    def __init__(self, tasks: Mapping[str, Any], weights: Mapping[str, torch.Tensor], answers: Quiet) -> None:
        super().__init__(_apart(task, weights[live]) for live, task in tasks.items())
        self._live, self._answers = list(tasks), answers

    def __iter__(self) -> Iterator[Any]:
        for live, task in zip(self._live, super().__iter__(), strict=True):
            self._answers.current = live
            yield task


def _named(pairs: Iterable[Any], answers: Quiet) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        yield from pairs
    except SynclineError:
        raise
    except Exception as error:
        raise AdapterError(
            "a mapping cannot be followed on this rank's shapes",
            expected="a conversion that cuts, joins, permutes and gathers",
            found=f"{type(error).__name__}: {error}",
            tensor=answers.current,
            hint="do tensor-parallel and expert-parallel sizes divide what the configuration says?",
        ) from error


def _apart(task: Any, weight: torch.Tensor) -> Any:
    for key, value in vars(task.param_weight).items():
        if isinstance(value, bool | int | float | str):
            setattr(weight, key, value)  # Megatron's marks: which dimension is cut, and how
    return replace(task, param_weight=weight, mapping=_copied(task.mapping))


def _copied(mapping: Any) -> Any:
    """Return a mapping, and those inside it, with groups of which only sizes and ranks are true."""
    made = copy.copy(mapping)
    for key, value in vars(mapping).items():
        if (axis := _GROUPS.get(key)) is not None:
            # each stage converts its own layers: no tensor has to come from another stage
            setattr(made, key, Group(1, 0, axis) if key == "pp_group" else Group.like(value, axis))
        elif key in _CACHES:
            setattr(made, key, {})
        elif callable(getattr(type(value), "megatron_to_hf", None)):
            setattr(made, key, _copied(value))
    if hasattr(made, "_pg_collection"):
        made._pg_collection = _Groups(made)  # noqa: SLF001 (mappings made on the way take theirs from it)
    return made


class _Groups:
    """The groups of a mapping, by the names of Megatron's own collection."""

    def __init__(self, mapping: Any) -> None:
        self.pp, self.ep = mapping.pp_group, mapping.ep_group
        self.tp, self.expt_tp = mapping._tp_group, mapping._etp_group  # noqa: SLF001 (as mappings name them)


def _owner(chunks: Sequence[nn.Module], tensor: torch.Tensor) -> tuple[Any, str]:
    """Return the module that a parameter hangs at, and its name without wrappers."""
    for chunk in chunks:
        for path, module in chunk.named_modules():
            for key, parameter in module._parameters.items():  # noqa: SLF001 (where parameters hang)
                if parameter is tensor:
                    name = f"{path}.{key}" if path else key
                    while name.startswith("module."):
                        name = name.removeprefix("module.")
                    return module, name
    return None, ""


def _no_peers(tensor: torch.Tensor, peer: str) -> torch.Tensor:
    raise AdapterError("conversions were gathered before they began", found=peer)
