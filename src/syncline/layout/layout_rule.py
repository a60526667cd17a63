"""Layout rules: what a user says of checkpoint tensors whose loading cannot be traced.

A loader that looks at the values of a weight, or takes it through code that torch does not see, cannot be
followed. A rule stands in for the loader, for the checkpoint tensors that it matches and for nothing else: a
few lines that put them into the live tensors by ordinary views, copies and operations. Rules are traced like
a loader, on tensors without weights (`syncline.layout.loader_rules`), so that whatever a loader may do a rule
may do: cut, transpose, join, cast, compute.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from syncline.errors import LayoutError

Rule = Callable[[Mapping[str, Any], Mapping[str, Any]], object]
"""``rule(weights, live)``: both are tensors by name."""

Match = str | Callable[[str], bool]
"""Which checkpoint names: an fnmatch pattern, or a predicate."""

_registered: list[LayoutRule] = []


@dataclass(frozen=True, slots=True, eq=False)
class LayoutRule:
    """A registered rule.

    Attributes:
        match: which checkpoint tensors it takes away from the loader.
        rule: puts them into live tensors.
        model: fnmatch pattern of the models it holds for; None: any.
        name: what errors call it.
    """

    match: Match
    rule: Rule
    model: str | None
    name: str

    def matches(self, tensor: str) -> bool:
        """Return whether the rule takes a checkpoint tensor."""
        if isinstance(self.match, str):
            return fnmatch.fnmatchcase(tensor, self.match)
        return bool(self.match(tensor))

    def holds_for(self, model: str) -> bool:
        """Return whether the rule holds for a model."""
        return self.model is None or fnmatch.fnmatchcase(model, self.model)

    def remove(self) -> None:
        """Take the rule back; a second call does nothing."""
        if self in _registered:
            _registered.remove(self)


def register_layout_rule(
    match: Match, rule: Rule, *, model: str | None = None, name: str | None = None
) -> LayoutRule:
    """Say how checkpoint tensors stand in live tensors, where the engine's own loader cannot be traced.

    Args:
        match: the checkpoint tensors: an fnmatch pattern of names, or a predicate on a name. The engine's
            loader is traced without them.
        rule: called as ``rule(weights, live)`` once for each model that is traced, with all tensors that
            match, by checkpoint name, and the live tensors of this process, by the engine's name; both
            without contents, with their shapes and dtypes. It writes the former into the latter in place:
            ``live["w"][:4].copy_(weights["a"].t())``. What it does is recorded as a loader's writes are:
            views and casts are written straight into live memory, computations are replayed after each
            transfer. It must not look at values, must not write what the loader writes too, and every tensor
            that it takes must reach a live tensor.
        model: fnmatch pattern of the class name of the models it holds for. Such a rule must find a tensor
            in each of them; one without a pattern may find none.
        name: what errors call it; the pattern, or the function's name, if left out.

    Returns:
        The rule; its ``remove`` takes it back.

    Raises:
        LayoutError: a rule of this name, or for this very pattern and model, is registered already.
    """
    title = name or (match if isinstance(match, str) else getattr(match, "__qualname__", repr(match)))
    made = LayoutRule(match, rule, model, title)
    for other in _registered:
        if other.name == title or (other.match == match and other.model == model):
            raise LayoutError(
                f"the layout rule {title!r} is registered already",
                expected="one rule for each pattern and model",
                found=f"{other.name!r} for {other.match!r} of model {other.model or 'any'}",
                hint="remove the former rule first, or give this one a name and a pattern of its own",
            )
    _registered.append(made)
    return made


def registered_rules() -> tuple[LayoutRule, ...]:
    """Return the rules that are registered now, in their order."""
    return tuple(_registered)
