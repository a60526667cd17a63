"""A job of its own for every test of the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.store.pair import Job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def job(run_dir: Path) -> Iterator[Job]:
    """A job in which writers and readers are made, and closed at the test's end."""
    with Job("store") as made:
        yield made
