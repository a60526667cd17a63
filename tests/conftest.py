"""Every test gets a run directory of its own and one thread a process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private run root for jobs, inherited by child processes."""
    root = tmp_path / "run"
    monkeypatch.setenv("SYNCLINE_RUN_DIR", str(root))
    return root
