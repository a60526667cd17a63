"""The job's MetaServer and its client, and the run directory where they find each other."""

from __future__ import annotations

from syncline.meta.clean import CleanReport, clean
from syncline.meta.client import MetaClient
from syncline.meta.rundir import JobDir, find_endpoint, run_root
from syncline.meta.server import MetaServer
from syncline.meta.sockets import SocketHold

__all__ = [
    "CleanReport",
    "JobDir",
    "MetaClient",
    "MetaServer",
    "SocketHold",
    "clean",
    "find_endpoint",
    "run_root",
]
