"""An updated SGLang engine equals a fresh one: live tensors bit for bit, tokens, log-probabilities."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from syncline.verify.effective import compare
from tests.engines import checkpoints, experts
from tests.engines.rows import Case, Notes, recorded
from tests.engines.sglang.company import play

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(2000),
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed here: make test-engines"),
]

SECONDS = 900.0  # for one part of a scene
FAST = [("qwen3", 1), ("deepseek_v3", 1)]
SLOW = [
    ("qwen2", 1),
    ("llama", 1),
    ("qwen3_tied", 1),
    ("qwen3_moe", 1),
    ("qwen3", 2),
    ("qwen3_moe", 2),
    ("deepseek_v3", 2),
    ("llama_mqa", 2),
]
PADDED = {"llama_mqa"}
"""Families with fewer key-value heads than ranks: SGLang pads these on a CPU; the last rank has no other."""


@dataclass
class Scene:
    """What the two engines of one family left behind."""

    case: Case
    out: Path
    fresh: dict[str, Any]
    updated: dict[str, Any]
    experts: str = ""

    def dump(self, which: str, rank: int) -> dict[str, torch.Tensor]:
        return load_file(self.out / which / f"rank-{rank}.safetensors")

    def answers(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return (expected, found) of every prompt, for both versions."""
        fresh = {"a": self.fresh["answers"], "b": self.updated["fresh"]["answers"]}
        return [pair for v in "ab" for pair in zip(fresh[v], self.updated[v]["answers"], strict=True)]


def _cases() -> list[Any]:
    fast, slow = ([Case("sglang", *case, "bfloat16") for case in cases] for cases in (FAST, SLOW))
    return [pytest.param(case, id=str(case)) for case in fast] + [
        pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in slow
    ]


@pytest.fixture(scope="module", params=_cases())
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    case: Case = request.param
    out = tmp_path_factory.mktemp(f"{case.model}-{case.ranks}")
    with recorded(case) as notes:
        made = [checkpoint(case.model, out / name, seed) for seed, name in enumerate("ab")]
        for part in ("fresh", "updated"):
            run(part, case.ranks, out, *made)
        read = [json.loads((out / f"{name}.json").read_text()) for name in ("fresh-a", "updated")]
        found = Scene(case, out, *read)
        _note(notes, found, made)
    return found


def _note(notes: Notes, scene: Scene, made: list[Path]) -> None:
    counts = ("tensors", "traced", "replayed", "derived", "local")
    notes.add(**{name: sum(facts[name] for facts in scene.updated["facts"]) for name in counts})
    notes.add(probed=sum(told["probed"] for told in scene.updated["probe"]))
    notes.add(equal=min(_equal(scene, version) for version in "ab"))
    steps = [pair for expected, found in scene.answers() for pair in _steps(expected, found)]
    notes.add(tokens=len(steps), same=sum(expected == found for expected, found in steps))
    answered = [
        (directory, [answer["tokens"] for answer in scene.updated[version]["answers"]])
        for directory, version in zip(made, "ab", strict=True)
    ]
    scene.experts = experts.met(scene.case.model, answered)
    notes.add(experts=scene.experts)


def _equal(scene: Scene, version: str) -> int:
    """Return how many live tensors, of all ranks, have a fresh engine's bits."""
    reports = [
        compare(scene.dump(f"updated-{version}", rank), scene.dump(f"fresh-{version}", rank))
        for rank in range(scene.case.ranks)
    ]
    return sum(report.tensors - len(report.diffs) for report in reports)


