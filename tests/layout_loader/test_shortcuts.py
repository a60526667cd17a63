"""The shortcuts of a trace: put back afterwards, and taken only where torch would do the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from syncline.errors import LayoutError
from syncline.layout.loader import Spec, trace_loader

SPEC = {"w": Spec((4, 4), "float32")}


def _live() -> dict[str, torch.Tensor]:
    return {"w": torch.empty(4, 4, device="meta")}


def test_the_class_is_as_before() -> None:
    before = dict(vars(torch.Tensor))
    live = _live()
    during: list[bool] = []

    def load(weights: Any) -> None:
        during.append(dict(vars(torch.Tensor)) == before)
        for _, weight in weights:
            live["w"].copy_(weight)

    trace_loader(live, load, SPEC)
    assert during == [False]
    assert dict(vars(torch.Tensor)) == before
    with pytest.raises(LayoutError):
        trace_loader(live, lambda weights: bool(next(iter(weights))[1].sum() > 0), SPEC)
    assert dict(vars(torch.Tensor)) == before


def test_a_mode_of_the_loaders_own_sees_everything() -> None:
    seen: list[str] = []

    class Own(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    live = _live()

    def load(weights: Any) -> None:
        for _, weight in weights:
            live["w"][:2].copy_(weight.narrow(0, 0, 2))
            with Own():
                live["w"][2:].copy_(weight.narrow(0, 2, 2))

    trace = trace_loader(live, load, SPEC)
    assert sum(name.startswith("aten.slice") for name in seen) == 2
    assert sum(name.startswith("aten.copy_") for name in seen) == 1
    assert not trace.holes
    (write,) = trace.writes["w"]
    assert write.box.size == (4, 4)


@pytest.mark.parametrize("what", ["start", "index"])
def test_a_view_that_asks_for_a_value_is_refused(what: str) -> None:
    live = _live()

    def load(weights: Any) -> None:
        for _, weight in weights:
            place = weight[0, 0].to(torch.int64)
            live["w"][0:1].copy_(weight.narrow(0, place, 1) if what == "start" else weight[place : place + 1])

    with pytest.raises(LayoutError, match=r"value"):
        trace_loader(live, load, SPEC)


def test_subclasses_and_keywords_take_the_long_way() -> None:
    class Odd(torch.nn.Parameter):
        pass

    live: dict[str, torch.Tensor] = {"w": Odd(torch.empty(4, 4, device="meta"), requires_grad=False)}

    def load(weights: Any) -> None:
        for _, weight in weights:
            live["w"].data.narrow(dim=0, start=1, length=3).copy_(weight.narrow(0, 0, 3), non_blocking=True)

    trace = trace_loader(live, load, SPEC)
    (write,) = trace.writes["w"]
    assert (write.box.offset, write.box.size, write.view.offset) == ((0, 0), (3, 4), 4)
    assert [box.size for box in trace.holes["w"]] == [(1, 4)]
