"""Real Megatron ranks: what each learns, what it publishes, what it refuses.

Between them the cases meet more ranks than key-value groups and the interleave of fused QKV, also of layers
that predict (B03-B05, B98), gate/up under TP (B06), replicas over context parallelism (B08), experts of one
tensor (B09), experts over EP, ETP and both (B11, B12), shared experts (B13), stages and virtual stages (B16),
ties across both (B19, B20), bytes that travel once (B22, B107), routers' biases (B30), trainers' own
collectives (B57), names by the ten thousand (B104) and gathers that are still to come after a step (B108).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.cases import LEARN, PUBLISH, REFUSE, every
from tests.megatron.models import Cut

ROOT = Path(__file__).resolve().parents[2]


def _installed() -> bool:
    try:
        return find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not _installed(), reason="megatron-core is not installed here: make test-megatron"),
]


class Scenes:
    """What all ranks of all cases saw."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def of(self, name: str, ranks: int, *, reader: bool = False) -> list[dict[str, Any]]:
        """Return what each rank of a case saw, a reader's last."""
        found = []
        for number in [*range(ranks), *([-1] if reader else [])]:
            path = self._out / f"{name}-{number}.json"
            errors = [p.read_text() for p in self._out.glob(f"{name}-*.error")]
            assert path.is_file(), f"{path.name} is missing:\n" + "\n".join(errors)
            found.append(json.loads(path.read_text()))
        return found


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """Play every case, in one process that imports the libraries once and forks their ranks."""
    out = tmp_path_factory.mktemp("megatron")
    (out / "cases.json").write_text(json.dumps(every()))
    log = out / "log"
    with log.open("w") as file:
        subprocess.run(
            [
                sys.executable,
                "-P",
                "-W",
                "ignore",
                "-m",
                "tests.megatron.scene",
                str(out / "cases.json"),
                str(out),
            ],
            cwd=ROOT,
            env=os.environ
            | {
                "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
                "PYTHONHASHSEED": "0",
                "SYNCLINE_RUN_DIR": str(out / "run"),
            },
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=1400,
            check=False,
        )
    return Scenes(out)


def _ranks(case: dict[str, Any]) -> int:
    return Cut(**case["cut"]).world


@pytest.mark.parametrize("name", LEARN)
def test_what_a_rank_learned_is_what_is_exported(scenes: Scenes, name: str) -> None:
    told = scenes.of(f"learn-{name}", _ranks(LEARN[name]))
    names = {one for rank in told for one in rank["names"]}
    aliases = {alias: first for rank in told for alias, first in rank["aliases"].items()}
    exported = set(told[0]["exported"])
    assert {aliases.get(one, one) for one in names} == {aliases.get(one, one) for one in exported}
    for rank in told:
        assert rank["equal"] == rank["boxes"] > 0  # each held box equals the export, after a real step
        if not LEARN[name].get("whole"):
            # coordinates land where the watch says; what is computed moves none
            assert rank["probed"] == rank["elements"] - (256 if name == "offset" else 0)
        assert list(rank["computed"]) == (["model.norm.weight"] if name == "offset" else [])


def test_a_cut_sequence_is_one_sequence(scenes: Scenes) -> None:
    """What context-parallel ranks train on is what one rank alone does: their mean loss is its loss."""
    told = scenes.of("learn-context", 2)
    assert told[0]["loss"] != told[1]["loss"]
    alone = scenes.of("learn-whole", 1)[0]["loss"]
    assert sum(rank["loss"] for rank in told) / 2 == pytest.approx(alone, rel=1e-5)


def test_context_parallel_ranks_are_replicas(scenes: Scenes) -> None:
    told = scenes.of("learn-context", 2)
    assert told[0]["names"] == told[1]["names"]
    assert told[0]["elements"] == told[1]["elements"]
    # two of context parallelism, each cut over two of tensor parallelism: each half is held twice
    assert len({rank["elements"] for rank in scenes.of("learn-context-tensor", 4)}) == 1


def test_experts_lie_across_context_parallelism(scenes: Scenes) -> None:
    told = scenes.of("learn-context-experts", 2)
    held = [{n for n in rank["names"] if ".experts." in n} for rank in told]
    assert held[0] & held[1] == set()
    assert len(held[0] | held[1]) == 2 * 4 * 3
    dense = [{n for n in rank["names"] if ".experts." not in n} for rank in told]
    assert dense[0] == dense[1]


