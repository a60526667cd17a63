"""One fork server a folder of tests: `multiprocessing` has one a process, and the last preload list wins."""

from __future__ import annotations

from contextlib import contextmanager
from multiprocessing import forkserver
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def preloaded(*modules: str) -> Iterator[None]:
    """Fork processes from a fresh server that has loaded ``modules``, and from another one afterwards."""
    server = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    before = server._preload_modules
    server._stop()
    server.set_forkserver_preload(list(modules))
    try:
        yield
    finally:
        server._stop()
        server.set_forkserver_preload(before)
