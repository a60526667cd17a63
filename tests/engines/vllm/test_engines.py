"""An updated vLLM engine equals a fresh one: live tensors bit for bit, tokens, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines import checkpoints
from tests.engines.vllm.running import needs_vllm, play

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), needs_vllm]

FAST = [("qwen3", 1, "float32"), ("qwen3_moe", 1, "float32"), ("qwen3", 2, "float32")]
SLOW = [
    *((family, 1, "float32") for family in ("qwen2", "qwen3_tied", "llama", "gpt_oss", "deepseek_v3")),
    *((family, 1, "bfloat16") for family in ("qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2")),
    *((family, 1, "bfloat16") for family in ("granite", "glm4", "stablelm", "starcoder2", "deepseek_v3")),
    ("qwen3_moe", 2, "float32"),
    ("deepseek_v3", 2, "float32"),
    ("qwen3_tied", 2, "bfloat16"),
]


@dataclass
class Scene:
    """What one family's engines said."""

    family: str
    ranks: int
    names: set[str]
    seen: dict[str, Any]


def _cases() -> list[Any]:
    fast = [pytest.param(case, id="-".join(map(str, case))) for case in FAST]
    return fast + [pytest.param(case, id="-".join(map(str, case)), marks=pytest.mark.slow) for case in SLOW]


@pytest.fixture(scope="module", params=_cases())
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    family, ranks, dtype = request.param
    out: Path = tmp_path_factory.mktemp(f"{family}-{ranks}")
    old, a, b = (
        str(checkpoints.make(family, out / name, seed)) for seed, name in enumerate(("old", "a", "b"))
    )
    seen = play(out, ranks, dtype=dtype, old=old, versions=[a, b])
    return Scene(family, ranks, set(checkpoints.tensors(a)), seen)


def test_tokens_and_log_probabilities_equal_a_fresh_engines(scene: Scene) -> None:
    for fresh, updated in zip(scene.seen["fresh"], scene.seen["updated"], strict=True):
        for expected, found in zip(fresh, updated["answers"], strict=True):
            assert found["tokens"] == expected["tokens"]
            assert found["logprobs"] == expected["logprobs"]


def test_the_poison_and_the_versions_are_told_apart(scene: Scene) -> None:
    a, b = ([answer["tokens"] for answer in fresh] for fresh in scene.seen["fresh"])
    old = [answer["tokens"] for answer in scene.seen["old"]]
    assert a != b
    assert old not in (a, b)
    for fresh, updated in zip((a, b), scene.seen["updated"], strict=True):
        assert updated["spoiled"] != fresh


def test_every_live_tensor_was_spoiled_and_is_explained(scene: Scene) -> None:
    assert len(scene.seen["ranks"]) == scene.ranks
    for rank, told in enumerate(scene.seen["ranks"]):
        kinds = {name: kind for name, (kind, _) in told["status"].items()}
        synced = {name for kind, names in told["status"].values() if kind == "synced" for name in names}
        assert synced == scene.names
        assert told["unused"] == []
        for updated in scene.seen["updated"]:
            assert set(updated["poisoned"][rank]) == {name for name, kind in kinds.items() if kind != "local"}
        assert ("derived" in kinds.values()) == (scene.family == "deepseek_v3")


def test_the_layout_stands_the_twin_check(scene: Scene) -> None:
    for told in scene.seen["ranks"]:
        assert told["world"] == scene.ranks
        assert told["checked"] > 0
        assert told["arena"] < told["bytes"]


def test_answers_carry_their_version(scene: Scene) -> None:
    for number, updated in enumerate(scene.seen["updated"], 1):
        assert updated["changed"]
        assert updated["key"].endswith(f".{number}")
        assert {version for answer in updated["answers"] for version in answer["versions"]} == {
            updated["key"]
        }


def test_no_live_tensor_moved(scene: Scene) -> None:
    assert scene.seen["moved"] is False


def test_errors_arrive_whole_and_leave_the_engine_usable(scene: Scene) -> None:
    assert scene.seen["stale"]["kind"] == "StaleVersionError"
    assert scene.seen["wrong"]["kind"] == "EffectiveMismatchError"
    assert scene.seen["wrong"]["tensor"]
    assert scene.seen["after"] == [answer["tokens"] for answer in scene.seen["fresh"][-1]]
