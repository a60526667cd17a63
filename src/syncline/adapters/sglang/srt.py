"""SGLang's own modules, imported where they are used: in a process that runs SGLang."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from syncline.errors import AdapterError


def srt(module: str) -> Any:
    """Return SGLang's module ``sglang.srt.<module>``.

    Raises:
        AdapterError: it is not installed here, or is of a version that keeps its things elsewhere.
    """
    try:
        return import_module(f"sglang.srt.{module}")
    except ImportError as error:
        raise AdapterError(
            "a module of SGLang cannot be imported",
            expected=f"sglang.srt.{module}, as in SGLang 0.5.23",
            found=error,
            hint="run this in the environment that SGLang is installed in",
        ) from error


def srt_version() -> str:
    """Return SGLang's version."""
    return str(import_module("sglang.version").__version__)
