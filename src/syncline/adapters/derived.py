"""Tensors that an engine computes from its weights, recomputed in place after each update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncline import faults
from syncline.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import torch

    from syncline.protocol.ids import VersionKey

    Compute = Callable[[Any], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Rule:
    compute: Compute
    into: dict[str, torch.Tensor]
    inputs: frozenset[str]

    def wanted(self, received: Collection[str] | None) -> bool:
        return received is None or not self.inputs or not self.inputs.isdisjoint(received)


class Derived:
    """The derived tensors of one process; their objects and addresses never change."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._rules: list[_Rule] = []
        self._last: VersionKey | None = None

    def add(self, compute: Compute, into: Mapping[str, torch.Tensor], inputs: Collection[str]) -> None:
        """Register a rule; see `HuggingFaceEngine.derive`."""
        twice = next((name for name in into if name in self.tensors), None)
        if twice is not None:
            raise AdapterError("a tensor is derived twice", tensor=twice)
        self.tensors |= into
        self._rules.append(_Rule(compute, dict(into), frozenset(inputs)))

    def compute(self, model: Any) -> dict[str, torch.Tensor]:
        """Return all derived tensors of another model, by name."""
        found: dict[str, torch.Tensor] = {}
        for rule in self._rules:
            found |= _computed(rule, model)
        return found

    def refresh(self, key: VersionKey, model: Any, received: Collection[str] | None) -> None:
        """Recompute what depends on received weights, once for each version."""
        if key == self._last:
            return
        faults.point("adapters.after_update")
        for rule in self._rules:
            if rule.wanted(received):
                for name, value in _computed(rule, model).items():
                    rule.into[name].copy_(value)
        self._last = key


def _computed(rule: _Rule, model: Any) -> dict[str, torch.Tensor]:
    values = dict(rule.compute(model))
    if values.keys() != rule.into.keys():
        raise AdapterError(
            "a derivation returned other tensors than it was registered for",
            expected=sorted(rule.into),
            found=sorted(values),
        )
    for name, value in values.items():
        if value.shape != rule.into[name].shape:
            raise AdapterError(
                "a derived tensor changed its shape",
                expected=tuple(rule.into[name].shape),
                found=tuple(value.shape),
                tensor=name,
            )
    return {name: value.to(rule.into[name].dtype) for name, value in values.items()}
