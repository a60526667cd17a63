"""Waiting for a checkpoint that processes of another environment export."""

from __future__ import annotations

import time
from pathlib import Path


def wait(directory: str, seconds: float = 300.0) -> str:
    """Return a checkpoint directory when its weights are there."""
    limit = time.monotonic() + seconds
    while not (Path(directory) / "model.safetensors").is_file():
        if time.monotonic() > limit:
            raise TimeoutError(directory)
        time.sleep(0.1)
    return directory
