from __future__ import annotations

import pytest

from syncline.protocol.ids import VersionKey
from tests.protocol.clone import clone, mutable
from tests.protocol.explore import Bounds, act, enabled, explore
from tests.protocol.world import World

ALL_STATES = {"OPEN", "SEALED", "RETIRED", "ABORTED", "BROKEN", "IDLE", "COMMITTED", "DIRTY"}


def report(bounds: Bounds, least: int) -> set[str]:
    """Explore, print how much was seen, and insist on a least number of states: a small one proves little."""
    result = explore(bounds)
    print(f"{bounds}: {result.states} states, {result.transitions} transitions, depth {result.depth}")
    assert result.states >= least
    newest = {VersionKey(1, number) for number in range(1, bounds.versions + 1)}
    assert newest <= result.served, "some version was never served: the search is hollow"
    return result.outcomes


def test_clones_share_nothing_that_can_change() -> None:
    """Walk along one long path; a shared object would let one branch of the search change another."""
    world, extra = World(), {"faults": 0, "a": 0, "b": 0}
    bounds = Bounds(modes=("staged",))
    for step in range(60):
        copy = clone(world)
        assert not mutable(world) & mutable(copy)
        actions = enabled(world, extra, bounds)
        if not actions:
            break
        act(world, extra, actions[step % len(actions)])
    assert extra["faults"] == 1


@pytest.mark.timeout(300)
def test_three_versions_without_faults() -> None:
    report(Bounds(versions=3, faults=0), 2_500)


@pytest.mark.timeout(300)
def test_two_versions_in_both_modes_without_faults() -> None:
    assert {"PULLING", "VERIFIED"} <= report(
        Bounds(versions=2, faults=0, modes=("in_place", "staged")), 2_800
    )


@pytest.mark.timeout(300)
def test_a_fault_and_another_try() -> None:
    outcomes = report(Bounds(versions=1, begins=2, faults=1, coarse=("b",)), 1_500)
    assert outcomes >= ALL_STATES - {"RETIRED"}


@pytest.mark.timeout(300)
def test_two_versions_with_any_fault_at_any_moment() -> None:
    assert report(Bounds(versions=2, faults=1, coarse=("b",)), 7_500) >= ALL_STATES


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_versions_with_any_fault_at_any_moment() -> None:
    assert report(Bounds(versions=3, faults=1, coarse=("b",)), 30_000) >= ALL_STATES
