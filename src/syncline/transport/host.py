"""Who and where this process is."""

from __future__ import annotations

import os
import secrets
import socket
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from syncline.transport.base import Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncline.transport.base import Transport

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def host_id() -> str:
    """Return a name that two processes share only if they run on one boot of one machine.

    ``SYNCLINE_HOST`` in the environment overrides it. Equality is necessary for shared memory, not
    sufficient: containers of one machine share it as well, so a transport also tries to reach its peer.
    """
    given = os.environ.get("SYNCLINE_HOST")
    if given:
        return given
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "unknown"
    return f"{socket.gethostname()}/{boot[:13]}"


def new_id() -> str:
    """Return a fresh `Endpoint.id`."""
    return secrets.token_hex(8)


def endpoint(job: str, name: str, process_id: str, transports: Iterable[Transport]) -> Endpoint:
    """Return where this process can be met, by the transports that it has."""
    addresses = {t.name: t.address for t in transports}
    return Endpoint(job=job, id=process_id, name=name, host=host_id(), uid=os.geteuid(), addresses=addresses)
