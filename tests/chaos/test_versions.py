"""Which versions can be had: unknown, older, future ones; nobody there; following."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.fleet import ready, until

if TYPE_CHECKING:
    from tests.chaos.fleet import Fleet

pytestmark = pytest.mark.timeout(60)


def test_versions_asked_for_by_number(fleet: Fleet) -> None:
    trainer = fleet.trainer().ready()
    trainer.do("fill", 1)
    trainer.do("publish", 1)
    assert trainer.do("published") == "1.1"  # with no reader
    assert trainer.do("committed") == ()
    trainer.do("fill", 3)
    reader = fleet.reader().ready()
    trainer.do("publish", 3)
    trainer.do("published")

    unknown = reader.start("update", 2).error()  # never published, and never will be
    assert unknown.kind in ("UnknownVersionError", "StaleVersionError")
    assert "1.2" in unknown.text
    assert reader.do("update", 3)["key"] == "1.3"
    again = reader.do("update", 3)
    assert (again["changed"], again["nbytes"]) == (False, 0)
    older = reader.start("update", 1).error()
    assert older.kind == "StaleVersionError"

    future = reader.start("update", 5)
    late = fleet.reader("b").ready().start("update", 9, timeout=0.7)
    error = late.error()
    assert error.kind == "DeadlineError"
    assert "1.9" in error.text
    assert not future.done
    trainer.do("fill", 4)
    trainer.do("publish", 4)
    trainer.do("fill", 5)
    assert not future.done
    assert reader.do("served") == "1.3"
    trainer.do("publish", 5)
    assert future.get()["key"] == "1.5"
    assert reader.do("wrong", 5) == []


def test_following_every_second_version(fleet: Fleet) -> None:
    trainer = fleet.trainer().ready()
    reader, keen = fleet.reader("a"), fleet.reader("b")
    ready(reader, keen)
    reader.do("follow", 2)
    keen.do("follow")
    for number in range(1, 6):
        trainer.do("fill", number)
        trainer.do("publish", number)
        assert until(lambda n=number: keen.do("served") == f"1.{n}")
        if number % 2:
            assert until(lambda n=number: reader.do("served") == f"1.{n}")
    time.sleep(0.3)
    assert reader.do("followed") == ["1.1", "1.3", "1.5"]
    assert keen.do("followed") == [f"1.{number}" for number in range(1, 6)]
    assert (reader.do("wrong", 5), keen.do("wrong", 5)) == ([], [])


def test_a_follower_that_falls_behind_is_held(fleet: Fleet) -> None:
    trainer = fleet.trainer().ready()
    held, free = fleet.reader("held"), fleet.reader("free")
    ready(held, free)
    for reader, most in ((held, 1), (free, None)):
        reader.do("follow", 1, most)
    trainer.do("fill", 1)
    trainer.do("publish", 1)
    for reader in (held, free):
        assert until(lambda r=reader: r.do("served") == "1.1")
        reader.do("arm_for_good", "worker.before_bind", "no way to the writer")
    for number in (2, 3):
        trainer.do("fill", number)
        trainer.do("publish", number)
        for reader in (held, free):
            assert until(lambda r=reader, n=number: f"version 1.{n} failed" in r.do("log"))
    assert until(lambda: held.do("paused"))
    time.sleep(0.5)
    assert free.do("forward", 3.0) == "1.1"  # stale, but whole
    for reader in (held, free):
        reader.do("disarm")
    for reader in (held, free):
        assert until(lambda r=reader: r.do("served") == "1.3")
        assert until(lambda r=reader: not r.do("paused"))
        assert reader.do("wrong", 3) == []
