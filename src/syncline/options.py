"""Options that hold everywhere: deadlines, leases and size bounds, each with the default of the design."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Times in seconds, sizes in bytes. Every field can be set by ``SYNCLINE_<FIELD>`` in the environment.

    Attributes:
        connect_timeout: from construction to a registered member with an agreed plan.
        update_timeout: one update of one instance, or one wait for a version.
        heartbeat: interval at which a member reports that it lives and how far it came.
        lease: a member not heard of for this long is dead.
        stall: a pin whose bytes did not move for this long is revoked.
        max_frame: largest frame that is decoded.
        threads: copy and digest threads a process uses for one transfer.
        transport: for everything: ``"shm"`` or ``"gloo"``, on GPUs ``"cuda_ipc"`` or ``"nccl"``; ``"auto"``:
            mapped memory (``shm``, ``cuda_ipc``) on one host, messages otherwise.
    """

    connect_timeout: float = 60.0
    update_timeout: float = 120.0
    heartbeat: float = 2.0
    lease: float = 10.0
    stall: float = 10.0
    max_frame: int = 256 << 20
    threads: int = 1
    transport: str = "auto"

    @classmethod
    def from_environment(cls, **overrides: float | str) -> Self:
        """Return the defaults, changed by ``SYNCLINE_*`` variables, then by ``overrides``."""
        kinds = {"int": int, "float": float, "str": str}
        found = {
            f.name: kinds[str(f.type)](text)
            for f in fields(cls)
            if (text := os.environ.get(f"SYNCLINE_{f.name.upper()}")) is not None
        }
        return cls(**(found | overrides))  # pyright: ignore[reportArgumentType]
