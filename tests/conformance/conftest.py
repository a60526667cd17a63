"""Installs the toy engine as another package would be, by files and a ``.dist-info``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from syncline import extensions

if TYPE_CHECKING:
    from collections.abc import Iterator

OUTSIDE = Path(__file__).parent / "outside"
ENTRY_POINTS = """
[syncline.adapters]
toy = toy_engine:ToyAdapter
broken = toy_engine.missing:Adapter

[syncline.transports]
toy-shm = syncline.transport.shm:ShmTransport

[syncline.transforms]
broken = toy_engine.transforms:missing
toy = toy_engine.transforms:offer
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A site directory with the package in it, on the path."""
    place = tmp_path_factory.mktemp("site")
    shutil.copytree(OUTSIDE / "toy_engine", place / "toy_engine")
    info = place / "toy_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    sys.path.insert(0, str(place))
    extensions.installed.forget()
    yield place
    sys.path.remove(str(place))
    extensions.installed.forget()
