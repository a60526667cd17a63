"""A reader rank that dies in the middle of an update: its instance is DIRTY, everybody else goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos.fleet import every, ready

if TYPE_CHECKING:
    from tests.chaos.fleet import Fleet

pytestmark = pytest.mark.timeout(60)

STEPS = {  # instance -> where its rank 1 dies, and at which pass
    "byte": ("worker.before_first_byte", 1),
    "part": ("shm.before_part", 2),
    "word": ("worker.before_verified", 1),
    "apply": ("worker.before_apply", 1),
}


def test_ranks_killed_mid_update(fleet: Fleet) -> None:
    trainer = fleet.trainer(wide=True).ready()
    fine = fleet.reader("fine", wide=True)
    instances = {name: fleet.readers(name, 2, wide=True) for name in STEPS}
    ready(fine, *(one for pair in instances.values() for one in pair))
    controllers = [zero for zero, _ in instances.values()]
    trainer.do("fill", 1)
    trainer.do("publish", 1)
    assert {report["key"] for report in every([fine, *controllers], "update", 1)} == {"1.1"}
    trainer.do("fill", 2)
    trainer.do("publish", 2)
    for name, (step, call) in STEPS.items():
        instances[name][1].do("arm", step, "kill", call)
    dying = {name: zero.start("update", 2) for name, (zero, _) in instances.items()}
    assert fine.do("update", 2)["key"] == "1.2"
    for name, (zero, one) in instances.items():
        one.wait_dead()
        error = dying[name].error()
        assert f"instance {name}, rank 1" in error.text
        assert "DIRTY" in error.text
        state = zero.do("state")
        assert (state["dirty"], state["paused"]) == (True, True)
        assert state["committed"] == ("1.2" if name == "apply" else "1.1")
        assert zero.start("forward", 0.1).error().kind == "DeadlineError"

    # the other instance and the writer go on
    assert fine.do("wrong", 2) == []
    trainer.do("fill", 3)
    trainer.do("publish", 3)
    assert fine.do("update", 3)["key"] == "1.3"
    assert every(controllers, "paused") == [True] * len(STEPS)

    # a restarted rank, and a full update, make an instance whole
    back = [fleet.reader(name, 1, 2, wide=True) for name in STEPS]
    ready(*back)
    assert [state["dirty"] for state in every(controllers, "state")] == [True] * len(STEPS)
    for report in every(controllers, "update", 3):
        assert (report["key"], report["coverage"]) == ("1.3", 1.0)
    for state in every(controllers, "state"):
        assert state == {"committed": "1.3", "dirty": False, "paused": False, "serves": "1.3"}
    everybody = [fine, *controllers, *back]
    assert every(everybody, "wrong", 3) == [[]] * len(everybody)
    assert trainer.do("committed") == tuple(sorted(["fine", *STEPS]))


def test_a_controller_that_comes_back_to_a_dirty_instance_stays_paused(fleet: Fleet) -> None:
    trainer = fleet.trainer().ready()
    a0, a1 = fleet.readers("a", 2)
    ready(a0, a1)
    trainer.do("fill", 1)
    trainer.do("publish", 1)
    a0.do("update", 1)
    trainer.do("fill", 2)
    trainer.do("publish", 2)
    a0.do("arm", "reader.before_commit", "kill")
    a0.start("update", 2)
    a0.wait_dead()
    a0 = fleet.reader("a", 0, 2).ready()
    assert a0.do("paused")
    assert a0.do("state")["dirty"]
    assert a0.do("update", 2)["key"] == "1.2"
    assert every([a0, a1], "wrong", 2) == [[], []]
    assert not a0.do("paused")


def test_faults_from_the_environment_and_a_controller_killed_after_its_commit(fleet: Fleet) -> None:
    trainer = fleet.trainer().ready()
    a0 = fleet.reader("a", 0, 2, env={"SYNCLINE_FAULTS": "reader.after_commit=kill"})
    a1 = fleet.reader("a", 1, 2)
    ready(a0, a1)
    trainer.do("fill", 1)
    trainer.do("publish", 1)
    a0.start("update", 1)
    a0.wait_dead()
    a0 = fleet.reader("a", 0, 2).ready()
    state = a0.do("state")
    assert (state["committed"], state["dirty"], state["paused"]) == ("1.1", True, True)
    assert a0.do("update")["key"] == "1.1"  # a fresh process holds nothing: the version is pulled again
    assert every([a0, a1], "wrong", 1) == [[], []]
    assert a0.do("state") == {"committed": "1.1", "dirty": False, "paused": False, "serves": "1.1"}
