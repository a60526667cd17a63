"""Rules on the wire and merged."""

from __future__ import annotations

import pytest

from syncline.errors import LayoutError
from syncline.layout import Rules
from syncline.store import rules

FULL = Rules({"*.head": "float32", "*": "bfloat16"}, ("vision.*",), ("mtp.*",), {"lm_head": "embed"})


@pytest.mark.parametrize("value", [Rules(), FULL, Rules(casts="reader")])
def test_round_trip_keeps_everything_and_the_order_of_casts(value: Rules) -> None:
    back = rules.decode(rules.encode(value))
    assert back.fingerprint == value.fingerprint


def test_empty_rules_are_empty_bytes() -> None:
    assert rules.encode(Rules()) == b""


@pytest.mark.parametrize("blob", [b"\x80\x04.", b"not rules", b"\x00" * (rules.MAX_BYTES + 1)])
def test_foreign_bytes_are_refused(blob: bytes) -> None:
    with pytest.raises(LayoutError):
        rules.decode(blob)


def test_merge_is_the_union() -> None:
    merged = rules.merge([FULL, Rules(frozen=("vision.*", "audio.*")), Rules({"x": "float16"})])
    assert merged.frozen == ("vision.*", "audio.*")
    assert merged.extras == ("mtp.*",)
    assert merged.casts == {"*.head": "float32", "*": "bfloat16", "x": "float16"}
    assert rules.merge([FULL, Rules(casts="reader")]).casts == "reader"


def test_contradictions_are_named() -> None:
    with pytest.raises(LayoutError, match="two dtypes"):
        rules.merge([Rules({"*": "bfloat16"}), Rules({"*": "float16"})])
    with pytest.raises(LayoutError, match="two canonical names"):
        rules.merge([Rules(aliases={"a": "b"}), Rules(aliases={"a": "c"})])
