"""vLLM's modules, imported when they are needed: this package is importable, and checkable, without vLLM."""

from __future__ import annotations

import importlib
from typing import Any


def upstream(name: str) -> Any:
    """Return vLLM's module ``vllm.<name>``."""
    return importlib.import_module(f"vllm.{name}")
