"""One server to fork processes from; a fleet for every test, of which nothing stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from syncline.kernels import host
from tests.chaos.fleet import SPAWN, Fleet
from tests.forkserver import preloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="package", autouse=True)
def _fork_server() -> Iterator[None]:
    host.load()  # compiled once, outside of any test's time limit
    with preloaded("tests.chaos.preload"):
        first = SPAWN.Process(target=int)  # the server's imports take seconds, which are no test's either
        first.start()
        first.join()
        yield


@pytest.fixture
def fleets(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Makes fleets that share a run root, and ends them."""
    made: list[Fleet] = []

    def make(**options: float | str) -> Fleet:
        fleet = Fleet(tmp_path / "run", **options)  # pyright: ignore[reportArgumentType]
        made.append(fleet)
        return fleet

    yield make
    for fleet in made:
        fleet.close()


@pytest.fixture
def fleet(fleets: Callable[..., Fleet]) -> Fleet:
    """A fleet with short deadlines."""
    return fleets()
