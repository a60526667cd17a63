"""What the server that the tests' processes are forked from has loaded."""

from __future__ import annotations

from syncline.kernels import host
from tests.transport import children

host.load()
__all__ = ["children"]
