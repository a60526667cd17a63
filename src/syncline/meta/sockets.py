"""Unix sockets of a job: who owns which, and what the dead left behind.

A process that owns sockets holds ``<stem>.lock`` (its process id, as a rule); they are ``<stem>.<name>``.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from typing import TYPE_CHECKING, ClassVar

from syncline.errors import ProtocolError, SynclineError
from syncline.meta.locks import FileLock

if TYPE_CHECKING:
    from pathlib import Path

_LOCK_NAMES = 100


class SocketHold:
    """A process's hold on sockets of a job: `path` names them, `release` removes them.

    One lock serves all holds of a process on one directory. A forked child has no hold of its own: its
    parent's `release` does nothing there.
    """

    _mutex: ClassVar[threading.Lock] = threading.Lock()
    _locks: ClassVar[dict[Path, tuple[FileLock, int]]] = {}

    def __init__(self, lock_path: Path) -> None:
        self._lock_path, self._pid = lock_path, os.getpid()
        self._paths: list[Path] = []
        self._released = False

    @classmethod
    def take(cls, sockets: Path) -> SocketHold:
        """Return a hold on the directory ``sockets`` for this process."""
        pid = str(os.getpid())
        # A process of another container may have the same number: then a suffix tells the two apart.
        stems = [pid, *(f"{pid}-{n}" for n in range(1, _LOCK_NAMES))]
        with cls._mutex:
            for path in (sockets / f"{stem}.lock" for stem in stems):
                if path in cls._locks:
                    lock, holds = cls._locks[path]
                    cls._locks[path] = (lock, holds + 1)
                    return cls(path)
                if (lock := FileLock.acquire(path)) is not None:
                    lock.write(f"{pid}\n")
                    cls._locks[path] = (lock, 1)
                    return cls(path)
        raise SynclineError(f"no free lock name for process {pid} in {sockets}", hint="run `syncline clean`")

    @property
    def stem(self) -> str:
        """What the names of this process's sockets begin with."""
        return self._lock_path.stem

    def path(self, name: str) -> Path:
        """Return ``sockets/<stem>.<name>``, a path that `release` removes.

        Raises:
            ProtocolError: ``name`` is not a plain file name.
        """
        if not name or "/" in name or name == "lock":
            raise ProtocolError(
                "not a socket name", expected="a file name other than 'lock'", found=repr(name)
            )
        found = self._lock_path.with_name(f"{self.stem}.{name}")
        self._paths.append(found)
        return found

    def release(self) -> None:
        """Remove this hold's sockets, and with the last hold the lock file; a second call does nothing."""
        if self._released or self._pid != os.getpid():
            return
        self._released = True
        for path in self._paths:
            path.unlink(missing_ok=True)
        with self._mutex:
            lock, holds = self._locks.pop(self._lock_path)
            if holds > 1:
                self._locks[self._lock_path] = (lock, holds - 1)
            else:
                lock.unlink()

    @classmethod
    def forget_all(cls) -> None:
        """Drop the registry in a forked child: the locks are its parent's."""
        cls._mutex, cls._locks = threading.Lock(), {}


def sweep_sockets(sockets: Path) -> list[str]:
    """Remove what dead processes left in the directory ``sockets``; return the names removed, sorted.

    An entry is a dead process's if nobody holds the lock of its stem and, for a socket, nobody answers there.
    """
    stems = {entry.name.split(".", 1)[0] for entry in sockets.iterdir()}
    return [name for stem in sorted(stems) for name in _sweep_stem(sockets, stem)]


def _sweep_stem(sockets: Path, stem: str) -> list[str]:
    lock_path = sockets / f"{stem}.lock"
    left_lock = lock_path.exists()
    lock = FileLock.acquire(lock_path)  # held while we remove: a new process of that number waits for us
    if lock is None:
        return []
    entries = [path for path in sockets.iterdir() if path.name.split(".", 1)[0] == stem and path != lock_path]
    removed = [path.name for path in entries if not answers(path)]
    for name in removed:
        (sockets / name).unlink(missing_ok=True)
    lock.unlink()
    return sorted(removed + [lock_path.name] * left_lock)


def answers(path: Path) -> bool:
    """Whether ``path`` is a Unix socket at which a living process listens."""
    try:
        if not stat.S_ISSOCK(path.stat(follow_symlinks=False).st_mode):
            return False
    except FileNotFoundError:
        return False
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            # Through the descriptor: the path itself may be longer than a socket address.
            return probe.connect_ex(f"/proc/self/fd/{directory}/{path.name}") not in _NOBODY
    finally:
        os.close(directory)


_NOBODY = (errno.ECONNREFUSED, errno.ENOENT)
os.register_at_fork(after_in_child=SocketHold.forget_all)
