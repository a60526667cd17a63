"""Runs a table in slices, from one or several threads, with progress and cancellation between slices."""

from __future__ import annotations

import enum
import threading
from typing import TYPE_CHECKING

import numpy as np

from syncline.kernels import host

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncline.kernels.table import Table

SLICE_BYTES = 16 << 20  # a few milliseconds of copying: short to cancel, long beside the cost of a call
RUN_BYTES = 8 << 20  # longest run after `Table.split`: a tensor in one piece is shared among threads


class Op(enum.Enum):
    """What to do with each run; a table whose dtypes differ is cast on the way by all three."""

    COPY = "copy"
    DIGEST = "digest"
    """Digest the source, as it would be installed, and write nothing."""
    COPY_DIGEST = "copy_digest"


class Control:
    """Progress and cancellation of one sweep; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nbytes = 0
        self._cancelled = threading.Event()

    @property
    def nbytes(self) -> int:
        """Wire bytes finished so far."""
        return self._nbytes

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    def add(self, nbytes: int) -> None:
        """Count bytes as finished."""
        with self._lock:
            self._nbytes += nbytes

    def cancel(self) -> None:
        """Ask the sweep to stop at the next slice."""
        self._cancelled.set()


class Sweep:
    """One table, cut once, to be run many times.

    Args:
        table: runs of at most some megabytes (`Table.split`) where threads should share the work evenly.
        groups: digest accumulators that the table's groups index.
        slice_bytes: wire bytes between two looks at the cancel flag.
    """

    def __init__(self, table: Table, groups: int = 0, slice_bytes: int = SLICE_BYTES) -> None:
        self.table = table
        self.groups = groups
        self._edges = table.slices(slice_bytes)
        ends = np.concatenate([[0], np.cumsum(table.nbytes())])
        self._sizes = np.diff(ends[self._edges])
        self._row_bytes = table.elems * table.itemsize.astype(np.int64)

    @property
    def nbytes(self) -> int:
        """Wire bytes of the whole table."""
        return int(self._sizes.sum())

    def run(self, op: Op, control: Control | None = None, threads: int = 1) -> NDArray[np.uint64] | None:
        """Run the table and return uint64[groups] digests (zeros for `Op.COPY`), or None if it was cancelled.

        When this returns no thread touches any address of the table any more. With one thread the caller's
        own thread does the work. An error in any thread stops the others and is raised here.
        """
        control = control or Control()
        todo = iter(range(len(self._sizes)))
        before = control.nbytes
        lock = threading.Lock()
        sums: list[NDArray[np.uint64]] = []
        errors: list[BaseException] = []

        def work() -> None:
            out = np.zeros(self.groups, np.uint64)
            try:
                while not control.cancelled and not errors:
                    with lock:
                        nth = next(todo, None)
                    if nth is None:
                        break
                    self._slice(op, out, int(self._edges[nth]), int(self._edges[nth + 1]))
                    control.add(int(self._sizes[nth]))
            except BaseException as error:
                errors.append(error)
            sums.append(out)

        helpers = [threading.Thread(target=work, name="syncline-copy") for _ in range(threads - 1)]
        for helper in helpers:
            helper.start()
        work()
        for helper in helpers:
            helper.join()
        if errors:
            raise errors[0]
        finished = control.nbytes - before == self.nbytes
        if not finished:
            return None
        total = np.zeros(self.groups, np.uint64)
        for part in sums:
            total += part
        return total

    def _slice(self, op: Op, out: NDArray[np.uint64], start: int, stop: int) -> None:
        t = self.table
        rows = (t.rows, t.elems)
        where = (t.pos, t.pos_stride)
        if t.casts:
            dst, dst_stride = (None, None) if op is Op.DIGEST else (t.dst, t.dst_stride)
            sides = (dst, t.src, *rows, dst_stride, t.src_stride)
            dtypes = (t.dst_dtype, t.src_dtype)
            if op is Op.COPY:
                host.cast_runs(t.dst, t.src, *rows, t.dst_stride, t.src_stride, *dtypes, start, stop)
            else:
                host.cast_digest_runs(*sides, *where, *dtypes, t.group, out, start, stop)
        elif op is Op.DIGEST:
            host.digest_runs(t.src, *rows, t.src_stride, *where, t.itemsize, t.group, out, start, stop)
        elif op is Op.COPY_DIGEST:
            sides = (t.dst, t.src, *rows, t.dst_stride, t.src_stride)
            host.copy_digest_runs(*sides, *where, t.itemsize, t.group, out, start, stop)
        else:
            host.copy_runs(t.dst, t.src, t.rows, self._row_bytes, t.dst_stride, t.src_stride, start, stop)
