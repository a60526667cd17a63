"""Let vLLM start in a process where numba is loaded.

On CPU, a starting worker of vLLM looks into every object of every module for kernels that it replaces: into
``vars(x)`` of whatever has a ``__dict__``. The object through which numba calls LLVM claims every attribute
as a function of LLVM, ``__dict__`` too, and the start ends in ``AttributeError: '_lib_fn_wrapper' object has
no attribute 'get'``. So a second ``LLM(...)``, or a first one beside a trainer, could not start in a process
where syncline's kernels had been used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def make_llvm_scannable() -> None:
    """Give numba's LLVM object an empty ``__dict__``; it stays what it is to everybody else."""
    lib: Any = getattr(import_module("llvmlite.binding.ffi"), "lib", None)
    functions = getattr(lib, "_fntab", None)  # functions that were asked for once, by name
    if isinstance(functions, dict) and not isinstance(getattr(lib, "__dict__", {}), dict):
        functions["__dict__"] = {}
