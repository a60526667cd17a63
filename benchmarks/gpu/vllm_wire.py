"""What the trainer and the engines of the vLLM benchmark agree on."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

GROUP_PORT = 29655


def secret(directory: Path) -> bytes:
    """Return the key of the socket that carries vLLM's own IPC handles."""
    return (directory / "secret").read_bytes()


def only_in_ray() -> None:
    """Let vLLM's IPC backend be imported where Ray is missing: one of its ways to send uses it, ours not."""
    if "ray" not in sys.modules and find_spec("ray") is None:
        sys.modules["ray"] = module_from_spec(ModuleSpec("ray", None))
