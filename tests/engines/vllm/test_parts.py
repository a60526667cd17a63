"""Parts of the vLLM adapter that need no vLLM: errors in texts, the main thread, hidden tensors, staging."""

from __future__ import annotations

import functools
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from syncline.adapters.vllm.carry import CarriedError, unpack
from syncline.adapters.vllm.doors import HTTPDoor
from syncline.adapters.vllm.layers import ask
from syncline.adapters.vllm.leaves import leaves
from syncline.adapters.vllm.mainthread import MainThread
from syncline.adapters.vllm.scan import make_llvm_scannable
from syncline.adapters.vllm.staging import make_plan
from syncline.adapters.vllm.temporaries import Temporaries
from syncline.adapters.vllm.twin import without_memory
from syncline.adapters.vllm.weightless import Weightless
from syncline.errors import AdapterError, DeadlineError, DigestMismatchError, RemoteError
from syncline.layout.loader import Spec, trace_loader


def test_an_error_travels_inside_a_text() -> None:
    error = DigestMismatchError(
        "bytes differ", expected="a]b", found='"x"\n', rank="rank 1", tensor="a.weight"
    )
    text = f"Worker failed with error '{CarriedError(error)}', please check the stack trace above"
    found = unpack(text)
    assert type(found) is DigestMismatchError
    assert found.to_wire() == error.to_wire()


def test_a_foreign_error_travels_with_its_traceback() -> None:
    found = unpack(str(CarriedError(ValueError("odd"), "Traceback ...")))
    assert isinstance(found, RemoteError)
    assert found.what == "ValueError: odd"
    assert found.found == "Traceback ..."


@pytest.mark.parametrize("text", ["", "Worker failed", "[syncline-error:00ff]", "[syncline-error:5b5d]"])
def test_a_text_without_an_error(text: str) -> None:
    assert unpack(text) is None


def test_tasks_run_in_the_serving_thread() -> None:
    main, seen = MainThread(), []

    def work() -> str:
        for _ in range(3):
            main.run(lambda: seen.append(threading.get_ident()))
        return f"held: {main.held}"

    assert main.serve(work, 10.0) == "held: True"
    assert seen == [threading.get_ident()] * 3
    assert not main.held


def test_a_task_that_fails_fails_where_it_was_asked_for() -> None:
    main = MainThread()

    def task() -> None:
        raise AdapterError("no")

    def work() -> str:
        with pytest.raises(AdapterError):
            main.run(task)
        return "caught"

    assert main.serve(work, 10.0) == "caught"
    with pytest.raises(AdapterError):
        main.serve(lambda: main.run(task), 10.0)
    with pytest.raises(AdapterError):
        main.run(task)  # nobody serves: in this thread


def test_serving_has_a_deadline() -> None:
    main, go = MainThread(), threading.Event()
    with pytest.raises(DeadlineError):
        main.serve(go.wait, 0.05)
    go.set()


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3), requires_grad=False)
        self.child = nn.Linear(2, 2)


def test_tensors_behind_attributes_closures_and_objects_are_found() -> None:
    layer: Any = _Layer()
    hidden = [torch.full((2,), float(number)) for number in range(5)]
    packed = hidden[0]
    layer.run = lambda x: x @ packed
    layer.kernel = SimpleNamespace(inner={"scale": hidden[1]}, alias=layer.weight.t())
    layer.listed = [hidden[2], (hidden[3],)]
    layer.part = functools.partial(torch.add, hidden[4])
    found = {path: leaf.tensor for path, leaf in leaves(layer).items() if leaf.tensor is not None}
    assert {tensor.data_ptr() for tensor in found.values()} == {tensor.data_ptr() for tensor in hidden}
    assert not any("child" in path or "alias" in path for path in found)


def test_what_cannot_be_looked_into_equals_only_itself() -> None:
    layer: Any = _Layer()
    layer.handle = iter(())
    one = leaves(layer)[".handle"].bits()
    assert one == leaves(layer)[".handle"].bits()
    layer.handle = iter(())
    assert one != leaves(layer)[".handle"].bits()


def _traced() -> Any:
    live = {
        name: torch.empty(size, device="meta") for name, size in {"a": (4, 4), "b": (8,), "c": (64,)}.items()
    }
    live["tied"] = live["b"]

    def load(weights: Any) -> None:
        for name, weight in weights:
            if name == "d":
                live["a"].copy_(-torch.exp(weight))
            else:
                live[name].copy_(weight)

    spec = {"b": Spec((8,), "float32"), "c": Spec((64,), "float32"), "d": Spec((4, 4), "float32")}
    return trace_loader(live, load, spec)


