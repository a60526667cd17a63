"""An updated SGLang engine equals a fresh one: live tensors bit for bit, tokens, log-probabilities."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from syncline.verify.effective import compare
from tests.engines import checkpoints
from tests.engines.sglang.engine import ROOT, environment

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed here: make test-engines"),
]

FAST = [("qwen3", 1)]
SLOW = [
    ("qwen2", 1),
    ("llama", 1),
    ("qwen3_tied", 1),
    ("qwen3_moe", 1),
    ("deepseek_v3", 1),
    ("qwen3", 2),
    ("qwen3_moe", 2),
    ("deepseek_v3", 2),
]
EXPERTS = {"qwen3_moe": 4, "deepseek_v3": 4}


@dataclass
class Scene:
    """What the two engines of one family left behind."""

    family: str
    ranks: int
    out: Path
    fresh: dict[str, Any]
    updated: dict[str, Any]

    def dump(self, which: str, rank: int) -> dict[str, torch.Tensor]:
        return load_file(self.out / which / f"rank-{rank}.safetensors")


def _cases() -> list[Any]:
    fast = [pytest.param(case, id=f"{case[0]}-tp{case[1]}") for case in FAST]
    slow = [pytest.param(case, id=f"{case[0]}-tp{case[1]}", marks=pytest.mark.slow) for case in SLOW]
    return fast + slow


@pytest.fixture(scope="module", params=_cases())
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    family, ranks = request.param
    out = tmp_path_factory.mktemp(f"{family}-{ranks}")
    made = [checkpoint(family, out / name, seed) for seed, name in enumerate("ab")]
    for part in ("fresh", "updated"):
        run(part, ranks, out, *made)
    read = [json.loads((out / f"{name}.json").read_text()) for name in ("fresh-a", "updated")]
    return Scene(family, ranks, out, *read)


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
    command = [
        sys.executable,
        "-m",
        "tests.engines.sglang.scene",
        part,
        str(ranks),
        str(out),
        *map(str, made),
    ]
    log = out / f"{part}.log"
    with log.open("w") as file:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(ranks) | {"SYNCLINE_RUN_DIR": str(out / "run")},
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=420,
            check=False,
        )
    assert (out / {"fresh": "fresh-a.json", "updated": "updated.json"}[part]).is_file(), (
        f"{part} ended with {done.returncode}:\n" + "\n".join(log.read_text().splitlines()[-40:])
    )


def test_every_tensor_equals_a_fresh_engines(scene: Scene) -> None:
    for version in "ab":
        for rank in range(scene.ranks):
            fresh, live = scene.dump(f"fresh-{version}", rank), scene.dump(f"updated-{version}", rank)
            report = compare(live, fresh)
            assert not report.diffs, "\n".join(map(str, report.diffs[:5]))
            assert report.tensors == len(fresh)


def test_the_two_versions_differ_in_every_synced_tensor(scene: Scene) -> None:
    for rank in range(scene.ranks):
        a, b = scene.dump("fresh-a", rank), scene.dump("fresh-b", rank)
        same = [name for name in scene.updated["spoiled"] if torch.equal(a[name], b[name])]
        assert same == []


def test_tokens_and_log_probabilities_equal_a_fresh_engines(scene: Scene) -> None:
    fresh = {"a": scene.fresh["answers"], "b": scene.updated["fresh"]["answers"]}
    for version in "ab":
        told = scene.updated[version]["answers"]
        for expected, found in zip(fresh[version], told, strict=True):
            assert found["tokens"] == expected["tokens"]
            assert found["logprobs"] == expected["logprobs"]
            assert found["top"] == expected["top"]
    assert [x["tokens"] for x in fresh["a"]] != [x["tokens"] for x in fresh["b"]]


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
        assert synced == names, names - synced
        derived = {name for name, (kind, _) in status.items() if kind == "derived"}
        assert bool(derived) == (scene.family == "deepseek_v3")
        assert set(scene.updated["spoiled"]) >= derived


def test_a_whole_update_moved_every_byte(scene: Scene) -> None:
    for version in "ab":
        report = scene.updated[version]["report"]
        assert report["changed"]
        assert report["coverage"] == 1.0
        assert report["level"] == "delivered"
        assert report["nbytes"] >= sum(t.nbytes for t in checkpoints.tensors(scene.out / version).values())


def test_the_prompts_reach_every_expert(scene: Scene) -> None:
    if scene.family not in EXPERTS:
        pytest.skip("a dense model")
    for version in "ab":
        reached = _experts(scene.out / version, scene.updated[version]["answers"])
        assert reached
        for layer, experts in reached.items():
            assert len(experts) == EXPERTS[scene.family], f"{version}, {layer}: {sorted(experts)}"


def _experts(directory: Path, told: list[dict[str, Any]]) -> dict[str, set[int]]:
    """Return, by layer, the experts that Transformers' model of a checkpoint meets on prompts and answers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 (heavy)

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    reached: dict[str, set[int]] = {}

    def note(name: str) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            chosen = [
                x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.dtype == torch.int64
            ]
            reached.setdefault(name, set()).update(chosen[0].flatten().tolist())

        return hook

    for name, module in model.named_modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(note(name), with_kwargs=True)
    with torch.no_grad():
        for prompt, answer in zip(checkpoints.PROMPTS, told, strict=True):
            model(torch.tensor([tokenizer(prompt)["input_ids"] + answer["tokens"]]))
    return reached
