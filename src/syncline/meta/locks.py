"""Locks of files that die with their process: the only trustworthy sign of life in a run directory."""

from __future__ import annotations

import fcntl
import os
import weakref
from typing import TYPE_CHECKING, Self

from syncline.meta.files import open_private

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """One `flock` on one file of mode 0600, released by `release` or by the kernel when the process dies.

    A forked child does not keep its parent's locks alive: its copies of the descriptors are closed at the
    fork. A lock counts only while its file still has its name, so a lock file may be unlinked by whoever
    holds it.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd, self.path = fd, path
        _held.add(self)

    @classmethod
    def acquire(cls, path: Path, *, shared: bool = False) -> Self | None:
        """Return the lock on ``path``, created where missing; None where another holder excludes it.

        Raises:
            AuthError: the path is a symbolic link, or a file of another user.
            FileNotFoundError: its directory is gone.
        """
        mode = fcntl.LOCK_NB | (fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        while True:
            fd = open_private(path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(fd, mode)
            except BlockingIOError:
                os.close(fd)
                return None
            if _same_file(fd, path):
                return cls(fd, path)
            os.close(fd)  # unlinked between open and flock: lock the file that has the name now

    def write(self, text: str) -> None:
        """Replace the file's content, which tells others who holds the lock."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def unlink(self) -> None:
        """Remove the file while its lock is still held, then release."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.forget()

    def forget(self) -> None:
        """Close the descriptor without unlocking: what a forked child does with its parent's lock."""
        fd, self._fd = self._fd, -1
        _held.discard(self)
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _same_file(fd: int, path: Path) -> bool:
    try:
        named = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
