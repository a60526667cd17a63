"""Who holds what, compared over all ranks: gaps, overlaps and second owners are named (B12, B16, B52)."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.adapters.megatron import owners
from syncline.errors import AdapterError, CoverageError


def claim(name: str, shape: tuple[int, ...], low: int, n: int, kind: str = "dense") -> owners.Claim:
    rest = shape[1:]
    return owners.Claim(name, shape, (((low, *[0] * len(rest)), (n, *rest)),), kind)


def claims(rank: int, *listed: owners.Claim, stage: int = 0, expert: int = 0, **more: Any) -> owners.Claims:
    return owners.Claims(rank, stage, expert, listed, **more)


def test_claims_survive_the_wire() -> None:
    one = claims(3, claim("a", (4, 2), 0, 2), stage=1, expert=5, aliases={"b": "a"})
    assert owners.Claims.decode(one.encode()) == one
    with pytest.raises(AdapterError):
        owners.Claims.decode(b"nonsense")


def test_replicas_and_parts_are_fine() -> None:
    owners.check(
        [
            claims(0, claim("w", (4, 2), 0, 2), claim("norm", (2,), 0, 2)),
            claims(1, claim("w", (4, 2), 2, 2), claim("norm", (2,), 0, 2)),
            claims(2, claim("w", (4, 2), 0, 2), claim("e", (2,), 0, 2, "expert")),
            claims(3, claim("x", (1,), 0, 1), claim("w", (4, 2), 0, 2, "shared"), stage=1, expert=1),
        ]
    )


def test_two_stages_that_claim_one_layer_are_named() -> None:
    with pytest.raises(AdapterError, match="two pipeline stages") as caught:
        owners.check(
            [claims(0, claim("layer.2", (4,), 0, 4)), claims(5, claim("layer.2", (4,), 0, 4), stage=1)]
        )
    assert caught.value.tensor == "layer.2"
    assert "rank 0" in str(caught.value.expected)
    assert str(caught.value.rank) == "5"


def test_two_owners_of_one_expert_are_named() -> None:
    with pytest.raises(AdapterError, match="two owners of one expert") as caught:
        owners.check(
            [
                claims(0, claim("e.3", (4,), 0, 4, "expert")),
                claims(1, claim("e.3", (4,), 0, 4, "expert"), expert=1),
            ]
        )
    assert caught.value.tensor == "e.3"


def test_an_expert_that_nobody_owns_is_named() -> None:
    with pytest.raises(CoverageError, match="no trainer rank owns") as caught:
        owners.check([claims(0, claim("e.0", (4,), 0, 4, "expert"))], ["e.0", "e.1"])
    assert caught.value.tensor == "e.1"


def test_rows_that_nobody_owns_are_named() -> None:
    with pytest.raises(CoverageError, match="no trainer rank owns") as caught:
        owners.check([claims(0, claim("w", (10, 2), 0, 4)), claims(1, claim("w", (10, 2), 4, 4))])
    assert caught.value.tensor == "w"


def test_overlapping_parts_are_named() -> None:
    with pytest.raises(CoverageError, match="overlapping"):
        owners.check([claims(0, claim("w", (6, 2), 0, 4)), claims(1, claim("w", (6, 2), 2, 4))])


def test_two_shapes_of_one_tensor_are_named() -> None:
    with pytest.raises(AdapterError, match="disagree"):
        owners.check([claims(0, claim("w", (4,), 0, 4)), claims(1, claim("w", (8,), 0, 8))])


def test_a_tied_copy_of_another_stage_is_a_replica() -> None:
    owners.check(
        [
            claims(0, claim("embed", (4, 2), 0, 4), aliases={"head": "embed"}),
            claims(1, claim("head", (4, 2), 0, 4, "shared"), stage=1),
        ]
    )
