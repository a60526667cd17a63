"""The version of this library, as members tell it each other."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def library_version() -> str:
    """Return syncline's version, or ``unknown`` where it runs from an uninstalled tree."""
    try:
        return version("syncline")
    except PackageNotFoundError:
        return "unknown"
