"""Everything that can be done wrong with a vLLM instance is a named error, and leaves it as it says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.engines import checkpoints
from tests.engines.vllm.running import needs_vllm, play

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), needs_vllm]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out: Path = tmp_path_factory.mktemp("misuse")
    old, a, b = (
        str(checkpoints.make("qwen3", out / name, seed)) for seed, name in enumerate(("old", "a", "b"))
    )
    return play(out, play="misuse", old=old, versions=[a, b])


def test_an_update_before_joining(seen: dict[str, Any]) -> None:
    assert seen["not joined"]["what"].startswith("this engine has not joined a job")


def test_a_trainer_that_lacks_a_tensor(seen: dict[str, Any]) -> None:
    assert seen["too little"]["kind"] == "NameMismatchError"
    assert seen["dropped"] in "".join(str(value) for value in seen["too little"].values())


@pytest.mark.parametrize("when", ["before any version", "unpublished"])
def test_a_version_that_does_not_come(seen: dict[str, Any], when: str) -> None:
    assert seen[when]["kind"] == "DeadlineError"
    assert seen[when]["seconds"] < 10
    assert seen["goes on"]


def test_a_torn_update_is_never_served(seen: dict[str, Any]) -> None:
    assert "torn on purpose" in str(seen["torn"]["what"])
    assert any("DIRTY" in note for note in seen["torn"]["notes"])
    assert seen["torn stays paused"]
    assert seen["recovered"]


def test_a_parameter_that_something_else_replaced(seen: dict[str, Any]) -> None:
    assert "a live tensor moved" in seen["moved"]["error"]["what"]
    assert seen["moved"]["error"]["tensor"] == seen["moved"]["name"]
