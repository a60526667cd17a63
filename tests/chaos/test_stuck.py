"""A reader that is stuck while its heartbeat beats: revoked, never committed; the trainer's step goes on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.fleet import ready, until

if TYPE_CHECKING:
    from tests.chaos.fleet import Fleet

pytestmark = pytest.mark.timeout(60)


def test_a_stuck_reader_is_revoked_at_its_stall(fleet: Fleet) -> None:
    trainer = fleet.trainer().ready()
    stuck, quick = fleet.reader("stuck"), fleet.reader("quick")
    ready(stuck, quick)
    trainer.do("fill", 1)
    trainer.do("publish", 1)
    for reader in (stuck, quick):
        assert reader.do("update", 1)["key"] == "1.1"
    trainer.do("fill", 2)
    trainer.do("publish", 2)
    trainer.do("published")
    stuck.do("arm", "shm.before_part", "sleep:5")
    slow = stuck.start("update", 2)
    assert until(lambda: stuck.do("passed", "shm.before_part"))
    assert quick.do("update", 2)["key"] == "1.2"
    began = time.monotonic()
    trainer.do("fill", 3)  # as optimizer.step: it waits for the stuck pin, but no longer than the stall
    assert time.monotonic() - began < 4.0
    assert trainer.do("window")["revoked"] == ("instance stuck, rank 0",)
    error = slow.error()
    assert error.kind == "RevokedError"
    assert "instance stuck, rank 0" in error.text
    assert until(lambda: not stuck.do("armed"), 10.0)
    time.sleep(0.5)  # it has woken up and read weights of another version
    state = stuck.do("state")
    assert (state["committed"], state["dirty"], state["paused"]) == ("1.1", True, True)
    trainer.do("publish", 3)
    assert stuck.do("update", 3)["key"] == "1.3"
    assert stuck.do("wrong", 3) == []
    assert quick.do("update", 3)["key"] == "1.3"
    assert trainer.do("committed") == ("quick", "stuck")
