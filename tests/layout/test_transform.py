from __future__ import annotations

import time

import numpy as np
import pytest

from syncline.errors import LayoutError
from syncline.layout import Rules, Transform, register_transform
from syncline.layout.transform import cast_name, cast_transform, has_cast, transform


def test_casts_are_declared_transforms() -> None:
    narrow = cast_transform("float32", "bfloat16")
    assert (narrow.name, narrow.exact) == (cast_name("float32", "bfloat16"), False)
    assert cast_transform("bfloat16", "float32").exact
    raw = narrow.reference(np.array([1.0, -2.5, np.inf, 1 + 2**-8], np.float32))
    assert raw.tolist() == [0x3F80, 0xC020, 0x7F80, 0x3F80]
    wide = cast_transform("bfloat16", "float32").reference(raw)
    assert wide.tolist() == [1.0, -2.5, np.inf, 1.0]
    assert not has_cast("int32", "float32")
    with pytest.raises(LayoutError, match="unknown transform") as caught:
        cast_transform("int32", "float32", tensor="w")
    assert caught.value.tensor == "w"


def test_registration_is_by_a_unique_name() -> None:
    one = Transform("tests:negate", "float32", "float32", exact=True, reference=np.negative)
    assert register_transform(one) is one
    assert register_transform(one) is one
    assert transform("tests:negate").reference(np.array([1.0])).tolist() == [-1.0]
    with pytest.raises(LayoutError, match="registered already"):
        register_transform(Transform("tests:negate", "float32", "float32", exact=True, reference=np.abs))
    with pytest.raises(LayoutError, match="unknown dtype"):
        register_transform(Transform("tests:odd", "float33", "float32", exact=True, reference=np.abs))


def test_widening_is_implicit_and_narrowing_is_declared() -> None:
    none = Rules()
    for src, dst in (
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float32", "float64"),
        ("int8", "int8"),
    ):
        assert none.cast_allowed("w", src, dst)
    for src, dst in (("float32", "bfloat16"), ("bfloat16", "float16"), ("float64", "float32")):
        assert not none.cast_allowed("w", src, dst)
        assert Rules(casts={"w": dst}).cast_allowed("w", src, dst)
        assert Rules(casts="reader").cast_allowed("w", src, dst)
        assert not Rules(casts={"other": dst}).cast_allowed("w", src, dst)
    assert not Rules(casts={"w": "float16"}).cast_allowed("w", "float32", "bfloat16")
    # no rule makes a cast that does not exist
    assert not Rules(casts="reader").cast_allowed("w", "int32", "float32")
    assert not Rules(casts={"*": "float32"}).cast_allowed("w", "bool", "float32")


def test_the_first_matching_pattern_decides() -> None:
    rules = Rules(casts={"*.norm.*": "float16", "*": "bfloat16"})
    assert rules.cast_allowed("a.norm.weight", "float32", "float16")
    assert not rules.cast_allowed("a.norm.weight", "float32", "bfloat16")
    assert rules.cast_allowed("a.mlp.weight", "float32", "bfloat16")


def test_frozen_extras_and_aliases() -> None:
    rules = Rules(
        frozen=("*.inv_freq", "vision.[ab].*"), extras=("mtp.*",), aliases={"lm_head.weight": "embed.weight"}
    )
    assert rules.is_frozen("layers.0.inv_freq")
    assert rules.is_frozen("vision.a.w")
    assert not rules.is_frozen("vision.c.w")
    assert rules.is_extra("mtp.0.w")
    assert not rules.is_extra("layers.mtp")
    assert rules.canonical("lm_head.weight") == "embed.weight"
    assert rules.canonical("other") == "other"
    assert not Rules().is_frozen("")


def test_nonsense_is_refused() -> None:
    with pytest.raises(LayoutError, match="alias of an alias") as caught:
        Rules(aliases={"a": "b", "b": "c"})
    assert caught.value.tensor == "a"
    with pytest.raises(LayoutError, match="unknown dtype"):
        Rules(casts={"*": "bf16"})
    with pytest.raises(LayoutError, match="neither"):
        Rules(casts="writer")  # pyright: ignore[reportArgumentType]
    with pytest.raises(LayoutError, match="one pattern"):
        Rules(frozen="layers.*")  # pyright: ignore[reportArgumentType]


def test_fingerprint_is_of_the_rules() -> None:
    variants = [
        Rules(),
        Rules(casts="reader"),
        Rules(casts={"a": "float16", "*": "bfloat16"}),
        Rules(casts={"*": "bfloat16", "a": "float16"}),
        Rules(frozen=("x",)),
        Rules(extras=("x",)),
        Rules(frozen=("x", "y")),
        Rules(frozen=("xy",)),
        Rules(aliases={"x": "y"}),
    ]
    assert len({r.fingerprint for r in variants}) == len(variants)
    assert Rules(frozen=("x", "y")).fingerprint == Rules(frozen=("y", "x")).fingerprint
    assert Rules(aliases={"a": "b", "c": "d"}).fingerprint == Rules(aliases={"c": "d", "a": "b"}).fingerprint
    assert Rules(frozen=["x"]) == Rules(frozen=("x",))  # pyright: ignore[reportArgumentType]
    assert len({Rules(casts={"a": "float16"}), Rules(casts={"a": "float16"})}) == 1


def test_matching_many_names_does_not_scan_rule_by_rule_in_python() -> None:
    """B104: 18,432 expert tensors against some hundred patterns."""
    rules = Rules(extras=tuple(f"layers.{i}.unused.*" for i in range(384)))
    names = [f"layers.{i // 384}.experts.{i % 384}.gate_proj.weight" for i in range(18_432)]
    start = time.process_time()
    assert not any(map(rules.is_extra, names))
    assert time.process_time() - start < 2.0
