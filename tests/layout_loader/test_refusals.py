"""What a trace cannot say is refused, by name and before it could be wrong."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from syncline.errors import LayoutError
from syncline.layout.loader import Spec, trace_loader

SPECS = {"first": Spec((4, 6), "float32"), "w": Spec((4, 6), "float32"), "one": Spec((1,), "float32")}


def _live():
    return {"x": torch.empty(4, 6, device="meta"), "y": torch.empty(4, 6, device="meta")}


def _refused(load, live=None, state=None):
    live = live or _live()
    with pytest.raises(LayoutError) as caught:
        trace_loader(live, lambda weights: load(live, dict(weights)), SPECS, state=state)
    return caught.value


@pytest.mark.parametrize(
    "decide",
    [
        lambda w: w["w"].max() > 3,
        lambda w: bool((w["w"] > 0).any()),
        lambda w: torch.equal(w["w"], w["w"] + 1),
        lambda w: torch.allclose(w["w"], w["w"]),
        lambda w: float(w["w"].sum()) > 0,
        lambda w: int(w["w"][0, 0]),
        lambda w: w["w"][w["w"] > 0].shape,
        lambda w: w["w"].nonzero(),
        lambda w: w["w"].unique(),
    ],
    ids=["if", "any", "equal", "allclose", "float", "int", "mask", "nonzero", "unique"],
)
def test_a_loader_that_looks_at_values(decide):
    def load(live, w):
        if decide(w) is not None:
            live["x"].copy_(w["w"])

    def strict(live, w):
        load(live, w)
        if decide(w):
            live["x"].neg_()

    error = _refused(strict)
    assert error.what == "a loader decides by the values of a weight"
    assert error.tensor == "w"


@pytest.mark.parametrize(
    "use",
    [
        lambda s: s > 3,
        lambda s: s == 0,
        lambda s: 1.0 / s,
        lambda s: s * 2,
        lambda s: -s,
        bool,
        int,
        float,
        round,
        lambda s: max(s, 1.0),
        lambda s: {s: 1},
        abs,
        lambda s: s // 2,
    ],
)
def test_a_number_from_item_may_only_be_passed_on(use):
    error = _refused(lambda live, w: live["x"].fill_(use(w["one"].item())))
    assert "the value of a weight" in error.what
    assert "one" in str(error.found)


def test_a_number_from_item_can_be_printed_and_passed_by_any_way():
    live = {"x": torch.empty(3, 2, device="meta"), "y": torch.empty(2, device="meta")}

    def load(weights):
        number = dict(weights)["one"].item()
        assert str(number) == repr(number) == f"{number:.2f}" == "<the value of one>"
        live["x"][1:] = number
        live["x"][0].copy_(torch.full((2,), number, device="meta"))
        live["y"].copy_(torch.ones(2, device="meta") * number)

    trace = trace_loader(live, load, SPECS)
    real = {"x": torch.zeros(3, 2), "y": torch.zeros(2)}
    for replay in trace.replays:
        assert replay.inputs == ("one",)
        replay.run({"one": torch.tensor([2.5])}, real)
    assert torch.equal(real["x"], torch.full((3, 2), 2.5))
    assert torch.equal(real["y"], torch.full((2,), 2.5))


def test_a_number_lost_in_a_constant_is_refused():
    def load(live, w):
        live["x"].copy_(torch.full((4, 6), 1.0) + torch.tensor(w["one"].item()))

    error = _refused(load)
    assert "not a number" in str(error.found)
    assert error.tensor == "x"


def test_what_was_there_before_is_not_in_the_checkpoint():
    error = _refused(lambda live, w: live["x"].add_(w["w"]))
    assert error.tensor == "x"
    assert "what x held before the load" in str(error.found)
    assert "add_" in str(error.found)


def test_memory_that_nothing_wrote():
    def load(live, w):
        half = torch.empty_like(w["w"])
        half[:2].copy_(w["w"][:2])
        live["x"].copy_(half.neg())

    assert "nothing had written" in str(_refused(load).found)


def test_random_numbers():
    error = _refused(lambda live, w: live["x"].copy_(w["w"]).add_(torch.rand_like(w["w"])))
    assert "random" in str(error.found)
    assert error.tensor == "x"


def test_a_tensor_of_unknown_contents():
    stranger = torch.empty(4, 6, device="meta")
    error = _refused(lambda live, w: live["x"].copy_(stranger))
    assert "unknown contents" in str(error.found)
    assert error.tensor == "x"


def test_what_never_reaches_a_live_tensor_is_nobodys_business():
    def load(weights):
        w = dict(weights)
        live["y"].add_(w["w"])
        live["y"].copy_(w["first"])
        torch.rand_like(w["w"]).add_(1)
        live["x"].copy_(w["w"])

    live = _live()
    trace = trace_loader(live, load, SPECS)
    assert not trace.replays
    assert trace.reasons == {"one": "never read"}


def test_a_live_tensor_with_memory_may_be_read_and_never_written():
    table = torch.tensor([2, 0, 1, 3])
    live = _live() | {"table": table}

    def load(weights):
        for name, w in weights:
            if name == "w":
                for i in range(4):
                    live["x"][int(table[i])].copy_(w[i])

    trace = trace_loader(live, load, SPECS)
    assert [w.box.offset for w in trace.writes["x"]] == [(1, 0), (0, 0), (3, 0)]
    error = _refused(lambda live, w: live["table"].fill_(1), live)
    assert error.tensor == "table"
    assert table.tolist() == [2, 0, 1, 3]


def test_weights_that_leave_the_device():
    def load(live, w):
        own = torch.zeros(4, 6)
        own.copy_(w["w"])

    error = _refused(load)
    assert "memory of its own" in error.what
    assert "NumPy" not in str(error)
    assert _refused(lambda live, w: w["w"].numpy()).found
    assert _refused(lambda live, w: w["w"].tolist()).found


def test_a_move_to_another_device_is_a_copy():
    live = _live()
    trace = trace_loader(live, lambda ws: live["x"].copy_(dict(ws)["w"].to("cpu", non_blocking=True)), SPECS)
    assert trace.writes["x"][0].name == "w"


def test_a_resized_tensor():
    def load(live, w):
        w["w"].resize_(8, 6)
        live["x"].copy_(w["w"][:4])

    assert _refused(load).tensor


def test_a_write_through_elements_of_another_size():
    error = _refused(lambda live, w: live["x"].view(torch.int16).copy_(w["w"].view(torch.int16)))
    assert "another size" in error.what


def test_a_refusal_that_the_loader_swallows():
    def load(live, w):
        try:
            if w["w"].max() > 3:
                live["x"].neg_()
        except Exception:
            live["x"].copy_(w["w"])

    assert "decides by the values" in _refused(load).what


def test_any_other_failure_names_the_weight():
    def load(weights):
        for name, _ in weights:
            if name == "w":
                raise KeyError("layers.7.mystery")

    with pytest.raises(LayoutError, match=r"layers\.7\.mystery") as caught:
        trace_loader(_live(), load, SPECS)
    assert caught.value.tensor == "w"
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_lost_live_tensor():
    live = _live()
    with pytest.raises(LayoutError, match="removes a live tensor") as caught:
        trace_loader(live, list, SPECS, state=lambda: {"x": live["x"]})
    assert caught.value.tensor == "y"


def test_a_live_tensor_that_got_memory():
    live = _live()
    with pytest.raises(LayoutError, match="one with memory") as caught:
        trace_loader(live, list, SPECS, state=lambda: live | {"y": torch.zeros(4, 6)})
    assert caught.value.tensor == "y"


def test_a_replaced_parameter_is_followed():
    module = torch.nn.Linear(6, 4, bias=False, device="meta")

    def load(weights):
        turned = dict(weights)["w"].t().contiguous()
        module.weight = torch.nn.Parameter(turned, requires_grad=False)
        module.register_buffer("extra", dict(SPECS) and torch.zeros(3, device="meta"))

    live = dict(module.named_parameters())
    trace = trace_loader(live, load, SPECS, state=lambda: module.state_dict(keep_vars=True))
    assert trace.live["weight"].shape == (6, 4)
    assert trace.rebound == ("weight", "extra")
    assert trace.writes["weight"][0].view.stride == ((1,), (4,))
    assert trace.replays[0].live == ("extra",)


def test_parts_of_a_live_tensor_and_tensors_that_share_some():
    whole = torch.empty(8, 6, device="meta")
    live = {"part": whole[2:4], "whole": whole, "again": whole}

    def load(weights):
        live["part"].copy_(dict(weights)["w"][:2])

    trace = trace_loader(live, load, SPECS)
    assert trace.ties == {"part": "whole", "again": "whole"}
    assert [w.view.offset for w in trace.writes["whole"]] == [12]
    with pytest.raises(LayoutError, match="share some") as caught:
        trace_loader({"a": whole[:5], "b": whole[3:7]}, list, SPECS)
    assert caught.value.tensor == "b"


def test_a_pool_that_outlives_the_trace_is_traced_and_left_alone_afterwards():
    live = _live()
    submit, start = ThreadPoolExecutor.submit, threading.Thread.start
    with ThreadPoolExecutor(2) as pool:
        pool.submit(int).result()

        def load(weights):
            w = dict(weights)
            tasks = [pool.submit(live["x"][i].copy_, w["w"][i]) for i in range(4)]
            del tasks  # not even waited for

        trace = trace_loader(live, load, SPECS)
        assert [w.box.size for w in trace.writes["x"]] == [(4, 6)]
        real = torch.zeros(3)
        pool.submit(real.fill_, 2.0).result()
        assert real.tolist() == [2, 2, 2]
    assert ThreadPoolExecutor.submit is submit
    assert threading.Thread.start is start


def test_threads_of_others_are_not_traced():
    seen = []
    go, done = threading.Event(), threading.Event()

    def other():
        go.wait(10)
        seen.append(torch.ones(2).add_(1).tolist())
        done.set()

    thread = threading.Thread(target=other)
    thread.start()

    def load(weights):
        go.set()
        assert done.wait(10)
        live["x"].copy_(dict(weights)["w"])

    live = _live()
    trace = trace_loader(live, load, SPECS)
    thread.join()
    assert seen == [[2.0, 2.0]]
    assert list(trace.writes) == ["x"]


def test_an_error_in_a_thread_reaches_the_caller():
    def load(live, w):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: w["w"].max() > 3 and None).result()
            pool.submit(lambda: bool(w["w"].max() > 3)).result()

    assert "decides by the values" in _refused(load).what


def test_a_thread_that_never_ends(monkeypatch):
    monkeypatch.setattr("syncline.layout.loader._THREAD_SECONDS", 0.2)
    stop = threading.Event()

    def load(live, w):
        threading.Thread(target=stop.wait, args=(10,), name="endless").start()

    began = time.monotonic()
    error = _refused(load)
    stop.set()
    assert "still run" in error.what
    assert "endless" in str(error.found)
    assert time.monotonic() - began < 5


def test_replays_refuse_other_inputs_and_write_nothing_then():
    live = {"x": torch.empty(4, 6, device="meta"), "y": torch.empty(4, 6, device="meta")}

    def load(weights):
        w = dict(weights)
        live["x"].copy_(w["w"]).neg_()
        live["y"].copy_(live["x"] * w["one"])

    trace = trace_loader(live, load, SPECS)
    (replay,) = trace.replays  # they share an operation
    assert set(replay.inputs) == {"w", "one"}
    real = {"x": torch.zeros(4, 6), "y": torch.zeros(4, 6)}
    for inputs in ({"w": torch.ones(4, 6)}, {"w": torch.ones(4, 6), "one": torch.ones(2)}):
        with pytest.raises(LayoutError) as caught:
            replay.run(inputs, real)
        assert caught.value.tensor == "one"
        assert not real["x"].any()
    with pytest.raises(LayoutError, match="cannot write"):
        replay.run({"w": torch.ones(4, 6), "one": torch.ones(1)}, {"x": torch.zeros(4, 6)})
    replay.run({"w": torch.ones(4, 6), "one": torch.full((1,), 3.0)}, real)
    assert real["x"].unique().tolist() == [-1]
    assert real["y"].unique().tolist() == [-3]
