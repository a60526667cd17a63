"""Layout rules: what a user may say where a loader cannot be traced, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import syncline
from syncline.errors import EffectiveMismatchError, LayoutError
from syncline.layout.layout_rule import LayoutRule
from syncline.layout.loader import Spec, trace_loader
from syncline.layout.loader_rules import trace_with_rules
from syncline.verify.twin import twin_check

if TYPE_CHECKING:
    from collections.abc import Callable

SPECS = {
    "q": Spec((4, 6), "bfloat16"),
    "k": Spec((6, 2), "bfloat16"),
    "a": Spec((5,), "float32"),
}


def tensors(device: str) -> dict[str, torch.Tensor]:
    return {
        "qkv": torch.zeros(8, 6, dtype=torch.bfloat16, device=device),
        "a": torch.zeros(5, device=device),
    }


def loader(live: dict[str, torch.Tensor]) -> Callable[[Any], None]:
    """Two of its three branches ask for values."""

    def load(weights: Any) -> None:
        for name, w in weights:
            if name == "q":
                live["qkv"][:4].copy_(w)
            elif name == "k":
                live["qkv"][4:6].copy_(w.t() if float(w.view(-1)[0]) > 0 else w.t().clone())
            elif bool((w > 0).any()) or True:
                live["a"].copy_(w.abs())

    return load


def rule(match: Any, place: Any, model: str | None = None, name: str = "mine") -> LayoutRule:
    return LayoutRule(match, place, model, name)


def right_k(weights: Any, live: Any) -> None:
    live["qkv"][4:6].copy_(weights["k"].t())


def right_a(weights: Any, live: Any) -> None:
    live["a"].copy_(weights["a"].abs())


RIGHT = [rule("k", right_k), rule(lambda name: name == "a", right_a, name="other")]


def traced(rules: list[LayoutRule], model: str = "Net") -> Any:
    live = tensors("meta")
    return trace_with_rules(live, loader(live), SPECS, model=model, rules=rules)


def test_without_rules_it_is_the_trace_which_refuses() -> None:
    live = tensors("meta")
    with pytest.raises(LayoutError, match="values of a weight"):
        trace_loader(live, loader(live), SPECS)
    with pytest.raises(LayoutError, match="values of a weight"):
        traced([])


def test_rules_explain_what_the_loader_really_does() -> None:
    trace = traced(RIGHT)
    assert {name: [w.name for w in writes] for name, writes in trace.writes.items()} == {"qkv": ["q", "k"]}
    assert [replay.inputs for replay in trace.replays] == [("a",)]
    assert trace.unused == ()
    assert [(box.offset, box.size) for box in trace.holes["qkv"]] == [((6, 0), (2, 6))]
    assert "a" not in trace.holes
    assert trace.names == {"qkv": ("q", "k"), "a": ("a",)}
    real = tensors("cpu")
    report = twin_check(trace, real, loader(real), SPECS, 3)
    assert (report.written, report.replayed, report.untouched) == (36, 5, 12)


def test_a_wrong_rule_is_found_by_the_twin_check() -> None:
    def wrong(weights: Any, live: Any) -> None:
        live["qkv"][4:6].copy_(weights["k"].reshape(2, 6))

    real = tensors("cpu")
    with pytest.raises(EffectiveMismatchError, match="'qkv'") as caught:
        twin_check(traced([rule("k", wrong), RIGHT[1]]), real, loader(real), SPECS, 3)
    assert caught.value.tensor == "k"


def over_q(weights: Any, live: Any) -> None:
    live["qkv"][3:5].copy_(weights["k"].t())


def elsewhere(weights: Any, live: Any) -> None:
    live["kqv"].copy_(weights["k"])


def nowhere(weights: Any, live: Any) -> None:
    pass


def looks(weights: Any, live: Any) -> None:
    if float(weights["k"].view(-1)[0]) > 0:
        right_k(weights, live)


def replaces(weights: Any, live: Any) -> None:
    live["qkv"].data = torch.empty_like(live["qkv"])
    right_k(weights, live)


@pytest.mark.parametrize(
    ("place", "complaint", "tensor"),
    [
        (over_q, "'mine' writes what is written already", "qkv"),
        (elsewhere, "'mine' asks for a live tensor", "kqv"),
        (nowhere, "'mine' leaves a tensor that it takes without a place", "k"),
        (looks, "'mine' cannot be traced", "k"),
        (replaces, "'mine' replaces a live tensor", "qkv"),
    ],
)
def test_a_rule_that_cannot_be_right_is_named(place: Any, complaint: str, tensor: str) -> None:
    with pytest.raises(LayoutError, match=complaint) as caught:
        traced([rule("k", place), RIGHT[1]])
    assert caught.value.tensor == tensor


def test_two_rules_for_one_tensor() -> None:
    with pytest.raises(LayoutError, match="two layout rules take one") as caught:
        traced([*RIGHT, rule("?", right_k, name="third")])
    assert caught.value.tensor == "k"
    assert "'mine' and 'third'" in str(caught.value.found)


def test_two_rules_that_write_one_place() -> None:
    def both(weights: Any, live: Any) -> None:
        live["qkv"][5:7, :5].copy_(weights["a"].expand(2, 5))

    with pytest.raises(LayoutError, match="'other' writes what is written already"):
        traced([RIGHT[0], rule("a", both, name="other")])


def test_rules_of_a_model() -> None:
    with pytest.raises(LayoutError, match="finds no tensor in a model") as caught:
        traced([*RIGHT, rule("kk", right_k, "N*", "third")])
    assert "has k" in str(caught.value.hint)
    assert traced([*RIGHT, rule("kk", right_k, "Other", "third")]).unused == ()
    assert traced([*RIGHT, rule("kk", right_k, None, "third")]).unused == ()


def test_registration() -> None:
    made = syncline.register_layout_rule("a.*.weight", right_k)
    try:
        with pytest.raises(LayoutError, match="'other' is registered already"):
            syncline.register_layout_rule("a.*.weight", right_a, name="other")
        with pytest.raises(LayoutError, match="is registered already"):
            syncline.register_layout_rule("b", right_a, name="a.*.weight")
        other = syncline.register_layout_rule("a.*.weight", right_a, model="Net", name="third")
        other.remove()
    finally:
        made.remove()
        made.remove()
    syncline.register_layout_rule("a.*.weight", right_a).remove()


def test_registered_rules_are_used() -> None:
    made = [syncline.register_layout_rule(r.match, r.rule, model="Net", name=r.name) for r in RIGHT]
    live = tensors("meta")
    try:
        assert trace_with_rules(live, loader(live), SPECS, model="Net").unused == ()
        with pytest.raises(LayoutError, match="values of a weight"):
            trace_with_rules(live, loader(live), SPECS, model="Other")
    finally:
        for one in made:
            one.remove()
