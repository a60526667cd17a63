"""Tracing an exporter: views are recorded, everything else is refused by name."""

from __future__ import annotations

import pytest
import torch

from syncline.errors import LayoutError
from syncline.layout.box import Box
from syncline.layout.export import Part, trace_export


def _meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_copy_is_its_source():
    def export(state):
        w = state["fused"]
        gate, up = w.chunk(2, dim=1)
        return {
            **{f"e{i}.gate": t.squeeze(0).contiguous() for i, t in enumerate(gate.split(1))},
            **{f"e{i}.up": t[0].clone().to(torch.bfloat16).cpu() for i, t in enumerate(up.split(1))},
            "turned": w.transpose(1, 2).contiguous(),
            "odd": w[:, 1::2],
        }

    sources = trace_export({"fused": _meta(3, 8, 5)}, export)
    assert sources["e1.gate"].parts == (Part("fused", 40, Box((0, 0), (4, 5)), (5, 1)),)
    assert sources["e2.up"].parts == (Part("fused", 100, Box((0, 0), (4, 5)), (5, 1)),)
    assert sources["turned"].parts[0].stride == (40, 1, 5)
    assert sources["odd"].parts[0].stride == (40, 10, 1)
    assert sources["odd"].dtype == "bfloat16"


def test_joined_tensors_are_parts():
    def export(state):
        q, k, v = (state[n] for n in "qkv")
        return {"qkv": torch.cat([q, torch.cat([k, v])]), "stacked": torch.stack([k, v], dim=1)}

    sources = trace_export({n: _meta(4, 3) for n in "qkv"}, export)
    assert [(p.live, p.box.offset, p.box.size) for p in sources["qkv"].parts] == [
        ("q", (0, 0), (4, 3)),
        ("k", (4, 0), (4, 3)),
        ("v", (8, 0), (4, 3)),
    ]
    assert [(p.live, p.box.offset, p.box.size) for p in sources["stacked"].parts] == [
        ("k", (0, 0, 0), (4, 1, 3)),
        ("v", (0, 1, 0), (4, 1, 3)),
    ]


def test_tied_names_count_as_the_first():
    tied = _meta(4, 3)
    sources = trace_export({"embed": tied, "head": tied}, dict)
    assert {s.parts[0].live for s in sources.values()} == {"embed"}


@pytest.mark.parametrize(
    ("compute", "op"),
    [
        (lambda w: -torch.exp(w), "neg"),
        (lambda w: w.float(), "_to_copy"),
        (lambda w: w.new_zeros(4, 6).copy_(w), "copy_"),
        (lambda w: torch.cat([w, w], dim=0)[1:3], "cat"),
        (lambda w: w.t().contiguous().view(24), "view"),
        (lambda w: w.t().reshape(-1), "view"),
        (lambda w: w.view(torch.int16), "reinterpretation"),
    ],
)
def test_what_is_computed_is_refused_by_name(compute, op):
    with pytest.raises(LayoutError, match="computes") as caught:
        trace_export({"w": _meta(4, 6)}, lambda state: {"ckpt.w": compute(state["w"])})
    assert caught.value.tensor == "ckpt.w"
    assert op in (caught.value.found or "")


def test_a_transform_in_place_after_the_copy_is_refused_and_live_memory_untouched():
    real = torch.full((4, 6), 2.0)

    def export(state):
        out = state["a_log"].clone()
        out.exp_().neg_()
        return {"a": out}

    with pytest.raises(LayoutError, match="writes into a tensor") as caught:
        trace_export({"a_log": _meta(4, 6)}, export)
    assert caught.value.tensor == "a_log"
    with pytest.raises(LayoutError, match="live memory is never touched"):
        trace_export({"a_log": real}, export)
    assert torch.equal(real, torch.full((4, 6), 2.0))


def test_an_exporter_that_rebinds_reads_or_fails_is_refused():
    def rebind(state):
        state["w"].data = torch.empty(4, 6, device="meta", dtype=torch.bfloat16)
        return {"w": state["w"]}

    with pytest.raises(LayoutError):
        trace_export({"w": _meta(4, 6)}, rebind)
    with pytest.raises(LayoutError, match="cannot be traced"):
        trace_export({"w": _meta(1)}, lambda state: {"w": state["w"] * state["w"].item()})
    with pytest.raises(LayoutError, match="no tensor"):
        trace_export({"w": _meta(1)}, lambda state: {"w": len(state)})


def test_fused_attention_lands_alike_as_weight_lora_factor_and_draft_layer():
    """B05: side paths have the trainer's groups, too; here 2 groups of 2 query heads, a key and a value head.

    Read as [all queries | keys | values], the fused tensor would give every head but the first a wrong one.
    """
    groups, queries, size = 2, 2, 2
    rows = {
        "q": [0, 1, 2, 3, 8, 9, 10, 11],  # of the fused tensor: q q k v | q q k v, two rows a head
        "k": [4, 5, 12, 13],
        "v": [6, 7, 14, 15],
    }
    fused = {"layers.0.qkv": 3, "layers.0.qkv.lora_B": 2, "draft.0.qkv": 3}

    def export(state):
        out = {}
        for name, tensor in state.items():
            split = [g.split([queries * size, size, size]) for g in tensor.chunk(groups)]
            parts = zip("qkv", zip(*split, strict=True), strict=True)
            out |= {f"{name}.{x}": torch.cat(part) for x, part in parts}
        return out

    sources = trace_export({name: _meta(16, columns) for name, columns in fused.items()}, export)
    for name, columns in fused.items():
        live = torch.arange(16 * columns).view(16, columns)
        for x, want in rows.items():
            found = torch.full((len(want), columns), -1)
            for part in sources[f"{name}.{x}"].parts:
                low, high = part.box.offset[0], part.box.offset[0] + part.box.size[0]
                assert part.live == name
                found[low:high] = live.as_strided(part.box.size, part.stride, part.offset)
            assert found.tolist() == live[want].tolist(), (name, x)
