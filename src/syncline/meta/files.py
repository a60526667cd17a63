"""Small files and directories of ours: checked for owner, kind and mode, written whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from typing import TYPE_CHECKING

from syncline.errors import AuthError

if TYPE_CHECKING:
    from pathlib import Path

_OTHERS_WRITE = 0o022
_SMALL_FILE = 64 << 10


def check_directory(path: Path) -> None:
    """Check that ``path`` is a real directory of this user that nobody else can write to.

    Raises:
        AuthError: a symbolic link, not a directory, another owner, or writable by group or others.
        FileNotFoundError: there is none.
    """
    info = path.stat(follow_symlinks=False)
    hint = "remove it, or name another directory in SYNCLINE_RUN_DIR"
    if not stat.S_ISDIR(info.st_mode):
        raise AuthError(f"{path} is not a directory", expected="a directory, not a link to one", hint=hint)
    if info.st_uid != os.geteuid():
        raise AuthError(
            f"{path} belongs to another user",
            expected=f"uid {os.geteuid()}",
            found=f"uid {info.st_uid}",
            hint=hint,
        )
    if info.st_mode & _OTHERS_WRITE:
        raise AuthError(
            f"{path} can be written by others",
            expected="mode 0700",
            found=oct(stat.S_IMODE(info.st_mode)),
            hint=hint,
        )


def open_private(path: Path, flags: int) -> int:
    """Open a file of ours without following links, and return its descriptor.

    Raises:
        AuthError: a symbolic link, not a regular file, or another user's.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if path.is_symlink():
            raise AuthError(
                f"{path} is a symbolic link", expected="a regular file", hint="remove it"
            ) from error
        raise
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise AuthError(f"{path} is not a regular file", hint="remove it")
    if info.st_uid != os.geteuid():
        os.close(fd)
        raise AuthError(
            f"{path} belongs to another user", expected=f"uid {os.geteuid()}", found=f"uid {info.st_uid}"
        )
    return fd


def read_small(path: Path, *, private: bool = False) -> bytes:
    """Return the first 64 KiB of a file of ours.

    Raises:
        AuthError: `open_private` refuses it, or it should be ``private`` and others can read it.
        FileNotFoundError: there is none.
    """
    fd = open_private(path, os.O_RDONLY)
    try:
        mode = os.fstat(fd).st_mode
        if private and mode & 0o077:
            raise AuthError(
                f"{path} can be read by others",
                expected="mode 0600",
                found=oct(stat.S_IMODE(mode)),
                hint="chmod 600",
            )
        return os.read(fd, _SMALL_FILE)
    finally:
        os.close(fd)


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file of mode 0600; it is on disk when this returns."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, content)
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_durably(path: Path, content: bytes) -> None:
    """Put ``content`` in place of the file ``path``; a crash leaves the old or the new, whole."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    write_durably(draft, content)
    draft.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
