"""Stand-ins for packages that SGLang imports wherever it might need them, and does not need on a CPU.

Every name of such a package is there, and every call of one raises: a test that would depend on it fails, it
never computes something else.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def stand_in(package: str) -> Callable[[str], Absent]:
    """Let every module of a package be imported; return what gives its names, as its ``__getattr__``."""
    sys.meta_path.append(_Finder(package))
    return _absent_of(package)


class Absent:
    """A function, a class or a namespace that is not there."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._path}.{name}")

    def __call__(self, *_args: object, **_kwargs: object) -> Any:
        raise RuntimeError(f"{self._path} was called: this process has only a stand-in for it")


class _Finder:
    """Answers ``import PACKAGE.anything`` with an empty module of absent names."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(self._prefix):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _absent_of(spec.name)
        return module

    def exec_module(self, _module: types.ModuleType) -> None:
        """There is nothing to run."""


def _absent_of(path: str) -> Callable[[str], Absent]:
    def absent(name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{path}.{name}")

    return absent