def test_stages_cover_every_storage_once_and_share_one_arena() -> None:
    plan = make_plan(_traced(), {"b": ["layer 1", "head"], "c": ["layer 2"]})
    assert plan.direct == {}
    storages = [storage for stage in plan.stages for storage in stage.storages]
    assert sorted(storages) == list(range(len(plan.storage_nbytes)))
    assert plan.arena_nbytes == 256
    assert sum(plan.storage_nbytes) == 4 * (8 + 64 + 16)
    for stage, groups in zip(plan.stages, plan.groups, strict=True):
        taken = sorted(
            (slot.offset, slot.offset + slot.nbytes)
            for group in groups
            for slot in (*group.live.values(), *group.inputs.values())
        )
        assert len(taken) == len(stage.storages)
        assert taken[-1][1] <= plan.arena_nbytes
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken))
    both = next(group for groups in plan.groups for group in groups if "b" in group.live)
    assert both.layers == ("layer 1", "head")


def test_what_is_written_in_place_comes_first() -> None:
    plan = make_plan(_traced(), {"c": ["layer"]})
    assert plan.stages[0].name == "direct"
    assert plan.stages[0].storages == tuple(plan.direct.values())
    assert plan.direct.keys() == {"b"}


def test_a_door_wants_a_url() -> None:
    with pytest.raises(AdapterError):
        HTTPDoor("file:///etc/passwd")


def test_numbas_llvm_can_be_looked_into() -> None:
    """As vLLM does when a worker starts: ``vars(x).get(...)`` of everything that has a ``__dict__``."""
    from llvmlite.binding import ffi  # noqa: PLC0415 (it is what is changed)

    make_llvm_scannable()
    make_llvm_scannable()
    assert vars(ffi.lib) == {}
    assert callable(ffi.lib.LLVMPY_GetVersionInfo), "it is still the library"


def test_a_constructor_may_compute_with_what_is_no_weight() -> None:
    """With the meta device as the default, the values of the table could not be looked at."""
    with Weightless():
        layer = nn.Linear(4, 3)
        slopes = torch.pow(torch.tensor(2.0), torch.arange(1, 4)).tolist()
        scale = torch.ones(2, dtype=torch.float16, device="cpu")
    assert slopes == [2.0, 4.0, 8.0]
    assert layer.weight.is_meta
    assert layer.bias.is_meta
    assert (scale.is_meta, scale.dtype) == (True, torch.float16)


def test_tensors_that_a_constructor_computed_have_no_memory_either() -> None:
    """A module that the live model has, too, keeps its own."""
    tied: Any = nn.Parameter(torch.log(torch.tensor([2.0, 3.0])), requires_grad=False)
    tied.weight_loader = print  # as vLLM hangs it there
    twin = nn.ModuleList([nn.Module(), nn.Module(), nn.Module()])
    first, second, shared = twin
    first.register_parameter("alpha", tied)
    second.register_parameter("tied", tied)
    first.register_buffer("beta", torch.tensor(0.5))
    shared.register_buffer("table", torch.arange(3.0))
    without_memory(twin, {first, second})
    found: Any = dict(first.named_parameters())["alpha"]
    assert (found.is_meta, tuple(found.shape), found.weight_loader) == (True, (2,), print)
    assert dict(second.named_parameters())["tied"] is found
    assert dict(first.named_buffers())["beta"].is_meta
    assert dict(shared.named_buffers())["table"].tolist() == [0.0, 1.0, 2.0]


def test_memory_that_nobody_holds_is_spoiled_and_restored() -> None:
    """What a kernel that was given a bare address would read is seen to change."""
    layer = nn.Linear(3, 1, bias=False)
    temporaries = Temporaries()
    with torch.no_grad(), temporaries:
        packed = layer.weight.detach() * 2  # held by nobody but a kernel's address of it
        layer.weight.copy_(packed)
        kept = packed + 1
    before = packed.clone()
    with temporaries.spoiled([layer.weight, kept]):
        assert packed.tolist() == [[0.0, 0.0, 0.0]]
        assert layer.weight.tolist() == before.tolist()
        assert kept.tolist() == (before + 1).tolist()
    assert packed.tolist() == before.tolist()


@pytest.mark.parametrize("made_for", [torch.float32, None])
def test_a_kernel_is_asked_in_the_dtype_of_its_layer(made_for: torch.dtype | None) -> None:
    """A router in float32 within a model in bfloat16: its kernel would take the inputs for float32."""
    seen: list[torch.dtype] = []
    method = SimpleNamespace(apply=lambda _layer, x, _bias: seen.append(x.dtype) or x)
    ask(SimpleNamespace(params_dtype=made_for, quant_method=method), torch.ones(2, 2, dtype=torch.bfloat16))
    assert seen == [made_for or torch.bfloat16]
