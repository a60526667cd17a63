"""A writer rank that dies before, while and after a version is sealed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos.fleet import every, ready, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.fleet import Child, Fleet

pytestmark = pytest.mark.timeout(60)


def two_writers(fleet: Fleet) -> tuple[list[Child], list[Child]]:
    """Two writers and a TP2 instance that serves version 1; the weights are at version 2."""
    writers = fleet.trainers(2)
    readers = fleet.readers("a", 2)
    ready(*writers, *readers)
    every(writers, "fill", 1)
    every(writers, "publish", 1)
    assert readers[0].do("update", 1)["key"] == "1.1"
    every(writers, "fill", 2)
    return writers, readers


def test_before_the_seal_readers_keep_the_old_version(fleet: Fleet) -> None:
    (w0, w1), readers = two_writers(fleet)
    w1.do("arm", "writer.before_put", "kill")
    waiting = readers[0].start("update", 2)
    w0.do("publish", 2)
    w1.start("publish", 2)
    w1.wait_dead()
    error = waiting.error()
    assert error.kind == "VersionAbortedError"
    assert "writer 1 was lost" in error.text
    assert readers[0].do("state") == {"committed": "1.1", "dirty": False, "paused": False, "serves": "1.1"}
    assert every(readers, "wrong", 1) == [[], []]
    w0.do("fill", 3)  # the survivor's window closes: nobody waits for the dead
    error = w0.start("committed").error()
    assert "writer 1 was lost" in error.text

    # a new incarnation of the trainer goes on with the same readers
    w0.close()
    assert until(lambda: not w0.process.is_alive())
    writers = fleet.trainers(2)
    ready(*writers)
    every(writers, "fill", 4)
    every(writers, "publish", 1)
    every(writers, "published")
    assert readers[0].do("update")["key"] == "2.1"
    assert every(readers, "wrong", 4) == [[], []]


def test_after_the_seal_without_digests_the_version_is_broken_by_name(fleet: Fleet) -> None:
    (w0, w1), readers = two_writers(fleet)
    w1.do("arm", "writer.before_digest", "kill")
    w0.do("publish", 2)
    w1.start("publish", 2)
    error = readers[0].start("update", 2).error()
    assert error.kind == "VersionBrokenError"
    assert "writer 1 was lost" in error.text
    state = readers[0].do("state")
    assert (state["committed"], state["dirty"]) == ("1.1", state["paused"])
    late = readers[0].start("update", 2).error()
    assert late.kind == "VersionBrokenError"
    assert "writer 1 was lost" in late.text
    w0.do("fill", 3)


def test_linked_readers_finish_from_the_memory_of_the_dead(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(stall=8.0, lease=1.5)
    (w0, w1), readers = two_writers(fleet)
    other = fleet.reader("b").ready()
    every(writers := [w0, w1], "publish", 2)
    every(writers, "published")
    for reader in readers:
        reader.do("arm", "shm.before_part", "sleep:3.0")
    pulling = readers[0].start("update", 2)
    assert until(lambda: readers[0].do("paused"))
    assert until(lambda: all(r.do("passed", "shm.before_part") for r in readers))
    w1.kill()
    late = other.start("update", 2).error() if until(lambda: _broken(other), 10.0) else None
    assert late is not None
    assert (late.kind, "writer 1 was lost" in late.text) == ("VersionBrokenError", True)
    assert not pulling.done  # it still reads, from a version that is broken meanwhile
    assert pulling.get()["key"] == "1.2"
    assert every(readers, "wrong", 2) == [[], []]
    assert readers[0].do("state") == {"committed": "1.2", "dirty": False, "paused": False, "serves": "1.2"}


def _broken(reader: Child) -> bool:
    return reader.do("version_state", 2) == "BROKEN"
