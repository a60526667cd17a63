"""An updated vLLM engine equals a fresh one: live tensors bit for bit, tokens, log-probabilities.

Between them the families meet replicated and fused key-value heads (B03, B04), gate/up in both orders of TP
(B06, B07), experts and shared experts (B12, B13), ties declared at either level of the configuration (B19,
B21), router biases and other buffers (B30), weights derived by hooks (B32), aliases (B34), transforms in the
loader (B109).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines import checkpoints, experts
from tests.engines.rows import Case, Notes, recorded
from tests.engines.vllm.running import needs_vllm, play

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), needs_vllm]

FAST = [("qwen3_moe", 1, "float32"), ("mamba2", 1, "float32"), ("qwen3", 2, "float32")]
SLOW = [
    *((family, 1, "float32") for family in ("qwen2", "qwen3_tied", "llama", "gpt_oss", "deepseek_v3")),
    *((family, 1, "bfloat16") for family in ("qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2")),
    *((family, 1, "bfloat16") for family in ("granite", "glm4", "stablelm", "starcoder2", "deepseek_v3")),
    ("qwen3_moe", 2, "float32"),
    ("deepseek_v3", 2, "float32"),
    ("qwen3_tied", 2, "bfloat16"),
    ("llama_mqa", 2, "float32"),
    ("phi", 1, "bfloat16"),
    ("apertus", 1, "bfloat16"),
]

COMPUTED = {"mamba2": 2}
"""Families of which vLLM's loader computes elements -> how many live tensors of a rank."""
UNCACHED = {"mamba2"}
"""Families for which vLLM cannot cache prefixes on a CPU: its own forward pass fails."""


