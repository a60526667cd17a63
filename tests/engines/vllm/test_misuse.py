"""Everything that can be done wrong with a vLLM instance is a named error, and leaves it as it says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from tests.engines import checkpoints
from tests.engines.vllm.running import needs_vllm, play

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), needs_vllm]


IGNORED = "model.layers.0.self_attn.rotary_emb.inv_freq"  # stands in old checkpoints; vLLM's loader skips it


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out: Path = tmp_path_factory.mktemp("misuse")
    old, a, b = (
        str(checkpoints.make("qwen3", out / name, seed)) for seed, name in enumerate(("old", "a", "b"))
    )
    save_file({IGNORED: torch.ones(4)}, out / "old" / "more.safetensors")
    return play(out, play="misuse", old=old, versions=[a, b], ignored=IGNORED)


def test_an_update_before_joining(seen: dict[str, Any]) -> None:
    assert seen["not joined"]["what"].startswith("this engine has not joined a job")


def test_a_trainer_that_lacks_a_tensor(seen: dict[str, Any]) -> None:  # B24
    assert seen["too little"]["kind"] == "NameMismatchError"
    assert seen["dropped"] in "".join(str(value) for value in seen["too little"].values())


def test_a_checkpoint_name_that_the_loader_ignores_must_be_declared(seen: dict[str, Any]) -> None:  # B25
    assert seen["ignored"]["kind"] == "NameMismatchError"
    assert seen["ignored"]["tensor"] == IGNORED
    assert "extras" in seen["ignored"]["hint"]


def test_a_live_parameter_that_nothing_explains(seen: dict[str, Any]) -> None:
    assert seen["grown"]["kind"] == "AdapterError"
    assert seen["grown"]["tensor"] == "grown"


def test_post_processing_that_cannot_be_repeated(seen: dict[str, Any]) -> None:
    assert seen["unrepeatable"]["kind"] == "AdapterError"
    assert "cannot be updated" in seen["unrepeatable"]["what"]
    assert seen["unrepeatable"]["tensor"].startswith("model.layers.0.")


def test_an_engine_held_until_its_first_version_stays_paused(seen: dict[str, Any]) -> None:  # B92
    assert seen["held"]


@pytest.mark.parametrize("when", ["before any version", "unpublished"])
def test_a_version_that_does_not_come(seen: dict[str, Any], when: str) -> None:
    assert seen[when]["kind"] == "DeadlineError"
    assert seen[when]["seconds"] < 10
    assert seen["goes on"]


def test_a_torn_update_is_never_served(seen: dict[str, Any]) -> None:  # B79, B84
    assert "torn on purpose" in str(seen["torn"]["what"])
    assert any("DIRTY" in note for note in seen["torn"]["notes"])
    assert seen["torn stays paused"]
    assert seen["recovered"]


def test_a_parameter_that_something_else_replaced(seen: dict[str, Any]) -> None:
    assert "a live tensor moved" in seen["moved"]["error"]["what"]
    assert seen["moved"]["error"]["tensor"] == seen["moved"]["name"]
