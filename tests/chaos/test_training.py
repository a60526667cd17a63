"""Real FSDP2 training to instances that cut the model otherwise, and replicas of one instance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.chaos import model as tiny
from tests.chaos.fleet import every, ready

if TYPE_CHECKING:
    from tests.chaos.fleet import Fleet

pytestmark = pytest.mark.timeout(60)


def test_three_versions_of_real_training_reach_every_cut(fleet: Fleet) -> None:
    """FSDP2 x 2 to TP1, TP3, and DP=2 replicas of TP2 (B94), processes started in any order."""
    worlds = {"whole": 1, "three": 3, "dp0": 2, "dp1": 2}
    server = fleet.server().ready()
    order = [(name, rank) for name, world in worlds.items() for rank in range(world)]
    np.random.default_rng(3).shuffle(order)
    group = str(fleet.root.parent / "group")
    early = {(n, r): fleet.reader(n, r, worlds[n]) for n, r in order[:4]}
    trainers = [fleet.trainer(rank, 2, group=group, serve=False) for rank in (1, 0)]
    late = {(n, r): fleet.reader(n, r, worlds[n]) for n, r in order[4:]}
    readers = early | late
    ready(*trainers, *readers.values())
    controllers = [readers[name, 0] for name in worlds]
    assert every(trainers, "await_readers", *worlds) == [tuple(sorted(worlds))] * 2
    seen = []
    for number in (1, 2, 3):
        every(trainers, "step")
        every(trainers, "publish", number, "pulled")
        reports = every(controllers, "update", number)
        assert [report["key"] for report in reports] == [f"1.{number}"] * 4
        whole = every(trainers, "weights")[0]
        checkpoint = {name: torch.from_numpy(array) for name, array in whole.items()}
        for (name, rank), child in readers.items():
            expected = tiny.cut(checkpoint, rank, worlds[name])
            live = child.do("weights")
            assert live.keys() == expected.keys()
            for tensor, values in expected.items():
                assert np.array_equal(live[tensor], values.numpy()), (name, rank, tensor, number)
        nbytes = sum(values.nbytes for values in whole.values())
        assert reports[0]["nbytes"] == nbytes
        seen.append(whole["up.weight"])
    assert not np.array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[1], seen[2])
    for rank in range(2):  # replicas receive equal bytes
        one, other = (readers[name, rank].do("weights") for name in ("dp0", "dp1"))
        assert all(np.array_equal(one[name], other[name]) for name in one)
    assert every(trainers, "committed") == [tuple(sorted(worlds))] * 2
    assert server.do("boot") == 1
