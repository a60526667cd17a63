"""What is left of a job that was killed, and what grows in one that lives."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.chaos.fleet import every, ready, shared_memory

if TYPE_CHECKING:
    from pathlib import Path

    from tests.chaos.fleet import Fleet

pytestmark = pytest.mark.timeout(60)


def clean(root: Path) -> dict[str, Any]:
    """Run the command that users run."""
    script = "from syncline.cli import app; app(['clean', '--json'])"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"SYNCLINE_RUN_DIR": str(root), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        timeout=50,
        check=True,
    )
    return json.loads(done.stdout)


def test_nothing_is_left_of_the_dead_and_the_living_are_not_touched(fleet: Fleet) -> None:
    before = shared_memory()
    writers = fleet.trainers(2)
    readers = fleet.readers("a", 2)
    other = fleet.trainer(job="alive")
    ready(*writers, *readers, other)
    every(writers, "fill", 1)
    every(writers, "publish", 1)
    assert readers[0].do("update", 1)["key"] == "1.1"
    sockets = fleet.root / "chaos" / "sockets"
    assert len(list(sockets.glob("*.shm"))) == 2
    for child in [*writers, *readers]:
        child.kill()
    assert shared_memory() <= before
    dead = set(sockets.iterdir())
    assert dead

    # the next start of the job sweeps what died; then the job dies again, and clean takes the rest
    again = fleet.trainer().ready()
    assert not dead & set(sockets.iterdir())
    report = clean(fleet.root)
    assert (report["removed"], sorted(report["live"])) == ([], ["alive", "chaos"])
    again.do("publish", 1)
    again.kill()
    report = clean(fleet.root)
    assert (report["removed"], sorted(report["live"])) == (["chaos"], ["alive"])
    assert not (fleet.root / "chaos").exists()
    other.do("publish", 1)
    assert other.do("published") == "1.1"
    assert shared_memory() <= before


def test_sixty_updates_leave_every_process_as_it_was(fleet: Fleet) -> None:
    """The quick form of B63 and B64: descriptors, threads and mapped regions are flat."""
    writers = fleet.trainers(2)
    readers = [*fleet.readers("a", 2), fleet.reader("b")]
    everybody = [*writers, *readers]
    ready(*everybody)
    controllers = [readers[0], readers[2]]
    counts = []
    for number in range(1, 61):
        every(writers, "fill", number)
        every(writers, "publish", number, "pulled")
        assert {one["key"] for one in every(controllers, "update", number)} == {f"1.{number}"}
        if number in (5, 60):
            counts.append(every(everybody, "resources"))
    assert every(readers, "wrong", 60) == [[], [], []]
    assert counts[0] == counts[1]
