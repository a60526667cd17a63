"""The coordinate probe by itself: codes, slabs, holes, duplicates, exporters, and what it catches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import LayoutError
from syncline.layout.box import Box
from syncline.layout.coordinates import Code, Landed, decoded, encoded, fill
from syncline.layout.loader import Spec, trace_loader
from syncline.layout.probe import compare, probe_exporter, probe_loader
from syncline.layout.runs import compress
from syncline.layout.view import View

KINDS = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int32,
    torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.int16,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_digit_is_exact(kind):
    code = Code.of([kind], 1000)
    values = torch.arange(min(code.base, 1 << 16))
    assert torch.equal(decoded(encoded(values, kind)), values)
    assert code.base <= 256 or kind.itemsize > 1
    tensor = torch.empty(1000, dtype=kind)
    landed = Landed(code, 1000)
    for which in code.passes:
        landed.see(which, [fill(tensor, code, which, 0)])
    moved, computed = landed.states()
    assert moved.all()
    assert not computed.any()
    assert torch.equal(landed.numbers, torch.arange(1000))


def test_the_base_is_what_the_narrowest_dtype_holds():
    assert Code.of([torch.bfloat16, torch.float32], 1 << 20).base == 256
    assert Code.of([torch.float16], 10).base == 2048
    assert Code.of([torch.float8_e4m3fn, torch.bfloat16], 10).base == 16
    assert Code.of([torch.int8], 10).base == 128
    assert len([p for p in Code.of([torch.bfloat16], 1 << 20).passes if p.kind == "digit"]) == 3


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_cut_and_a_turn_in_every_dtype(kind):
    name = str(kind).removeprefix("torch.")
    live = {"x": torch.empty(6, 8, dtype=kind)}

    def load(weights):
        for name, w in weights:
            into = live["x"][2:] if name == "a" else live["x"][:2]
            into.copy_(w.t()[:4] if name == "a" else w[:2])

    probed = probe_loader(live, load, {"a": Spec((8, 5), name), "b": Spec((3, 8), name)})
    assert {w.name: (w.box, w.view) for w in probed.writes["x"]} == {
        "a": (Box((0, 0), (8, 4)), View.simple(0, 16, (8, 4), (1, 8))),
        "b": (Box((0, 0), (2, 8)), View.simple(0, 0, (2, 8), (8, 1))),
    }
    assert probed.unused == {"a": (Box((0, 4), (8, 1)),), "b": (Box((2, 0), (1, 8)),)}
    assert not (probed.holes)
    assert not (probed.computed)
    assert not (probed.duplicates)


@pytest.mark.parametrize("slab", [1, 5, 7, 16, 1000])
def test_slabs_change_nothing_but_the_number_of_passes(slab):
    live = {"x": torch.empty(4, 6), "y": torch.empty(6, 4).t()}

    def load(weights):
        for name, w in weights:
            live[name].copy_(w)

    specs = {"x": Spec((4, 6), "float32"), "y": Spec((4, 6), "bfloat16")}
    probed = probe_loader(live, load, specs, slab=slab)
    assert [(w.box, w.view.stride) for w in probed.writes["x"]] == [(Box((0, 0), (4, 6)), ((6,), (1,)))]
    assert sum(w.box.numel for w in probed.writes["y"]) == 24
    assert (probed.passes > 12) == (slab < 48)
    whole = probe_loader(live, load, specs)
    assert {w.name for w in probed.writes["y"]} == {w.name for w in whole.writes["y"]} == {"y"}
    assert whole.writes["y"][0].view == View.simple(0, 0, (4, 6), (1, 4))


def test_holes_constants_computations_and_duplicates():
    live = {"x": torch.empty(8, 4, dtype=torch.bfloat16), "z": torch.empty(3)}

    def load(weights):
        w = dict(weights)
        live["x"][:2] = w["a"]
        live["x"][2:4] = w["a"]
        live["x"][4] = 0
        live["x"][5] = 1
        live["x"][6] = -torch.exp(w["a"][0].float())
        live["z"][1] = w["a"][1, 1] * 2

    probed = probe_loader(live, load, {"a": Spec((2, 4), "bfloat16"), "b": Spec((1,), "bfloat16")})
    assert probed.holes == {"x": (Box((7, 0), (1, 4)),), "z": (Box((0,), (1,)), Box((2,), (1,)))}
    assert sum(box.numel for box in probed.computed["x"]) == 12
    assert sum(box.numel for box in probed.computed["z"]) == 1
    assert probed.duplicates == {"a": (Box((0, 0), (2, 4)),)}
    assert probed.unused == {"b": (Box((0,), (1,)),)}


def test_an_exporter():
    live = {
        "qkv": torch.empty(8, 4),
        "experts": torch.empty(3, 4, 6, dtype=torch.bfloat16),
        "left": torch.empty(2),
    }
    live["tied"] = live["qkv"]

    def export(state):
        q, k = state["qkv"].split([6, 2])
        return {
            "q": q, "k": k.contiguous(), "k2": state["tied"][6:],
            **{f"{e}.w": w.t().contiguous() for e, w in enumerate(state["experts"])},
            "norm": q + 1,
        }  # fmt: skip

    probed = probe_exporter(live, export)
    assert [(w.name, w.box, w.view.stride) for w in probed.writes["2.w"]] == [
        ("experts", Box((2, 0, 0), (1, 4, 6)), ((1,), (1,), (4,)))
    ]
    assert [w.name for w in probed.writes["q"]] == ["qkv"]
    assert probed.duplicates == {"qkv": (Box((6, 0), (2, 4)),)}
    assert probed.unused == {"left": (Box((0,), (2,)),)}
    assert sum(box.numel for box in probed.computed["norm"]) == 24
    assert not probed.holes


def test_a_wrong_trace_is_named():
    specs = {"a": Spec((4, 4), "float32"), "b": Spec((4, 4), "float32")}

    def loader(live, turned):
        def load(weights):
            for name, w in weights:
                live[name].copy_(w.t() if turned and name == "b" else w)

        return load

    meta = {n: torch.empty(4, 4, device="meta") for n in specs}
    real = {n: torch.empty(4, 4) for n in specs}
    trace = trace_loader(meta, loader(meta, turned=False), specs)
    assert compare(trace, probe_loader(real, loader(real, turned=False), specs)) == 2
    with pytest.raises(LayoutError, match="differ") as caught:
        compare(trace, probe_loader(real, loader(real, turned=True), specs))
    assert caught.value.tensor == "b"
    swapped = replace(
        trace, writes=dict(trace.writes) | {"a": tuple(replace(w, name="b") for w in trace.writes["a"])}
    )
    with pytest.raises(LayoutError) as caught:
        compare(swapped, probe_loader(real, loader(real, turned=False), specs))
    assert caught.value.tensor == "a"

    def untouched(weights):
        for name, w in weights:
            if name == "b":
                real[name].copy_(w)

    with pytest.raises(LayoutError, match="untouched") as caught:
        compare(trace, probe_loader(real, untouched, specs))
    assert caught.value.tensor == "a"
    with pytest.raises(LayoutError, match="trace: nothing"):
        compare(
            replace(trace, writes={"b": trace.writes["b"]}),
            probe_loader(real, loader(real, turned=False), specs),
        )


def test_numbers_that_are_only_scattered_are_refused(monkeypatch):
    monkeypatch.setattr("syncline.layout.probe.LIMIT", 100)
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(1))
    live = {"x": torch.empty(4096)}
    probed = probe_loader(
        live, lambda ws: live["x"][:64].copy_(dict(ws)["a"][order[:64]]), {"a": Spec((4096,), "float32")}
    )
    assert 20 < len(probed.writes["x"]) <= 64
    with pytest.raises(LayoutError, match="scattered") as caught:
        probe_loader(live, lambda ws: live["x"].copy_(dict(ws)["a"][order]), {"a": Spec((4096,), "float32")})
    assert caught.value.tensor == "x"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=0, max_size=60), st.data())
def test_compression_loses_nothing(numbers, data):
    places = data.draw(
        st.lists(st.integers(0, 200), min_size=len(numbers), max_size=len(numbers), unique=True)
    )
    groups = data.draw(st.lists(st.integers(0, 1), min_size=len(numbers), max_size=len(numbers)))
    a = np.sort(np.array(places, np.int64))
    found = compress(a, np.array(numbers, np.int64), np.array(groups, np.int64))
    pairs = []
    for group, m in found:
        here = [(m.a, m.b)]
        for n, x, y in m.axes:
            here = [(p + i * x, q + i * y) for p, q in here for i in range(n)]
        pairs += [(group, p, q) for p, q in here]
    assert sorted(pairs) == sorted(zip(groups, a.tolist(), numbers, strict=True))


def test_compression_of_nested_steps():
    grid = np.arange(2 * 3 * 4).reshape(2, 3, 4).transpose(1, 0, 2).reshape(-1)
    found = compress(np.arange(24), grid, np.zeros(24, np.int64))
    assert len(found) == 1
    assert found[0][1].axes == ((3, 8, 4), (2, 4, 12), (4, 1, 1))
