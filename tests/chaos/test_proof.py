"""What proofs find: replicas that differ, bits that flip on either side of the transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos.fleet import every, ready

if TYPE_CHECKING:
    from tests.chaos.fleet import Fleet

pytestmark = pytest.mark.timeout(60)


def test_replicas_that_differ_are_named(fleet: Fleet) -> None:
    """One element of one replica (B51): nobody commits either of them."""
    writers = fleet.trainers(2)
    readers = fleet.readers("a", 2)
    ready(*writers, *readers)
    every(writers, "fill", 1)
    writers[1].do("spoil", "down.weight", 3)  # column 3 of row 0: rank 0's half
    every(writers, "publish", 1)
    error = readers[0].start("update", 1).error()
    assert error.kind == "ReplicaDivergenceError"
    assert error.tensor == "down.weight"
    for part in ("writers 0 and 1", "[0:16, 0:12]"):
        assert part in error.text
    state = readers[0].do("state")
    assert (state["committed"], state["dirty"], state["paused"]) == (None, True, True)
    every(writers, "fill", 2)
    every(writers, "publish", 2)
    assert readers[0].do("update", 2)["key"] == "1.2"
    assert every(readers, "wrong", 2) == [[], []]


def test_a_bit_that_flips_is_found_and_named(fleet: Fleet) -> None:
    """In the reader after the pull (level installed), in the source after its digest (delivered): B103."""
    trainer = fleet.trainer().ready()
    readers = fleet.readers("a", 2)
    ready(*readers)
    trainer.do("fill", 1)
    trainer.do("publish", 1)
    assert readers[0].do("update", 1)["key"] == "1.1"
    trainer.do("fill", 2)
    trainer.do("publish", 2)
    readers[1].do("flip_after", "shm.after_last_byte", "up.weight", 37)
    error = readers[0].start("update", 2, verify="installed").error()
    assert (error.kind, error.tensor) == ("DigestMismatchError", "up.weight")
    # rank 1 holds rows 12 to 24 of 24 x 16: its element 37 is in row 12 + 2, column 5
    for part in ("installed", "instance a, rank 1", "first differing element (14, 5)", "block 0"):
        assert part in error.text
    state = readers[0].do("state")
    assert (state["committed"], state["dirty"], state["paused"]) == ("1.1", True, True)
    assert readers[0].do("update", 2, verify="installed")["level"] == "installed"
    assert every(readers, "wrong", 2) == [[], []]

    trainer.do("fill", 3)
    trainer.do("publish", 3)
    trainer.do("published")  # digested
    trainer.do("spoil", "embed.weight", 5)
    error = readers[0].start("update", 3).error()
    assert (error.kind, error.tensor) == ("DigestMismatchError", "embed.weight")
    for part in ("delivered", "instance a, rank 0", "from writer 0", "changed inside its read window"):
        assert part in error.text
    assert readers[0].do("state")["committed"] == "1.2"
    assert readers[0].do("paused")
    trainer.do("fill", 4)
    trainer.do("publish", 4)
    trainer.do("fill", 5)  # right after the send: the version sent was proved, not the weights of now
    trainer.do("publish", 5)
    assert readers[0].do("update", 5)["key"] == "1.5"
    assert every(readers, "wrong", 5) == [[], []]
