"""Whether memory that is about to be allocated exists: asked before a byte is touched.

Shared pages have no second chance: a page of `/dev/shm` that cannot be had is a SIGBUS in the middle of a
copy, and a cgroup over its limit kills. So every large allocation is preceded by `require_memory`.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from syncline.errors import MemoryBudgetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_V1_UNLIMITED = 1 << 62  # cgroup v1 writes "no limit" as the largest page-aligned int64


class Use(enum.Enum):
    """What the memory will be; it decides which limits hold."""

    PRIVATE = "private"
    """Anonymous memory of this process."""
    MEMFD = "memfd"
    """A memfd: charged to the cgroup like private memory, not bounded by the size of `/dev/shm`."""
    SHM = "shm"
    """A file on the tmpfs of POSIX shared memory: bounded by that as well."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the numbers are read.

    Attributes:
        proc: root of procfs.
        cgroup: mount point of the cgroup file systems.
        shm: the tmpfs of POSIX shared memory.
    """

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    shm: Path = Path("/dev/shm")  # noqa: S108 -- asked for its size, never written


SYSTEM = Sources()


@dataclass(frozen=True, slots=True)
class Free:
    """Bytes free under one limit, and which limit that is."""

    nbytes: int
    limit: str


def require_memory(nbytes: int, what: str, kind: Use = Use.PRIVATE, sources: Sources = SYSTEM) -> None:
    """Return if ``nbytes`` can be allocated now under every limit known.

    Raises:
        MemoryBudgetError: naming ``what``, the bytes needed, the bytes free, and the limit.
    """
    if nbytes <= 0:
        return
    free = free_memory(kind, sources)
    if free is not None and nbytes > free.nbytes:
        raise MemoryBudgetError(
            f"not enough memory for {what}",
            expected=f"{nbytes} bytes needed",
            found=f"{max(free.nbytes, 0)} bytes free, limited by {free.limit}",
            hint="free memory, raise the limit, or spread the model over more ranks; nothing was changed",
        )


def free_memory(kind: Use, sources: Sources = SYSTEM) -> Free | None:
    """Return the tightest limit, or None where the system states none."""
    limits = list(_limits(kind, sources))
    return min(limits, key=lambda free: free.nbytes) if limits else None


def _limits(kind: Use, sources: Sources) -> Iterator[Free]:
    available = _mem_available(sources)
    if available is not None:
        yield Free(available, "MemAvailable of the machine")
    yield from _cgroup_limits(sources)
    if kind is Use.SHM and sources.shm.is_dir():
        stat = os.statvfs(sources.shm)
        yield Free(stat.f_bavail * stat.f_frsize, f"the size of {sources.shm}")


def _mem_available(sources: Sources) -> int | None:
    for line in _read(sources.proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10  # kB
    return None


def _cgroup_limits(sources: Sources) -> Iterator[Free]:
    """Yield what is free in this process's memory cgroup and each of its ancestors, v1 and v2."""
    for line in _read(sources.proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")  # hierarchy:controllers:path
        controllers, separator, path = rest.partition(":")
        if not separator:
            continue
        if controllers == "":
            for root in (sources.cgroup, sources.cgroup / "unified"):
                yield from _walk(root, path, _free_v2)
        elif "memory" in controllers.split(","):
            yield from _walk(sources.cgroup / "memory", path, _free_v1)


def _walk(root: Path, path: str, free_in: Callable[[Path], int | None]) -> Iterator[Free]:
    parts = [part for part in path.split("/") if part]
    # In a container the path is often one of the host that does not exist here: the mount is then our own
    # group.
    folders = [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    for folder in folders:
        free = free_in(folder)
        if free is not None:
            yield Free(free, f"the memory cgroup {folder}")


def _free_v2(folder: Path) -> int | None:
    limit, current = _number(folder / "memory.max"), _number(folder / "memory.current")
    if limit is None or current is None:
        return None
    return limit - current + _reclaimable(folder, "")


def _free_v1(folder: Path) -> int | None:
    limit, current = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    if limit is None or current is None or limit >= _V1_UNLIMITED:
        return None
    return limit - current + _reclaimable(folder, "total_")


def _reclaimable(folder: Path, prefix: str) -> int:
    """Return bytes of clean file cache: the kernel drops it before it refuses an allocation.

    Shared memory is charged as cache but cannot be dropped; it is on the anonymous lists, not counted here.
    Dirty pages must be written first, which may take longer than an allocation waits.
    """
    stat = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines())
    file_names = ("inactive_file", "active_file")
    dirty_names = ("dirty", "writeback") if prefix else ("file_dirty", "file_writeback")
    clean, dirty = (sum(int(stat.get(prefix + n, 0)) for n in names) for names in (file_names, dirty_names))
    return max(clean - dirty, 0)


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None  # v2 writes "max" for no limit


def _read(path: Path) -> str:
    """Return a file of the kernel's, empty where this kernel or this user has none."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
