"""The kernels are compiled, once, outside of any test's time limit."""

from __future__ import annotations

import pytest

from syncline.kernels import host


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> None:
    host.load()
