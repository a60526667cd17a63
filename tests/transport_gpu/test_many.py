"""The many-to-many benchmark on fake devices: what it moves, compares and refuses, and that it cleans up."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from benchmarks.gpu import many
from benchmarks.gpu.many_cases import TINY, Case, Contents, cases, largest
from benchmarks.gpu.many_processes import RankError
from benchmarks.gpu.many_ranks import NEAR, Order, Setup
from benchmarks.gpu.many_traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPLIT = Case(TINY, 2, "FSDP", "TP", (0, 1), (2, 3))


@pytest.fixture(scope="module", autouse=True)
def loaded() -> Iterator[None]:
    with many.loaded(fake=True):
        yield


@pytest.mark.timeout(240)
def test_two_ranks_to_two_on_fake_devices(tmp_path: Path) -> None:
    arguments = ["--fake", "--gpus", "4", "--modes", "split", "--layouts", "EP-TP", "--parts", "ours"]
    report = many.run([*arguments, "--out", str(tmp_path)])
    assert report.good
    (file,) = tmp_path.glob("gpu-many-fake-*.json")
    found = json.loads(file.read_text())
    ways = [line["way"] for line in found["lines"]]
    assert ways == [NEAR, f"{NEAR}, all from the first writer", "nccl"]
    assert found["fake"]
    assert found["bit_exact"] == found["cases"] == sum(line["exact"][1] for line in found["lines"]) > 0
    assert not any("ms" in line or "gbs" in line for line in found["lines"])
    text = file.with_suffix(".md").read_text()
    assert f"bit-exact: {found['cases']} of {found['cases']}" in text
    assert "FAKE devices" in text
    assert "colocated layouts" in text


@pytest.mark.timeout(240)
def test_what_did_not_arrive_is_seen_and_a_death_ends_all(tmp_path: Path) -> None:
    bits = tmp_path / "bits"
    setup = Setup(str(tmp_path), (str(bits), Contents.make(bits, largest([TINY]))), fake=True)
    case = replace(SPLIT, writer_gpus=(0,), reader_gpus=(0,))
    with many.World(setup, case.writer_gpus, case.reader_gpus) as world:
        offers = world.make(case, 1)
        world.together.ask(("spoil",), 60.0, world.reading)
        ((right, count),) = world.together.ask(("check", 1), 60.0, world.reading)
        assert (right, count > 0) == (0, True)
        order = Order(NEAR)
        world.link(order, offers)
        assert world.exact(order, 1) == ((count, count), Traffic.of(case).total)
        ((right, _),) = world.together.ask(("check", 2), 60.0, world.reading)
        assert right == 0
        members = world.together.members
        members[0].process.kill()
        with pytest.raises(RankError, match=r"source 0 on GPU 0 .*"):
            world.together.ask(("write", 2), 60.0, [0])
    assert not any(member.process.is_alive() for member in members)


def test_ports_links_and_the_prediction() -> None:
    traffic = Traffic.of(SPLIT)
    assert sum(traffic.between.values()) == traffic.total
    assert set(traffic.links) == {(0, 2), (0, 3), (1, 2), (1, 3)}
    assert sum(traffic.ports(0).values()) == sum(traffic.ports(1).values()) == traffic.total
    assert max(traffic.balance()[f"{side}_balance"] for side in ("ingress", "egress")) <= 1.05
    assert traffic.predicted(100.0, 1e9) == max(traffic.ports(1).values()) / 100.0
    own = Traffic.of(replace(SPLIT, writer_gpus=(0,), reader_gpus=(0,)))
    assert own.predicted(1.0, 100.0) == own.total / 100.0
    both = Traffic.of(replace(SPLIT, reader_gpus=(0, 1)))
    assert set(both.links) == {(0, 1), (1, 0)}
    assert both.predicted(1e9, 1.0) == max(n for (a, b), n in both.between.items() if a == b)


def test_layers_are_as_many_as_fit() -> None:
    whole = Case("qwen3-30b-a3b", 48, "FSDP", "TP", (0, 1), (2, 3))
    assert whole.fitted([140 << 30] * 4).layers == 48
    some = whole.fitted([24 << 30] * 4)
    assert 1 <= some.layers < 48
    assert max(some.nbytes().values()) < 24 << 30 < max(whole.nbytes().values())
    with pytest.raises(MemoryError):
        whole.fitted([7 << 30] * 4)
    listed = list(cases(1, ("colocated",), ("qwen3-30b-a3b", "qwen3-235b"), None))
    assert {case.reader_gpus for case in listed} == {(0,)}
    assert len(listed) == 3
