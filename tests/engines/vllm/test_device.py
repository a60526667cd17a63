"""What the adapter needs beside a GPU's memory, without a GPU: order, pins, hooks that read, older verbs."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from syncline.adapters.vllm.doors import LLMDoor
from syncline.adapters.vllm.leaves import _sums
from syncline.adapters.vllm.pins import Pins
from syncline.adapters.vllm.reading import reads
from syncline.adapters.vllm.streams import Ordered
from syncline.errors import AdapterError


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_pins_hold_while_contents_change() -> None:
    model = _model()
    pins = Pins(model, "rank 0")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    pins.check()
    model[0].weight = nn.Parameter(model[0].weight.data)  # another object over the same memory
    pins.check()


@pytest.mark.parametrize("how", ["data", "parameter", "module", "buffer"])
def test_pins_notice_whatever_moves(how: str) -> None:
    model = _model()
    pins = Pins(model, "rank 3")
    if how == "data":
        model[2].weight.data = model[2].weight.data.clone()
    elif how == "parameter":
        model[2].weight = nn.Parameter(model[2].weight.data.clone())
    elif how == "module":
        model[2] = nn.Linear(4, 2)
    else:
        model[1].register_buffer("running_mean", torch.zeros(4))
    with pytest.raises(AdapterError, match="a live tensor moved") as caught:
        pins.check()
    assert caught.value.tensor == ("1.running_mean" if how == "buffer" else "2.weight")
    assert caught.value.rank == "rank 3"


def test_a_hook_that_reads_a_view_of_a_weight_is_told_from_one_that_fills_its_own() -> None:
    weight, own = torch.ones(4, 4), torch.zeros(2)
    assert not reads(lambda: own.fill_(1.0), [weight])
    assert reads(lambda: own.copy_(weight[1, :2]), [weight])
    assert own.tolist() == [1.0, 1.0]


def test_sums_tell_contents_apart_wherever_they_differ() -> None:
    octets = torch.randint(0, 256, (4099,), dtype=torch.uint8)
    seen = {_sums(octets)}
    for place in (0, 3, 2048, 4095, 4098):
        changed = octets.clone()
        changed[place] ^= 128
        seen.add(_sums(changed))
    swapped = octets.clone()
    swapped[:8] = torch.tensor([1, 0, 0, 0, 2, 0, 0, 0], dtype=torch.uint8)
    seen.add(_sums(swapped))
    swapped[:8] = torch.tensor([2, 0, 0, 0, 1, 0, 0, 0], dtype=torch.uint8)
    seen.add(_sums(swapped))
    assert len(seen) == 8
    assert _sums(octets.clone()) in seen


def test_tasks_run_where_the_model_lives_and_raise_where_they_were_asked_for() -> None:
    ran: list[int] = []

    def run(task: Any) -> None:
        thread = threading.Thread(target=task)
        thread.start()
        thread.join()

    Ordered(run, torch.device("cpu")).run(lambda: ran.append(threading.get_ident()))
    assert ran != [threading.get_ident()]

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Ordered(lambda task: task(), torch.device("cpu")).run(fail)


class _Llm:
    """Verbs of a vLLM that takes no version and cannot shut a transfer engine down."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, request: dict[str, Any]) -> None:
        self.calls.append(request["update_info"])

    def finish_weight_update(self) -> None:
        self.calls.append("finish")


def test_an_older_vllm_leaves_by_an_update_that_is_none() -> None:
    llm = _Llm()
    door = LLMDoor(llm)
    door.finish("1.2", 1.0)
    door.leave(1.0)
    assert llm.calls == ["finish", "start", {"verify": "leave"}, "finish"]


def test_a_newer_vllm_is_told_the_version_and_shut_down_by_its_own_verb() -> None:
    calls: list[Any] = []
    llm = SimpleNamespace(
        finish_weight_update=calls.append,
        shutdown_weight_transfer_engine=lambda: calls.append("shutdown"),
    )
    door = LLMDoor(llm)
    door.finish("1.2", 1.0)
    door.leave(1.0)
    assert calls == ["1.2", "shutdown"]
