"""Which interpreter runs an engine: each engine pins a torch of its own, so each has its own environment."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from syncline.errors import SynclineError

_LOOK = """
import sys
from importlib.util import find_spec
print("looked for", *(name for name in sys.argv[1:] if find_spec(name) is None))
"""
_SECONDS = 60.0


class Engine(StrEnum):
    """What the demo can run as an inference engine."""

    TRANSFORMERS = "transformers"
    VLLM = "vllm"


class Listed(StrEnum):
    """The engines whose live tensors are listed."""

    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter that has an engine.

    Attributes:
        command: what starts it; never with the working directory on its path, where a folder may be called
            as the engine is.
        environment: to be added to that of the processes that it runs.
    """

    command: tuple[str, ...]
    environment: dict[str, str]


def vllm(python: Path | None) -> Interpreter:
    """Return the interpreter that runs vLLM: the given one, or this one.

    Raises:
        SynclineError: it lacks vLLM or syncline, or is no interpreter; says what to do.
    """
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers share the cores there are
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the process that we start
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_PLUGINS": "syncline",
    }
    return _interpreter(python, "vllm", "vLLM", settings)


def sglang(python: Path | None) -> Interpreter:
    """Return the interpreter that runs SGLang: the given one, or this one.

    Raises:
        SynclineError: it lacks SGLang or syncline, or is no interpreter; says what to do.
    """
    return _interpreter(python, "sglang", "SGLang", {"TORCHDYNAMO_DISABLE": "1"})  # nothing is generated


def _interpreter(python: Path | None, module: str, title: str, settings: dict[str, str]) -> Interpreter:
    path = sys.executable if python is None else _absolute(python)
    if missing := _missing(path, (module, "syncline")):
        raise SynclineError(
            f"{title} cannot be run by this Python interpreter",
            expected=f"{module} and syncline, installed in one environment",
            found=f"no {' and no '.join(missing)} for {path}",
            hint=f"`make .venv-{module}/.installed` installs both; then run .venv-{module}/bin/syncline, "
            f"or give --engine-python .venv-{module}/bin/python",
        )
    given = {name: value for name, value in settings.items() if name not in os.environ}
    return Interpreter((path, "-P", "-W", "ignore"), given | kernels_apart(path))


def kernels_apart(python: str) -> dict[str, str]:
    """Return the setting that keeps an environment's compiled kernels in it, apart from other versions'."""
    environment = Path(python).parent.parent
    if "NUMBA_CACHE_DIR" in os.environ or not (environment / "pyvenv.cfg").is_file():
        return {}
    return {"NUMBA_CACHE_DIR": str(environment / "numba")}


def _absolute(python: Path) -> str:
    return str(python.absolute())  # not resolved: a virtual environment is known by the link in it


def _missing(python: str, modules: tuple[str, ...]) -> list[str]:
    if python == sys.executable:
        return [name for name in modules if find_spec(name) is None]
    try:
        done = subprocess.run(  # noqa: S603 (an interpreter that the user named)
            [python, "-P", "-c", _LOOK, *modules],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise _not_python(error) from error
    said = done.stdout.split()
    if said[:2] != ["looked", "for"]:
        raise _not_python(f"{python}, which says {done.stdout[:200]!r}")
    return said[2:]


def _not_python(found: object) -> SynclineError:
    return SynclineError(
        "not a Python interpreter that works", expected="--engine-python PATH of a python", found=found
    )