@dataclass
class Scene:
    """What one family's engines said."""

    case: Case
    names: set[str]
    seen: dict[str, Any]

    def pairs(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return (fresh, updated) for each version."""
        return list(zip(self.seen["fresh"], self.seen["updated"], strict=True))


def _cases() -> list[Any]:
    fast = [Case("vllm", *case) for case in FAST]
    slow = [Case("vllm", *case) for case in SLOW]
    return [pytest.param(case, id=str(case)) for case in fast] + [
        pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in slow
    ]


@pytest.fixture(scope="module", params=_cases())
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    case: Case = request.param
    out: Path = tmp_path_factory.mktemp(f"{case.model}-{case.ranks}")
    made = [checkpoints.make(case.model, out / name, seed) for seed, name in enumerate("ab")]
    with recorded(case) as notes:
        seen = play(
            out,
            case.ranks,
            dtype=case.dtype,
            versions=list(map(str, made)),
            prefix=case.model not in UNCACHED,
        )
        found = Scene(case, set(checkpoints.tensors(made[0])), seen)
        _note(notes, found, made)
    return found


def _note(notes: Notes, scene: Scene, made: list[Path]) -> None:
    counts = ("tensors", "traced", "replayed", "probed", "derived", "local")
    notes.add(**{name: sum(told[name] for told in scene.seen["ranks"]) for name in counts})
    notes.add(equal=min(_equal(scene, fresh, updated) for fresh, updated in scene.pairs()))
    steps = [step for fresh, updated in scene.pairs() for step in _steps(fresh, updated)]
    notes.add(tokens=len(steps), same=sum(expected == found for expected, found in steps))
    answered = [
        (directory, [answer["tokens"] for answer in updated["answers"]])
        for directory, (_, updated) in zip(made, scene.pairs(), strict=True)
    ]
    scene.seen["experts"] = experts.met(scene.case.model, answered)
    notes.add(experts=scene.seen["experts"])


def _equal(scene: Scene, fresh: dict[str, Any], updated: dict[str, Any]) -> int:
    """Return how many live tensors, of all ranks, have a fresh engine's bits; second names do not count."""
    found = 0
    for told, expected, held in zip(scene.seen["ranks"], fresh["digests"], updated["digests"], strict=True):
        found += sum(name in expected and held.get(name) == expected[name] for name in told["status"])
    return found


def _steps(fresh: dict[str, Any], updated: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return (expected, found) of every generated token with the log-probabilities of its step."""
    return [
        pair
        for expected, found in zip(fresh["answers"], updated["answers"], strict=True)
        for pair in zip(
            zip(expected["tokens"], expected["logprobs"], strict=True),
            zip(found["tokens"], found["logprobs"], strict=True),
            strict=True,
        )
    ]


def test_tokens_and_log_probabilities_equal_a_fresh_engines(scene: Scene) -> None:
    for fresh, updated in scene.pairs():
        for expected, found in zip(fresh["answers"], updated["answers"], strict=True):
            assert found["tokens"] == expected["tokens"]
            assert found["logprobs"] == expected["logprobs"]


def test_every_live_tensor_equals_a_fresh_engines(scene: Scene) -> None:
    for fresh, updated in scene.pairs():
        for expected, found in zip(fresh["digests"], updated["digests"], strict=True):
            assert found.keys() == expected.keys()
            assert [name for name in expected if found[name] != expected[name]] == []


def test_the_poison_and_the_versions_are_told_apart(scene: Scene) -> None:
    a, b = ([answer["tokens"] for answer in fresh["answers"]] for fresh in scene.seen["fresh"])
    assert a != b
    for fresh, updated in scene.pairs():
        spoiled = updated["spoiled"]
        assert [answer["tokens"] for answer in spoiled["answers"]] not in (a, b)
        for rank, told in enumerate(scene.seen["ranks"]):
            synced = {n for n, (kind, names) in told["status"].items() if kind == "synced" and names}
            before, after = fresh["digests"][rank], spoiled["digests"][rank]
            assert [name for name in synced & before.keys() if before[name] == after[name]] == []


def test_every_live_tensor_was_spoiled_and_is_explained(scene: Scene) -> None:
    assert len(scene.seen["ranks"]) == scene.case.ranks
    for rank, told in enumerate(scene.seen["ranks"]):
        kinds = {name: kind for name, (kind, _) in told["status"].items()}
        synced = {name for kind, names in told["status"].values() if kind == "synced" for name in names}
        assert synced == scene.names
        assert told["unused"] == []
        assert told["tensors"] == told["traced"] + told["replayed"] + told["derived"] + told["local"]
        for updated in scene.seen["updated"]:
            assert set(updated["poisoned"][rank]) == {name for name, kind in kinds.items() if kind != "local"}
        assert ("derived" in kinds.values()) == (scene.case.model == "deepseek_v3")


def test_the_layout_stands_the_twin_check_and_the_probe(scene: Scene) -> None:
    for told in scene.seen["ranks"]:
        assert told["world"] == scene.case.ranks
        assert told["checked"] > 0
        assert told["probed"] == told["traced"] + told["replayed"]
        assert told["arena"] < told["bytes"]


def test_what_the_loader_computes_is_replayed(scene: Scene) -> None:
    for told in scene.seen["ranks"]:
        assert told["replayed"] == COMPUTED.get(scene.case.model, 0)


def test_answers_carry_their_version(scene: Scene) -> None:  # B86
    for number, updated in enumerate(scene.seen["updated"], 1):
        assert updated["changed"]
        assert updated["key"].endswith(f".{number}")
        assert {version for answer in updated["answers"] for version in answer["versions"]} == {
            updated["key"]
        }


def test_no_live_tensor_moved(scene: Scene) -> None:  # B33
    assert scene.seen["moved"] is False


def test_errors_arrive_whole_and_leave_the_engine_usable(scene: Scene) -> None:
    assert scene.seen["stale"]["kind"] == "StaleVersionError"
    assert scene.seen["wrong"]["kind"] == "EffectiveMismatchError"
    assert scene.seen["wrong"]["tensor"]
    assert scene.seen["after"] == [answer["tokens"] for answer in scene.seen["fresh"][-1]["answers"]]


def test_the_prompts_reach_every_expert(scene: Scene) -> None:
    wanted = checkpoints.EXPERTS.get(scene.case.model)
    if wanted is None:
        pytest.skip("a dense model")
    assert scene.seen["experts"] == f"{wanted}/{wanted}"