@pytest.mark.parametrize(
    ("name", "ranks", "owners"),
    [("grouped-gemm", 2, 2), ("grouped-gemm-tensor", 2, 1), ("exporter-grouped-gemm", 4, 2)],
)
def test_grouped_weights_are_experts_by_their_global_number(
    scenes: Scenes, name: str, ranks: int, owners: int
) -> None:
    told = scenes.of(f"learn-{name}", ranks)
    held = [frozenset(n for n in rank["names"] if ".experts." in n) for rank in told]
    assert len(set(held)) == owners
    assert {len(names) for names in held} == {2 * 4 * 3 // owners}
    assert len(frozenset().union(*held)) == 2 * 4 * 3


def test_the_dtype_of_a_routers_bias_is_its_own(scenes: Scenes) -> None:
    for rank in scenes.of("learn-latent", 2):
        assert any(name.endswith("e_score_correction_bias") for name in rank["names"])
        assert rank["dtypes"] == ["float32"]


def test_stages_and_virtual_stages_number_layers_through(scenes: Scenes) -> None:
    told = scenes.of("learn-virtual-stages", 2)
    held = [{int(n.split(".")[2]) for n in rank["names"] if n.startswith("model.layers.")} for rank in told]
    assert held == [{0, 2}, {1, 3}]


def test_padding_of_the_vocabulary_is_not_published(scenes: Scenes) -> None:
    told = scenes.of("learn-padded", 2)
    assert told[0]["dropped"] == {}
    assert sorted(told[1]["dropped"].values()) == [3, 3]


def test_a_tied_copy_on_the_last_stage_is_a_replica(scenes: Scenes) -> None:
    told = scenes.of("learn-tied", 4)
    assert told[0]["aliases"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert told[2]["shared"] == ["lm_head.weight"]
    virtual = scenes.of("learn-tied-virtual", 3)  # B20
    assert virtual[0]["aliases"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert [rank["shared"] for rank in virtual] == [[], [], ["lm_head.weight"]]
    predicting = scenes.of("learn-predicting", 4)
    assert predicting[2]["shared"] == ["model.embed_tokens.weight"]


def test_every_expert_is_held_once(scenes: Scenes) -> None:
    held = [{n for n in rank["names"] if ".experts." in n} for rank in scenes.of("learn-experts", 2)]
    assert held[0] & held[1] == set()
    assert len(held[0] | held[1]) == 2 * 4 * 3


@pytest.mark.parametrize(
    ("name", "ranks", "owners"), [("tensor", 2, 1), ("instead-of-tensor", 2, 2), ("and-tensor", 4, 2)]
)
def test_experts_are_cut_over_both_parallelisms(  # B11
    scenes: Scenes, name: str, ranks: int, owners: int
) -> None:
    told = scenes.of(f"learn-experts-{name}", ranks)
    held = [frozenset(n for n in rank["names"] if ".experts." in n) for rank in told]
    assert {len(names) for names in held} == {2 * 4 * 3 // owners}
    assert len(set(held)) == owners
    assert len(frozenset().union(*held)) == 2 * 4 * 3


def test_grouped_experts_are_boxes_of_one_tensor(scenes: Scenes) -> None:
    for rank in scenes.of("learn-grouped", 2):
        experts = [name for name in rank["names"] if ".experts." in name]
        assert (
            sorted(n.rpartition(".")[2] for n in experts) == ["down_proj", "down_proj"] + ["gate_up_proj"] * 2
        )


def test_an_offset_is_an_operation_of_the_bridges_own(scenes: Scenes) -> None:
    for rank in scenes.of("learn-offset", 2):
        assert [op.partition(".")[2] for op in rank["computed"]["model.norm.weight"]] == ["add_.Tensor"]


@pytest.mark.parametrize("name", PUBLISH)
def test_published_versions_arrive_bit_for_bit(scenes: Scenes, name: str) -> None:
    *_, reader = scenes.of(name, _ranks(PUBLISH[name]), reader=True)
    assert len(reader["versions"]) == 2
    for version in reader["versions"]:
        assert version["unequal"] == []
        assert version["tensors"] > 0
        # every tensor moved in the step before; the largest of a block, in bfloat16, need not have
        assert all(name.endswith("_scale_inv") for name in version["still"])
        assert version["level"] == "installed"
        assert version["nbytes"] == version["needed"]  # whatever is held twice, or tied, travels once


def test_collectives_go_on_while_a_reader_has_not_begun(scenes: Scenes) -> None:
    """B57: publish takes part in no collective, and what it waits for is no rank's turn in one."""
    first, second, reader = scenes.of("published-to-a-slow-reader", 2, reader=True)
    for number, began in enumerate(reader["began"]):
        for rank in (first, second):
            assert rank["passed"][number] < began
            assert rank["stepped"][number] > began  # weights change only once they were pulled
        assert first["orders"][number] == second["orders"][number]
        assert len(first["orders"][number]) > 10


@pytest.mark.parametrize("name", ["overlapped", "context", "context-tensor"])
def test_an_overlapped_gather_is_finished_before_a_version_opens(scenes: Scenes, name: str) -> None:
    """The optimizer is distributed over data parallelism, or over context parallelism in its place."""
    for rank in scenes.of(name, _ranks(PUBLISH[name])):
        assert all(count > 0 for count in rank["stale"])  # what the step left stale, publish made good
        assert all(count > 0 for count in rank["mains"])  # compared with the optimizer's main parameters


def _refused(scenes: Scenes, how: str) -> list[dict[str, Any]]:
    return scenes.of(f"refuse-{how}", _ranks(REFUSE[how]))


def test_two_stages_that_claim_one_layer(scenes: Scenes) -> None:
    for told in _refused(scenes, "stages"):
        assert told["kind"] == "AdapterError"
        assert "two pipeline stages" in told["what"]
        assert told["tensor"].startswith("model.layers.0.")


def test_an_expert_with_two_owners(scenes: Scenes) -> None:
    for told in _refused(scenes, "experts"):
        assert "two owners of one expert" in told["what"]
        assert ".experts." in told["tensor"]


def test_an_expert_that_nobody_owns(scenes: Scenes) -> None:
    for told in _refused(scenes, "nobody"):
        assert told["kind"] == "CoverageError"
        assert "no trainer rank owns" in told["what"]
        assert ".experts.1." in told["tensor"]


def test_sizes_that_do_not_divide(scenes: Scenes) -> None:
    for told in _refused(scenes, "sizes"):
        assert told["kind"] == "AdapterError"
        assert "cannot be followed" in told["what"]
        assert "linear_qkv" in told["tensor"]


def test_a_mapping_that_communicates(scenes: Scenes) -> None:
    for told in _refused(scenes, "talks"):
        assert "communicates while it is probed" in told["what"]
        assert "all_reduce" in told["found"]
        assert "layernorm" in told["tensor"]


def test_a_bridge_that_disagrees_with_itself(scenes: Scenes) -> None:
    for told in _refused(scenes, "swapped"):
        assert "disagrees with the exporter's own export" in told["what"]
        assert told["tensor"].endswith(("gate_proj.weight", "up_proj.weight"))


@pytest.mark.parametrize("how", ["offloaded", "offloaded_once", "offloaded_later"])
def test_offloaded_parameters(scenes: Scenes, how: str) -> None:
    for told in _refused(scenes, how):
        assert told["kind"] == "AdapterError"
        assert told["tensor"] == "0.embedding.word_embeddings.weight"


def test_a_parameter_that_no_mapping_knows(scenes: Scenes) -> None:
    for told in _refused(scenes, "unmapped"):
        assert "does not know" in told["what"]
        assert told["tensor"] == "0.novelty"


def test_a_trillion_parameters_are_learned_in_seconds(scenes: Scenes) -> None:
    told = scenes.of("trillion", 1)[0]
    assert told["parameters"] == told["elements"] > 5_000_000_000  # all of this rank's share of the 32 x 8
    assert told["layers"] == list(range(24, 32))
    assert told["names"] > 8 * 384 * 3  # every expert of its stage, its peers' included
    assert told["seconds"] < 5  # of one core
    assert told["mib"] < 500
