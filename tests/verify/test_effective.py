"""The comparison behind level `effective`: it must name what differs, where, and by how much."""

from __future__ import annotations

import math

import pytest
import torch

from syncline.errors import EffectiveMismatchError
from syncline.verify.effective import compare


def test_equal_tensors_have_no_difference() -> None:
    live = {"a": torch.randn(5, 7), "b": torch.zeros((), dtype=torch.bfloat16), "e": torch.empty(0, 3)}
    report = compare(live, {k: v.clone() for k, v in live.items()})
    assert (report.tensors, report.elements, report.diffs) == (3, 36, ())
    report.raise_on_difference("instance a")


def test_one_flipped_bit_is_named_with_index_and_ulp() -> None:
    fresh = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    live = fresh.clone()
    live[2, 3] = torch.nextafter(live[2, 3], torch.tensor(math.inf))
    (diff,) = compare({"w": live}, {"w": fresh}).diffs
    assert (diff.mismatches, diff.first, diff.max_ulp) == (1, (2, 3), 1)
    assert 0 < diff.max_abs < 1e-5


def test_ulp_counts_across_zero() -> None:
    live, fresh = torch.tensor([1e-45, 1.0]), torch.tensor([-1e-45, 1.0])
    (diff,) = compare({"w": live}, {"w": fresh}).diffs
    assert diff.max_ulp == 2


def test_negative_zero_and_nan_payloads_are_differences() -> None:
    zero = compare({"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])}).diffs
    assert zero[0].mismatches == 1
    nan = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    assert compare({"w": nan[:1]}, {"w": nan[1:]}).diffs[0].mismatches == 1
    assert compare({"w": nan}, {"w": nan.clone()}).diffs == ()


def test_non_contiguous_live_tensors_are_compared_in_place() -> None:
    base = torch.randn(6, 8)
    live = base.t()[1:5]
    fresh = live.clone()
    fresh[3, 5] += 1
    (diff,) = compare({"w": live}, {"w": fresh}).diffs
    assert diff.first == (3, 5)


@pytest.mark.parametrize(
    ("live", "fresh"),
    [
        ({"w": torch.zeros(2)}, {"v": torch.zeros(2)}),
        ({"w": torch.zeros(2)}, {"w": torch.zeros(3)}),
        ({"w": torch.zeros(2)}, {"w": torch.zeros(2, dtype=torch.float64)}),
    ],
)
def test_tensors_that_cannot_be_compared_are_refused(live: dict, fresh: dict) -> None:
    with pytest.raises(EffectiveMismatchError):
        compare(live, fresh)


def test_report_raises_naming_tensor_and_side() -> None:
    report = compare({"layer.w": torch.ones(3)}, {"layer.w": torch.zeros(3)})
    with pytest.raises(EffectiveMismatchError, match=r"layer\.w") as caught:
        report.raise_on_difference("instance b, rank 2")
    assert caught.value.rank == "instance b, rank 2"
