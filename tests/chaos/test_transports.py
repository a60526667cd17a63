"""The two-sided path end to end: real sends between processes, on demand and by choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos.fleet import every, ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.fleet import Fleet

pytestmark = pytest.mark.timeout(60)


def test_gloo_end_to_end(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(transport="gloo", stall=4.0)
    writers = fleet.trainers(2)
    readers = fleet.readers("a", 2)
    ready(*writers, *readers)
    for number in (1, 2, 3):
        every(writers, "fill", number)
        every(writers, "publish", number)
        report = readers[0].do("update", number)
        assert (report["key"], report["level"]) == (f"1.{number}", "delivered")
        assert every(readers, "wrong", number) == [[], []]
    assert every(readers, "transports") == [["gloo"], ["gloo"]]
    assert writers[0].do("committed") == ("a",)


def test_hosts_that_differ_are_served_by_gloo_beside_shared_memory(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(stall=4.0)
    writers = fleet.trainers(2)
    near = fleet.readers("near", 2)
    far = fleet.readers("far", 2, env={"SYNCLINE_HOST": "elsewhere"})
    ready(*writers, *near, *far)
    for number in (1, 2):
        every(writers, "fill", number)
        every(writers, "publish", number)
        updates = [one.start("update", number) for one in (near[0], far[0])]
        assert {update.get()["key"] for update in updates} == {f"1.{number}"}
        assert every([*near, *far], "wrong", number) == [[]] * 4
    assert every([*near, *far], "transports") == [["shm"], ["shm"], ["gloo"], ["gloo"]]


def test_a_writer_that_dies_while_it_sends(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(transport="gloo", stall=4.0)
    writers = fleet.trainers(2)
    readers = fleet.readers("a", 2)
    ready(*writers, *readers)
    every(writers, "fill", 1)
    every(writers, "publish", 1)
    assert readers[0].do("update", 1)["key"] == "1.1"
    every(writers, "fill", 2)
    writers[1].do("arm", "gloo.before_send", "kill")
    every(writers, "publish", 2)
    error = readers[0].start("update", 2).error()
    writers[1].wait_dead()
    assert "writer 1" in error.text
    state = readers[0].do("state")
    assert (state["committed"], state["dirty"], state["paused"]) == ("1.1", True, True)
    writers[0].do("fill", 3)
