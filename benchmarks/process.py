"""What a process uses, as the kernel counts it, and the highest that it ever used in between."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

MIB = 1 << 20
_EVERY = 0.002


def status(pid: int | str = "self") -> dict[str, int]:
    """Return the sizes in ``/proc/PID/status``, in bytes."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if value.endswith("kB"):
            found[key] = int(value.split()[0]) * 1024
    return found


def held() -> dict[str, int]:
    """Return this process's memory in bytes, its descriptors, and its mappings of shared memory."""
    gc.collect()
    now = status()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {
        "memory": now["RssAnon"] + now["RssShmem"],
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "segments": sum("/memfd:" in line or "/dev/shm" in line for line in maps),  # noqa: S108 - only read
    }


class OwnPeak:
    """The highest resident memory of this process within a block, exactly: the kernel's own mark."""

    def __enter__(self) -> Self:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the mark before
        self._before = status()["VmRSS"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = status()
        self.peak = max(0, now["VmHWM"] - self._before)
        self.after = now["VmRSS"] - self._before


class PrivatePeak:
    """The highest private memory of other processes within a block, looked at every 2 ms."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self.highest = dict.fromkeys(pids, 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.is_set():
            for pid in self._pids:
                self.highest[pid] = max(self.highest[pid], status(pid)["RssAnon"])
            time.sleep(_EVERY)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
