"""The twin check finds what a trace got wrong, and says where."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from syncline.errors import EffectiveMismatchError
from syncline.layout.dtype import BY_NAME
from syncline.layout.loader import Spec, trace_loader
from syncline.verify.twin import random_tensor, twin_check

SPECS = {"q": Spec((4, 6), "bfloat16"), "k": Spec((2, 6), "bfloat16"), "a": Spec((5,), "float32")}


def _live(device):
    return {
        "qkv": torch.zeros(8, 6, dtype=torch.bfloat16, device=device),
        "a": torch.zeros(5, device=device),
    }


def _loader(live, start=4, transform=True):
    def load(weights):
        for name, w in weights:
            if name == "a":
                live["a"].copy_(w)
                if transform:
                    live["a"].copy_(-torch.exp(live["a"].clamp(-8, 8)))
            else:
                live["qkv"][start * (name == "k") :][: w.shape[0]].copy_(w)

    return load


def _trace(**options):
    meta = _live("meta")
    return trace_loader(meta, _loader(meta, **options), SPECS)


def test_a_right_trace():
    real = _live("cpu")
    report = twin_check(_trace(), real, _loader(real), SPECS, 1)
    assert (report.tensors, report.elements, report.written, report.replayed, report.untouched) == (
        2,
        53,
        36,
        5,
        12,
    )
    assert report.groups == 1


def test_a_copy_that_was_traced_to_another_place():
    real = _live("cpu")
    with pytest.raises(EffectiveMismatchError, match="'qkv'") as caught:
        twin_check(_trace(start=4), real, _loader(real, start=5), SPECS, 1)
    assert caught.value.tensor == "k"
    assert "[4, 0]" in str(caught.value.expected)


def test_a_transform_that_was_missed():
    """B109: a trace that records the copy and not the -exp(x) after it is coverage-complete and wrong."""
    real = _live("cpu")
    with pytest.raises(EffectiveMismatchError, match="'a'") as caught:
        twin_check(_trace(transform=False), real, _loader(real), SPECS, 1)
    assert caught.value.tensor == "a"


def test_a_write_that_torch_does_not_see():
    real = _live("cpu")
    load = _loader(real)

    def sly(weights):
        load(weights)
        real["qkv"].view(torch.int16).numpy()[7, 5] += 1

    with pytest.raises(EffectiveMismatchError, match="a hole") as caught:
        twin_check(_trace(), real, sly, SPECS, 1)
    assert "[7, 5]" in str(caught.value.expected)
    assert caught.value.tensor is None


def test_a_replay_of_other_operations():
    trace = _trace()
    real = _live("cpu")
    with pytest.raises(EffectiveMismatchError, match="'a'") as caught:
        twin_check(replace(trace, replays=()), real, _loader(real), SPECS, 1)
    assert caught.value.tensor is None


def test_a_twin_laid_out_otherwise():
    trace = _trace()
    real = _live("cpu") | {"a": torch.zeros(6)}
    with pytest.raises(EffectiveMismatchError, match="laid out"):
        twin_check(trace, real, list, SPECS, 1)


@pytest.mark.parametrize(
    "kind", [name for name in BY_NAME if "complex32" not in name and "float4" not in name]
)
def test_random_contents_are_finite_varied_and_repeatable(kind):
    spec = Spec((40, 50), kind)
    one = random_tensor(spec, 3, "w")
    assert torch.equal(one.view(torch.uint8), random_tensor(spec, 3, "w").view(torch.uint8))
    assert not torch.equal(one.view(torch.uint8), random_tensor(spec, 3, "v").view(torch.uint8))
    assert not torch.equal(one.view(torch.uint8), random_tensor(spec, 4, "w").view(torch.uint8))
    if one.is_complex():
        one = torch.view_as_real(one)
    if one.is_floating_point():
        values = one.to(torch.float64 if one.element_size() > 1 else torch.float32)
        assert values.isfinite().all()
        assert (values < 0).any() or kind == "float8_e8m0fnu"
    assert (
        len(set(one.flatten().view(torch.uint8).tolist())) == (2 if kind == "bool" else 256)
        or "float8" in kind
    )
