"""The loader trace with layout rules: the loader for most tensors, rules for those that they take."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from syncline.errors import LayoutError
from syncline.layout.lattice import Map, split
from syncline.layout.layout_rule import LayoutRule, registered_rules
from syncline.layout.loader import trace_loader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from syncline.layout.box import Box
    from syncline.layout.loader import Loader
    from syncline.layout.written import LoaderTrace, Spec, Write

    Tensors = Mapping[str, torch.Tensor]


def trace_with_rules(
    live: Tensors,
    load: Loader,
    checkpoint: Mapping[str, Spec],
    *,
    model: str = "",
    state: Callable[[], Tensors] | None = None,
    rules: Iterable[LayoutRule] | None = None,
) -> LoaderTrace:
    """Trace a loader as `syncline.layout.loader.trace_loader` does, and the rules that hold for the model.

    Args:
        live: as for `trace_loader`.
        load: the loader; it is not given the checkpoint tensors that rules take.
        checkpoint: the checkpoint's tensors by name.
        model: the model's class name, which rules may ask for.
        state: as for `trace_loader`.
        rules: instead of the registered ones.

    Raises:
        LayoutError: as `trace_loader`; or a rule that is wrong, by name: it takes a tensor that another rule
            takes, finds none in a model that it was made for, asks for a live tensor that is not there,
            writes elements that the loader writes, or leaves a tensor that it took unused.
    """
    held = [rule for rule in (registered_rules() if rules is None else rules) if rule.holds_for(model)]
    taken = _taken(held, checkpoint, model)
    rest = {name: spec for name, spec in checkpoint.items() if not any(name in t for t in taken.values())}
    trace = trace_loader(live, load, rest, state=state)
    for rule, specs in taken.items():
        if specs:
            trace = _joined(trace, _trace_rule(rule, specs, trace), rule)
    return trace


def _taken(
    rules: Iterable[LayoutRule], checkpoint: Mapping[str, Spec], model: str
) -> dict[LayoutRule, dict[str, Spec]]:
    """Return what each rule takes of a checkpoint."""
    owner: dict[str, LayoutRule] = {}
    taken: dict[LayoutRule, dict[str, Spec]] = {}
    for rule in rules:
        taken[rule] = {name: spec for name, spec in checkpoint.items() if rule.matches(name)}
        for name in taken[rule]:
            if name in owner:
                raise LayoutError(
                    "two layout rules take one checkpoint tensor",
                    expected="one rule for each tensor",
                    found=f"{owner[name].name!r} and {rule.name!r}",
                    tensor=name,
                )
            owner[name] = rule
        if rule.model is not None and not taken[rule]:
            near = difflib.get_close_matches(rule.match, checkpoint) if isinstance(rule.match, str) else []
            raise LayoutError(
                f"the layout rule {rule.name!r} finds no tensor in a model that it was made for",
                expected=f"a checkpoint tensor of {model} that {rule.match!r} matches",
                found=f"none of {len(checkpoint)}",
                hint=f"the checkpoint has {', '.join(near)}" if near else "look at the checkpoint's names",
            )
    return taken


class _Live(dict[str, Any]):
    """Live tensors by name, for one rule; a name that is not there is the rule's error."""

    def __init__(self, tensors: Tensors, rule: LayoutRule, ties: Mapping[str, str]) -> None:
        super().__init__(tensors)
        self._rule, self._ties = rule, ties

    def __missing__(self, name: str) -> torch.Tensor:
        tied = self._ties.get(name)
        near = [tied] if tied is not None else difflib.get_close_matches(name, self)
        raise LayoutError(
            f"the layout rule {self._rule.name!r} asks for a live tensor that the model does not have",
            expected=f"one of {', '.join(near)}" if near else f"one of {len(self)} live tensors",
            found=name,
            tensor=name,
            hint=f"it is a part or a second name of {tied}" if tied is not None else None,
        )


def _trace_rule(rule: LayoutRule, specs: Mapping[str, Spec], trace: LoaderTrace) -> LoaderTrace:
    """Trace one rule on weightless tensors that look as the loader left the live ones."""
    blank = {
        name: torch.empty_strided(s.shape, s.stride, dtype=getattr(torch, s.dtype), device="meta")
        for name, s in trace.live.items()
    }
    given = _Live(blank, rule, trace.ties)
    try:
        found = trace_loader(blank, lambda weights: rule.rule(dict(weights), given), specs)
    except LayoutError as error:
        if error.what.startswith("the layout rule"):
            raise
        raise LayoutError(
            f"the layout rule {rule.name!r} cannot be traced: {error.what}",
            expected=error.expected,
            found=error.found,
            tensor=error.tensor,
            hint=error.hint,
        ) from error
    for name in (*found.rebound, *found.unused):
        moved = name in found.rebound
        raise LayoutError(
            f"the layout rule {rule.name!r} "
            + ("replaces a live tensor" if moved else "leaves a tensor that it takes without a place"),
            expected="writes in place" if moved else "every matching tensor in some live tensor",
            found=None if moved else found.reasons[name],
            tensor=name,
        )
    return found


def _joined(trace: LoaderTrace, more: LoaderTrace, rule: LayoutRule) -> LoaderTrace:
    """Return the trace of the loader with a rule's added.

    Raises:
        LayoutError: the rule writes an element that something else writes.
    """
    before, added = _written(trace), _written(more)
    for live, mine in added.items():
        for source, part in mine:
            for other, taken in before.get(live, ()):
                if _meet(part, taken):
                    raise LayoutError(
                        f"the layout rule {rule.name!r} writes what is written already",
                        expected="elements that nothing else writes",
                        found=f"elements of {live!r} for {source}, which also come from {other}",
                        tensor=live,
                        hint="let the rule's pattern take every tensor that it replaces",
                    )
    writes: dict[str, tuple[Write, ...]] = {}
    for live in trace.live:
        both = (*trace.writes.get(live, ()), *more.writes.get(live, ()))
        if both:
            writes[live] = tuple(sorted(both, key=lambda write: write.view.offset))
    holes = {live: _common(boxes, more.holes.get(live, ())) for live, boxes in trace.holes.items()}
    return replace(
        trace,
        writes=writes,
        replays=(*trace.replays, *more.replays),
        holes={live: boxes for live, boxes in holes.items() if boxes},
    )


def _written(trace: LoaderTrace) -> dict[str, list[tuple[str, Map]]]:
    """Return by live name who writes which elements: maps whose side a counts from the tensor's first."""
    found: dict[str, list[tuple[str, Map]]] = {}
    for live, writes in trace.writes.items():
        found.setdefault(live, []).extend((write.name, write.map) for write in writes)
    for rerun in trace.replays:
        source = ", ".join(rerun.inputs) or "a constant of the loader"
        for output in rerun.outputs:
            found.setdefault(output.live, []).append((source, output.piece.map))
    return found


def _meet(one: Map, other: Map) -> bool:
    by, view = (other, one) if other.nested() else (one, other)
    return bool(split(view, by)[0]) if by.nested() else True


def _common(some: Iterable[Box], others: Iterable[Box]) -> tuple[Box, ...]:
    both = list(others)
    found = (box.intersect(other) for box in some for other in both)
    return tuple(sorted((box for box in found if box is not None), key=lambda box: box.offset))
