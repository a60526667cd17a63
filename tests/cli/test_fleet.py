"""The commands' child processes, and theirs, end with the command: by word, by signal, and when it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from syncline.cli.demo import fleet as fleets
from syncline.cli.demo.fleet import Fleet
from syncline.errors import DeadlineError, SynclineError

ROOT = Path(__file__).parents[2]


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a dead orphan whose status nobody has taken yet


def _gone(*pids: int) -> bool:
    until = time.monotonic() + 10
    while any(map(_alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(_alive, pids))


def _fleet(directory: Path) -> Fleet:
    return Fleet(directory, {"PYTHONPATH": str(ROOT)}, lambda _child, _event: None)


def test_a_child_that_obeys_takes_its_own_with_it(tmp_path: Path) -> None:
    with _fleet(tmp_path) as fleet:
        child = fleet.start("child", "tests.cli.family")
        (ready,) = fleet.take([child], "ready", 60.0)
        assert _alive(ready["child"])
    assert child.process.returncode == 0
    assert _gone(child.process.pid, ready["child"])


def test_neither_deaf_children_nor_theirs_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "_GRACE", 0.2)
    monkeypatch.setattr(fleets, "_TERMINATING", 0.2)
    with _fleet(tmp_path) as fleet:
        child = fleet.start("child", "tests.cli.family", "stubborn")
        (ready,) = fleet.take([child], "ready", 60.0)
    assert child.process.returncode == -signal.SIGKILL
    assert _gone(child.process.pid, ready["child"])


def test_a_child_that_fails_is_reported_with_what_it_printed_last(tmp_path: Path) -> None:
    with _fleet(tmp_path) as fleet:
        child = fleet.start("child", "tests.cli.family", "fails")
        (ready,) = fleet.take([child], "ready", 60.0)
        with pytest.raises(SynclineError, match="child ended early") as caught:
            fleet.take([child], "never told", 60.0)
    assert "exit code 3" in str(caught.value)
    assert "it went wrong" in str(caught.value)
    assert _gone(ready["child"])


def test_one_child_may_be_dismissed(tmp_path: Path) -> None:
    with _fleet(tmp_path) as fleet:
        first, second = (fleet.start(name, "tests.cli.family") for name in ("first", "second"))
        events = fleet.take([first, second], "ready", 60.0)
        fleet.dismiss(first)
        assert _gone(first.process.pid, events[0]["child"])
        assert _alive(events[1]["child"])
        with pytest.raises(DeadlineError, match="second"):  # and nobody complains of the first one's end
            fleet.take([second], "never told", 0.3)
    assert _gone(events[1]["child"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_and_everything_that_it_started(tmp_path: Path, number: int) -> None:
    command = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.held", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert command.stdout is not None
    pids = [int(word) for word in command.stdout.readline().split()]
    assert len(pids) == 2
    command.send_signal(number)
    command.send_signal(number)  # impatience changes nothing
    assert command.wait(30) != 0
    assert _gone(*pids)
    command.stdout.close()
