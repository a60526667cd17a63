"""Unix sockets by path, however long the path: they are reached through a descriptor of their directory."""

from __future__ import annotations

import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

from syncline.errors import DeadlineError, PeerLostError, TransportError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MAX_NAME = 70  # of the 107 bytes of a socket address, after "/proc/self/fd/<number>/"


@contextmanager
def _short(path: Path) -> Iterator[str]:
    if len(path.name.encode()) > _MAX_NAME:
        raise TransportError(
            "a socket's name is too long", expected=f"at most {_MAX_NAME} bytes", found=path.name
        )
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def bind(path: Path, backlog: int) -> socket.socket:
    """Return a non-blocking listening socket at ``path``, mode 0600.

    Raises:
        TransportError: the path exists, or its directory cannot be used.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with _short(path) as name:
            sock.bind(name)
        path.chmod(0o600)  # nobody can connect before `listen`
        sock.listen(backlog)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise TransportError(
            f"cannot listen at {path}",
            found=error,
            hint="every server needs a path of its own, in a directory of the job",
        ) from error
    return sock


def connect(path: Path, deadline: float, who: str) -> socket.socket:
    """Return a non-blocking socket connected to ``path`` within ``deadline`` seconds.

    Raises:
        PeerLostError: nobody listens there.
        DeadlineError: somebody does, but does not accept.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.settimeout(max(deadline, 0.001))
    try:
        with _short(path) as name:
            sock.connect(name)
    except TimeoutError as error:
        sock.close()
        raise DeadlineError(
            f"{who} does not accept connections", expected=f"within {deadline:g} s"
        ) from error
    except OSError as error:
        sock.close()
        raise PeerLostError(f"{who} cannot be reached at {path}", found=error) from error
    sock.setblocking(False)
    return sock