def _steps(expected: dict[str, Any], found: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return (expected, found) of every generated token with the log-probabilities of its step."""
    both = [zip(one["tokens"], one["logprobs"], one["top"], strict=True) for one in (expected, found)]
    return list(zip(*both, strict=True))


def checkpoint(family: str, directory: Path, seed: int) -> Path:
    """Make a checkpoint that SGLang's CPU path accepts."""
    made = checkpoints.make(family, directory, seed)
    if family == "deepseek_v3":
        # the only rotary scaling of latent attention on a CPU, and a field that SGLang does not default
        path = made / "config.json"
        config = json.loads(path.read_text())
        config.pop("rope_parameters", None)
        config |= {"moe_layer_freq": 1, "rope_theta": 10000.0, "rope_scaling": YARN}
        path.write_text(json.dumps(config))
    return made


YARN = {
    "type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}


def run(part: str, ranks: int, out: Path, *made: Path) -> None:
    """Run one part of a scene in a process of its own; SGLang ends all children of the process it runs in."""
    status = play(part, ranks, out, SECONDS, *made)
    assert (out / {"fresh": "fresh-a.json", "updated": "updated.json"}[part]).is_file(), (
        f"{part} ended with {status}:\n" + "\n".join((out / f"{part}.log").read_text().splitlines()[-40:])
    )


def test_every_tensor_equals_a_fresh_engines(scene: Scene) -> None:
    for version in "ab":
        for rank in range(scene.case.ranks):
            fresh, live = scene.dump(f"fresh-{version}", rank), scene.dump(f"updated-{version}", rank)
            report = compare(live, fresh)
            assert not report.diffs, "\n".join(map(str, report.diffs[:5]))
            assert report.tensors == len(fresh)


def test_the_two_versions_differ_in_every_synced_tensor(scene: Scene) -> None:
    for rank in range(scene.case.ranks):
        a, b = scene.dump("fresh-a", rank), scene.dump("fresh-b", rank)
        status = scene.updated["status"][rank]
        synced = [name for name in scene.updated["spoiled"] if status[name][0] != "local"]
        same = [name for name in synced if torch.equal(a[name], b[name])]
        assert same == []


def test_tokens_and_log_probabilities_equal_a_fresh_engines(scene: Scene) -> None:
    for expected, found in scene.answers():
        assert found["tokens"] == expected["tokens"]
        assert found["logprobs"] == expected["logprobs"]
        assert found["top"] == expected["top"]
    a, b = (scene.updated[version]["answers"] for version in "ab")
    assert [x["tokens"] for x in a] != [x["tokens"] for x in b]


def test_answers_carry_the_version(scene: Scene) -> None:
    for number, version in enumerate("ab", start=1):
        key = scene.updated[version]["report"]["key"]
        assert key.endswith(f".{number}")
        assert {answer["version"] for answer in scene.updated[version]["answers"]} == {key}


def test_every_live_tensor_is_explained(scene: Scene) -> None:
    names = set(checkpoints.tensors(scene.out / "a"))
    for rank, status in enumerate(scene.updated["status"]):
        assert status.keys() == scene.dump("fresh-b", rank).keys()
        synced = {name for kind, held in status.values() if kind == "synced" for name in held}
        padding = rank > 0 and scene.case.model in PADDED
        assert {name for name in names - synced if not (padding and ".self_attn." in name)} == set()
        assert synced <= names
        derived = {name for name, (kind, _) in status.items() if kind == "derived"}
        assert bool(derived) == (scene.case.model == "deepseek_v3")
        assert set(scene.updated["spoiled"]) >= derived


def test_a_whole_update_moved_every_byte(scene: Scene) -> None:
    for version in "ab":
        report = scene.updated[version]["report"]
        assert report["changed"]
        assert report["coverage"] == 1.0
        assert report["level"] == "delivered"
        assert report["nbytes"] >= sum(t.nbytes for t in checkpoints.tensors(scene.out / version).values())


def test_the_layout_stands_the_twin_check_and_the_probe(scene: Scene) -> None:
    for told, facts in zip(scene.updated["probe"], scene.updated["facts"], strict=True):
        assert told["checked"] > 0
        assert told["probed"] == facts["traced"] + facts["replayed"]


def test_the_prompts_reach_every_expert(scene: Scene) -> None:
    wanted = checkpoints.EXPERTS.get(scene.case.model)
    if wanted is None:
        pytest.skip("a dense model")
    assert scene.experts == f"{wanted}/{wanted}"
