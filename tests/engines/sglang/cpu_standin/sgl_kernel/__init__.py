"""A stand-in that lets SGLang be imported where its kernels cannot run: on a CPU without them.

SGLang imports names from ``sgl_kernel`` wherever it might need them. Every name is there, and every call of
one raises: a test that would depend on a kernel fails, it never computes something else.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class Absent:
    """A kernel, or a namespace of kernels, that is not there."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._path}.{name}")

    def __call__(self, *_args: object, **_kwargs: object) -> Any:
        raise RuntimeError(f"{self._path} was called: this process has no sgl_kernel, only a stand-in")


class _Finder:
    """Answers ``import sgl_kernel.anything`` with an empty module of absent names."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _absent_of(spec.name)
        return module

    def exec_module(self, _module: types.ModuleType) -> None:
        """There is nothing to run."""


def _absent_of(path: str) -> Any:
    def absent(name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{path}.{name}")

    return absent


__getattr__ = _absent_of(__name__)
sys.meta_path.append(_Finder())
