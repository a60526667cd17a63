"""The writer's digests: of the pieces it holds, in the wire dtype, with nothing written anywhere."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from syncline.errors import TransportError
from syncline.faults import point
from syncline.kernels import host
from syncline.plan.lower import Stream
from syncline.transport import work
from syncline.transport.base import Limits
from syncline.transport.order import by_source
from syncline.transport.running import Running
from syncline.transport.tables import SLICE_BYTES, Boxes, Place, sliced, slots_of, tables

if TYPE_CHECKING:
    from syncline.memory.binding import Binding
    from syncline.plan import DigestRows, Plan

_SPAN = 1 << 20  # bytes of source that are read together, row by row: all columns of some rows


class SourceDigests:
    """Compiled once for the rows of one writer rank; rebound and run for every version.

    The digests of a run are uint64[R], one a row. Memory beyond them is bounded, whatever is cast.
    """

    def __init__(self, plan: Plan, rows: DigestRows) -> None:
        self.rows, self.nbytes = len(rows), int(rows.nbytes.sum())
        host.load()  # compiling kernels is no part of a transfer and its deadline
        stream = rows.source_stream()
        nobody = np.zeros(len(rows), np.int64)
        slot, self._slots = slots_of(nobody, rows.src_storage, rows.size, stream)
        position = Stream.of_positions(rows.offset, plan.global_shape[rows.tensor])
        number = np.arange(len(rows))
        boxes = Boxes(number, rows.size, position, stream, None, rows.src_dtype, rows.dtype, slot, nobody)
        made = tables(sliced(boxes, SLICE_BYTES), positions=True)
        self._tables = [by_source(table, _SPAN) for table in made]
        # in this order the plan's rows end all over the place: they are counted when all is done
        self._parts = [part._replace(hops=0) for part in work.parts(self._tables)]
        self._mutex = threading.Lock()
        self._bound = self._busy = False

    def rebind(self, local: Binding) -> None:
        """Point the program at where this process's storages lie now.

        Raises:
            TransportError: it is running, or a range falls outside its region.
        """
        with self._mutex:
            self._rest()
            address = self._slots.resolve(dict.fromkeys(self._slots.ranks, Place.local(local)), "local rank")
            for table in self._tables:
                table.bind_src(address)
            self._bound = True

    def start(self, limits: Limits | None = None) -> Running:
        """Digest everything in a thread of its own; `Running.digests` has the result."""
        with self._mutex:
            self._rest()
            if not self._bound:
                raise TransportError("the program is not bound to any addresses", hint="call rebind first")
            self._busy = True

        def body(running: Running) -> None:
            point("digest.before_source")
            out = np.zeros(self.rows, np.uint64)
            try:
                work.run(running, self._parts, work.digest_source, out)
            finally:
                with self._mutex:
                    self._busy = False
            running.add(0, self.rows)
            running.digests = out

        return Running("digest of the source", body, self.nbytes, self.rows, limits or Limits())

    def _rest(self) -> None:
        if self._busy:
            raise TransportError("the program is running", hint="wait for its transfer, or cancel it")


def source_digests(plan: Plan, rows: DigestRows, binding: Binding) -> SourceDigests:
    """Return a bound program that digests ``rows``: what `Plan.digest_rows` says a rank holds."""
    program = SourceDigests(plan, rows)
    program.rebind(binding)
    return program
