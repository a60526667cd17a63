"""Ranks that share blocks of scales, in processes: what arrives, and what happens when one is silent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from syncline.adapters.module import ModuleEngine
from syncline.kernels.fp8 import quantise
from tests.megatron.halo_rank import VERSIONS, whole
from tests.store.pair import Job, module

ROOT = Path(__file__).resolve().parents[2]
Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]

ROWS3: Boxes = [((0, 0), (100, 384)), ((100, 0), (100, 384)), ((200, 0), (100, 384))]
COLUMNS2: Boxes = [((0, 0), (256, 200)), ((0, 200), (256, 200))]
STACKED2: Boxes = [((0, 0, 0), (4, 96, 256)), ((0, 96, 0), (4, 96, 256))]
REPLICAS: Boxes = [((0, 0), (320, 128)), ((320, 0), (320, 128))] * 2
ONE_BLOCK: Boxes = [((0, 0), (40, 128)), ((40, 0), (40, 128)), ((80, 0), (40, 128))]

pytestmark = pytest.mark.timeout(150)


def extent(boxes: Boxes) -> tuple[int, ...]:
    return tuple(max(o[d] + n[d] for o, n in boxes) for d in range(len(boxes[0][0])))


class Play:
    """Ranks that run beside the test."""

    def __init__(self, out: Path, play: str, boxes: Boxes, **more: Any) -> None:
        out.mkdir()
        self._out, self._ranks = out, len(boxes)
        case = {"out": str(out), "name": "halo", "play": play, "boxes": boxes, "shape": extent(boxes), **more}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.megatron.halo_rank", json.dumps(case)], cwd=ROOT
        )

    def seen(self) -> list[dict[str, Any]]:
        """Return what each rank saw; None where it ended by itself."""
        self._process.wait(120)
        errors = [path.read_text() for path in self._out.glob("*.error")]
        assert not errors, "\n".join(errors)
        found = []
        for rank in range(self._ranks):
            path = self._out / f"{rank}.json"
            found.append(json.loads(path.read_text()) if path.is_file() else {})
        return found

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)


def reference(tensor: torch.Tensor, **how: bool) -> tuple[np.ndarray, np.ndarray]:
    matrices = tensor.view(torch.int16).numpy().view(np.uint16).reshape(-1, *tensor.shape[-2:])
    payload, scale = zip(*(quantise(one, **how) for one in matrices), strict=True)
    lead = tensor.shape[:-2]
    return np.stack(payload).reshape(tensor.shape), np.stack(scale).reshape(*lead, *scale[0].shape)


@pytest.mark.parametrize(
    ("boxes", "fp8"),
    [
        (ROWS3, {}),
        (COLUMNS2, {"power_of_two": True}),
        (STACKED2, {}),
        (REPLICAS, {}),
        (ONE_BLOCK, {}),
    ],
    ids=["rows-of-three", "columns-of-two", "stacked-experts", "replicas", "three-in-one-block"],
)
def test_what_cut_ranks_publish_is_the_whole_tensor_quantised(
    run_dir: Path, tmp_path: Path, boxes: Boxes, fp8: dict[str, bool]
) -> None:
    shape = extent(boxes)
    how = {"power_of_two": fp8.get("power_of_two", False)}
    first, scales = reference(whole(shape, 1), **how)
    live = {
        "w": torch.zeros(shape, dtype=torch.float8_e4m3fn),
        "w_scale_inv": torch.full(scales.shape, -1.0),
    }
    play = Play(tmp_path / "ranks", "publish", boxes, fp8=fp8)
    try:
        with Job("halo", connect_timeout=40.0, update_timeout=40.0) as job:
            engine = ModuleEngine(module(live))
            reader = job.reader(engine, "plain")
            for version in VERSIONS:
                reader.update(version, verify="installed")
                payload, scale = reference(whole(shape, version), **how)
                held = engine.live_tensors()
                assert np.array_equal(held["w"].view(torch.uint8).numpy(), payload)
                assert np.array_equal(held["w_scale_inv"].numpy(), scale)
            assert not np.array_equal(first, payload)
            told = play.seen()
    finally:
        play.end()
    distinct = {json.dumps(box): rank["scales"] for box, rank in zip(boxes, told, strict=True)}
    assert sum(distinct.values()) == scales.size  # the holders of one box publish a block's scale, no others


def test_a_silent_rank_is_named_with_a_tensor(tmp_path: Path) -> None:
    first, second, _ = Play(tmp_path / "ranks", "silent", ONE_BLOCK).seen()
    for rank, told in enumerate((first, second)):
        late, after = told["errors"]
        assert late["kind"] in ("DeadlineError", "PeerLostError")  # who gives up first is gone for the others
        assert late["tensor"] == "w"
        assert late["rank"] == f"writer {rank}"
        assert after["kind"] == "PeerLostError"
        assert "failed before" in after["what"]
    assert any(t["errors"][0]["kind"] == "DeadlineError" for t in (first, second))
    assert "writer 2 within 1.5 s" in (first["errors"][0]["expected"], second["errors"][0]["expected"])


def test_a_rank_that_ended_is_noticed_long_before_the_deadline(tmp_path: Path) -> None:
    first, _ = Play(tmp_path / "ranks", "gone", COLUMNS2).seen()
    assert first["errors"][0]["kind"] == "PeerLostError"
    assert first["errors"][0]["expected"] == "writer 1"
    assert first["errors"][0]["tensor"] == "w"
    assert first["seconds"] < 15


def test_ranks_that_quantise_differently_are_all_told(tmp_path: Path) -> None:
    for told in Play(tmp_path / "ranks", "different", COLUMNS2).seen():
        assert "quantise differently" in told["errors"][0]["what"]


def test_ranks_hear_why_another_cannot_say_what_it_holds(tmp_path: Path) -> None:
    for told in Play(tmp_path / "ranks", "undescribed", COLUMNS2).seen():
        assert "description of this rank's shards failed" in told["errors"][0]["what"]
        assert "dp_cp_group" in told["errors"][0]["found"]


def test_without_the_exchange_cut_blocks_are_refused_on_every_rank(tmp_path: Path) -> None:
    for told in Play(tmp_path / "ranks", "refused", ROWS3).seen():
        assert "cuts a block" in told["errors"][0]["what"]
        assert told["errors"][0]["tensor"] == "w"


def test_a_second_adapter_over_the_same_ranks_has_groups_of_its_own(tmp_path: Path) -> None:
    first, second = Play(tmp_path / "ranks", "twice", COLUMNS2).seen()
    for number, version in enumerate(VERSIONS):
        bits = reference(whole((256, 400), version))[1].view(np.int32)
        assert first["seen"][number] == bits[:, :2].reshape(-1).tolist()
        assert second["seen"][number] == bits[:, 1:].reshape(-1).tolist()
