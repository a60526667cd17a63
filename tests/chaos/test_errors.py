"""Errors cross processes: in time, with text and rank, and the next update succeeds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.fleet import every, ready, until

if TYPE_CHECKING:
    from tests.chaos.fleet import Fleet

pytestmark = pytest.mark.timeout(60)


def test_one_rank_of_three_raises_what_nobody_else_knows(fleet: Fleet) -> None:
    """All leave the update, with text and rank (B78); a strict publish hears it (B77); the next one works."""
    trainer = fleet.trainer().ready()
    readers = fleet.readers("a", 3)
    ready(*readers)
    trainer.do("fill", 1)
    trainer.do("publish", 1)
    assert readers[0].do("update", 1)["key"] == "1.1"
    trainer.do("fill", 2)
    readers[2].do("raise_foreign", "worker.before_verified", "lane 7 is on fire")
    strict = trainer.start("publish", 2, "committed")
    began = time.monotonic()
    error = readers[0].start("update", 2).error()
    assert time.monotonic() - began < 8.0
    assert error.kind == "RemoteError"
    for part in ("KernelPanicError", "lane 7 is on fire", "instance a, rank 2", "Traceback", "roles.py"):
        assert part in error.text
    refused = strict.error()
    assert refused.kind == "RemoteError"
    for part in ("lane 7 is on fire", "instance a, rank 2"):
        assert part in refused.text
    for other in readers[:2]:  # whether they had done their part or not
        assert until(lambda one=other: "instance a, rank 2 failed: KernelPanicError" in one.do("log"))
    state = readers[0].do("state")
    assert (state["committed"], state["dirty"], state["paused"]) == ("1.1", True, True)
    trainer.do("fill", 3)
    strict = trainer.start("publish", 3, "committed")
    assert readers[0].do("update", 3)["key"] == "1.3"
    strict.get()
    assert every(readers, "wrong", 3) == [[], [], []]
    assert every(readers, "post_loads") == [2, 2, 2]  # never for a version that was not committed


def test_an_error_before_the_first_byte_changes_nothing(fleet: Fleet) -> None:
    trainer = fleet.trainer().ready()
    readers = fleet.readers("a", 2)
    ready(*readers)
    trainer.do("fill", 1)
    trainer.do("publish", 1)
    assert readers[0].do("update", 1)["key"] == "1.1"
    trainer.do("fill", 2)
    trainer.do("publish", 2)
    for reader in readers:
        reader.do("arm", "worker.before_bind", "raise:no descriptor to be had")
    error = readers[0].start("update", 2).error()
    assert (error.kind, "no descriptor to be had" in error.text) == ("InjectedFaultError", True)
    state = readers[0].do("state")
    assert (state["committed"], state["dirty"], state["paused"]) == ("1.1", False, False)
    assert every(readers, "wrong", 1) == [[], []]
    assert readers[0].do("update", 2)["key"] == "1.2"


def test_metadata_that_fails_ends_the_others_wait_with_the_reason(fleet: Fleet) -> None:
    """The writer waits for a reader that cannot describe itself (B27)."""
    trainer = fleet.trainer().ready()
    waiting = trainer.start("await_readers", "a")
    reader = fleet.reader(broken="no rule for a hyperbolic layer")
    began = time.monotonic()
    assert "hyperbolic" in reader.made.error().text
    error = waiting.error()
    assert time.monotonic() - began < 5.0
    assert "UnsupportedModelError: no rule for a hyperbolic layer" in error.text
    reader = fleet.reader().ready()
    assert trainer.do("await_readers", "a") == ("a",)
    trainer.do("fill", 1)
    trainer.do("publish", 1)
    assert reader.do("update", 1)["key"] == "1.1"


@pytest.mark.parametrize("embedded", [False, True])
def test_a_writer_that_cannot_describe_itself_ends_the_readers_wait(fleet: Fleet, embedded: bool) -> None:
    if not embedded:
        fleet.server().ready()
    reader = fleet.reader()
    time.sleep(0.3)
    began = time.monotonic()
    trainer = fleet.trainer(broken="no rule for a fractal head", serve=embedded)
    assert "fractal" in trainer.made.error().text
    assert "UnsupportedModelError: no rule for a fractal head" in reader.made.error().text
    assert time.monotonic() - began < 6.0
