"""Removing the run directories of dead jobs."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from syncline.errors import AuthError, ProtocolError
from syncline.meta.files import check_directory
from syncline.meta.locks import FileLock
from syncline.meta.rundir import JobDir, check_job_name, run_root
from syncline.meta.sockets import answers

if TYPE_CHECKING:
    from pathlib import Path

_REMOVING = ".removing-"


class CleanReport(msgspec.Struct):
    """What a clean did.

    Attributes:
        root: the directory of this user's jobs.
        removed: names of the jobs whose directories are gone.
        live: jobs left alone because processes live, each with the locks they hold.
        refused: entries not ours to judge (links, other users', writable by others), with the reason.
    """

    root: str
    removed: list[str]
    live: dict[str, list[str]]
    refused: dict[str, str]


def clean(job: str | None = None, root: Path | None = None) -> CleanReport:
    """Remove the run directories of dead jobs of this user, or of one ``job`` if it is dead.

    Raises:
        AuthError: the root directory itself is not safely ours; nothing was touched.
        ProtocolError: not a job name.
    """
    root = root or run_root()
    report = CleanReport(str(root), [], {}, {})
    if not os.path.lexists(root):
        return report
    check_directory(root)
    names = [check_job_name(job)] if job else sorted(entry.name for entry in root.iterdir())
    for name in names:
        if name.startswith(".") and _REMOVING in name:  # a clean that was killed had taken it out of use
            check_directory(root / name)
            shutil.rmtree(root / name)
        elif os.path.lexists(root / name):
            _clean_one(name, root, report)
    return report


def _clean_one(name: str, root: Path, report: CleanReport) -> None:
    try:
        directory = JobDir.open(name, root)
        if directory.sockets.exists():
            check_directory(directory.sockets)
    except (AuthError, ProtocolError) as error:
        report.refused[name] = error.what
        return
    with ExitStack() as locks:
        # Every lock is kept until the directory has lost its name, so nobody can come alive in it: a member
        # takes members.lock (shared) before its sockets' lock.
        live = []
        for path in (directory.server_lock, directory.members_lock):
            live += _take(path, directory, locks)
        for path in sorted(directory.sockets.glob("*.lock")):
            live += _take(path, directory, locks)
        if directory.sockets.exists():
            live += [f"sockets/{p.name}" for p in sorted(directory.sockets.iterdir()) if answers(p)]
        if live:
            report.live[name] = live
            return
        grave = root / f".{name}{_REMOVING}{secrets.token_hex(8)}"
        directory.path.rename(grave)
    shutil.rmtree(grave)
    report.removed.append(name)


def _take(path: Path, directory: JobDir, locks: ExitStack) -> list[str]:
    """Lock ``path`` until ``locks`` closes; return its name if a living process has it."""
    lock = FileLock.acquire(path)
    if lock is None:
        return [str(path.relative_to(directory.path))]
    locks.enter_context(lock)
    return []
