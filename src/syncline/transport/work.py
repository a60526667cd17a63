"""Runs bound tables in slices, from one or several threads: copies, casts, digests."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from syncline.errors import TransportError
from syncline.kernels import host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from syncline.transport.running import Running
    from syncline.transport.tables import Table

    U64 = NDArray[np.uint64]

CALL_BYTES = 8 << 20
"""Wire bytes of one kernel call: long enough to hide its overhead, short enough to stop within it."""


class Part(NamedTuple):
    """Descriptors [start, stop) of a table: wire bytes moved by them, and hops that end in them."""

    table: Table
    start: int
    stop: int
    nbytes: int
    hops: int


def parts(tables: Sequence[Table], call_bytes: int = CALL_BYTES) -> list[Part]:
    """Cut tables into parts of about ``call_bytes`` wire bytes, at least one descriptor each."""
    found: list[Part] = []
    for table in tables:
        moved = np.cumsum(table.rows * table.nbytes)
        total = int(moved[-1])
        marks = np.arange(call_bytes, total, call_bytes)
        cuts = np.unique(np.concatenate([[0], np.searchsorted(moved, marks) + 1, [len(table)]]))
        ends = np.cumsum(np.append(table.hop[1:] != table.hop[:-1], [True]))
        before = np.concatenate([[0], moved])
        ended = np.concatenate([[0], ends])
        for start, stop in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            nbytes, hops = int(before[stop] - before[start]), int(ended[stop] - ended[start])
            found.append(Part(table, start, stop, nbytes, hops))
    return found


def move(part: Part, out: U64 | None) -> None:
    """Copy or cast a part; with ``out`` u64[H], add each hop's digest of the installed wire bits to it."""
    t, window = part.table, (part.start, part.stop)
    if t.casts:
        dtypes = t.wire_dtype, t.src_dtype
        if out is None:
            host.cast_runs(*t.as_elements[:6], *dtypes, *window)
        else:
            host.cast_digest_runs(*t.as_elements, *dtypes, t.hop, out, *window)
    elif out is None:
        host.copy_runs(*t.as_bytes, *window)
    else:
        host.copy_digest_runs(*t.as_elements, t.itemsize, t.hop, out, *window)


def digest_source(part: Part, out: U64 | None) -> None:
    """Add to ``out`` the digest of the wire bits that the part's source stands for, casts included."""
    if out is None:
        raise TransportError("a digest needs a place to go to")
    t, window = part.table, (part.start, part.stop)
    _, src, rows, elems, _, src_stride, position, position_stride = t.as_elements
    if not t.casts:
        table = (src, rows, elems, src_stride, position, position_stride)
        host.digest_runs(*table, t.itemsize, t.hop, out, *window)
    else:
        table = (src, rows, elems, None, src_stride, position, position_stride)
        host.cast_digest_runs(None, *table, t.wire_dtype, t.src_dtype, t.hop, out, *window)


def run(
    running: Running,
    work: Sequence[Part],
    step: Callable[[Part, U64 | None], None],
    out: U64 | None,
    *,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Do all parts, from ``running.limits.threads`` threads; return or raise when all of them have ended.

    Args:
        running: told of every part done, and asked before every part whether to go on.
        work: the parts, started in their order.
        step: what to do with one.
        out: u64[H] that the digests are added to.
        before: called before every part.
    """
    threads = max(1, min(running.limits.threads, len(work)))
    take = iter(work)
    mutex = threading.Lock()
    failed: list[BaseException] = []

    def loop() -> None:
        own = out if threads == 1 or out is None else np.zeros_like(out)
        try:
            while not failed:
                with mutex:
                    part = next(take, None)
                if part is None:
                    break
                running.check()
                before()
                step(part, own)
                running.add(part.nbytes, part.hops)
        except BaseException as error:
            failed.append(error)
        if own is not None and out is not None and own is not out:
            with mutex:
                np.add(out, own, out=out)

    helpers = [threading.Thread(target=loop, name="syncline copy", daemon=True) for _ in range(threads - 1)]
    started = []
    with contextlib.suppress(RuntimeError):  # no more threads to be had: those that started do the work
        for helper in helpers:
            helper.start()
            started.append(helper)
    loop()
    for helper in started:
        helper.join()
    if failed:
        raise failed[0]
