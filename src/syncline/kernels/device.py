"""Runs tables of runs on a device: lowered once, bound as often as addresses change, one launch a form.

Triton is imported when the first table is made. With ``TRITON_INTERPRET=1`` in the environment, set before
that, tables of the ``cpu`` device run in Triton's interpreter: so the tests compare the kernels with
`kernels.reference` on a machine without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from syncline.errors import TransportError
from syncline.kernels.constants import BLOCK_KEYS, BLOCK_WORDS, mix
from syncline.kernels.engine import Op
from syncline.kernels.lower_device import Cells, DeviceRuns, lower_device, signature

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    I64 = NDArray[np.int64]

RUN = ("src", "src_stride", "dst", "dst_stride", "rows", "cols", "pos", "pos_stride")
"""Columns of a run on the device, int64 each, 64 bytes in all. ``rows`` also holds the rows of
a tile, and ``cols`` the group, in their upper halves."""
TILE_CELLS = 256
"""Cells of a tile: 4 KiB of a plain copy."""
_BLOCK_BYTES = 4 * BLOCK_WORDS


@dataclass(frozen=True, slots=True)
class Launch:
    """The shape of one launch.

    Attributes:
        tiles: tiles that a program takes at a time.
        warps: of a program.
        per_sm: programs for each multiprocessor that may be used.
        ahead: whether a program fetches its next tiles before it has finished the last.
    """

    tiles: int
    warps: int
    per_sm: int
    ahead: bool = False


ALL_SMS = Launch(tiles=8, warps=8, per_sm=4, ahead=True)
FEW_COPY = Launch(tiles=32, warps=32, per_sm=1)
FEW_DIGEST = Launch(tiles=16, warps=16, per_sm=1)
"""Where only some multiprocessors may be used, one program on each has as many bytes in flight as fit."""


def _kernel() -> Any:
    try:
        from syncline.kernels import triton_move  # noqa: PLC0415 - Triton is optional and heavy
    except ImportError as error:
        raise TransportError(
            "device kernels need Triton", expected="an importable triton", found=error
        ) from error
    return triton_move.move


class _Table:
    """The device's copy of one `Cells` table."""

    def __init__(self, cells: Cells, device: torch.device) -> None:
        self.form = cells.form
        counts = cells.tiles(TILE_CELLS)
        self.tiles = int(counts.sum())
        together = np.maximum(TILE_CELLS // cells.cols, 1)
        group = np.maximum(cells.group, -1)
        packed = {"rows": cells.rows | together << 32, "cols": cells.cols | group << 32}
        columns = [packed[name] if name in packed else getattr(cells, name) for name in RUN]
        self.runs = _on(np.stack(columns, axis=1), device)
        self.src, self.dst = (_on(np.stack(c, axis=1), device) for c in _relative(cells))
        self.tile = _tiles(cells, counts, together, device)
        # int64[sections + 1]: tiles of section n are edges[n] to edges[n + 1]
        numbers = np.arange(int(cells.section[-1]) + 2) if len(cells) else np.zeros(1, np.int64)
        ends = np.concatenate([[0], np.cumsum(counts)])
        self._edges = ends[np.searchsorted(cells.section, numbers)].tolist()
        self._parts: dict[int, torch.Tensor] = {}

    def bind(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        for side, address, column in ((self.src, src, 0), (self.dst, dst, 2)):
            torch.add(address[side[:, 0]], side[:, 1], out=self.runs[:, column])

    def part(self, section: int) -> torch.Tensor:
        """Return the tiles of a section, in memory of their own: kernels are compiled for aligned tables."""
        if section not in self._parts:
            low, high = (self._edges[min(n, len(self._edges) - 1)] for n in (section, section + 1))
            self._parts[section] = self.tile[low:high].clone()
        return self._parts[section]

    @property
    def nbytes(self) -> int:
        """Device memory in bytes."""
        return self.runs.nbytes + self.src.nbytes + self.dst.nbytes + self.tile.nbytes


def _relative(cells: Cells) -> tuple[tuple[I64, I64], tuple[I64, I64]]:
    return (cells.src_slot, cells.src), (cells.dst_slot, cells.dst)


def _tiles(cells: Cells, counts: I64, together: I64, device: torch.device) -> torch.Tensor:
    """Return int32[tiles, 3]: run, first row and first cell of each tile; expanded on the device."""
    run = torch.repeat_interleave(torch.arange(len(cells), device=device), _on(counts, device))
    nth = torch.arange(len(run), device=device) - _on(np.cumsum(counts) - counts, device)[run]
    across = _on(-(-cells.cols // TILE_CELLS), device)[run]
    row = nth // across * _on(together, device)[run]
    return torch.stack([run, row, nth % across * TILE_CELLS], dim=1).to(torch.int32)


def _on(column: I64, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.array(column, np.int64)).to(device)


class DeviceSweep:
    """Tables of runs for one device, made once and run any number of times.

    Args:
        runs: any number of tables; their slots number the addresses that `bind` is given.
        groups: digest accumulators that the runs' groups index.
        device: where the kernel runs: the reader's GPU (peers' memory is read by its own loads).
    """

    def __init__(self, runs: Sequence[DeviceRuns], groups: int, device: torch.device) -> None:
        self.runs, self.groups, self.device = [r for r in runs if len(r)], groups, device
        self.nbytes = sum(r.nbytes for r in self.runs)
        self._move = _kernel()
        self._keys = torch.from_numpy(BLOCK_KEYS.copy()).to(device)
        last = max((_last_byte(r) for r in self.runs), default=0)
        weights = mix(np.arange(last // _BLOCK_BYTES + 2, dtype=np.uint64)) | np.uint64(1)
        self._blocks = torch.from_numpy(weights.view(np.int64)).to(device)
        self._digests = torch.zeros(max(groups, 1), dtype=torch.int64, device=device)
        self._signature = b""
        self._tables: list[_Table] = []
        self._sms = multiprocessors(device)

    @property
    def launches(self) -> int:
        """Kernels that one run launches."""
        return len(self._tables)

    @property
    def table_bytes(self) -> int:
        """Device memory that the tables take, in bytes."""
        own = (self._keys, self._blocks, self._digests)
        return sum(t.nbytes for t in (*self._tables, *own))

    def bind(self, src: I64, dst: I64) -> None:
        """Point the tables at slots ``src`` and ``dst``, int64 addresses; on the current stream.

        Nothing is planned or compiled again, unless addresses come to be aligned otherwise.
        """
        aligned = signature(src) + b"|" + signature(dst)
        if aligned != self._signature:
            lowered = [cells for one in self.runs for cells in lower_device(one, src, dst)]
            self._tables = [_Table(cells, self.device) for cells in lowered]
            self._signature = aligned
        source, target = _on(src, self.device), _on(dst, self.device)
        for table in self._tables:
            table.bind(source, target)

    def run(self, op: Op, sms: int | None = None, *, again: bool = False) -> torch.Tensor | None:
        """Launch everything on the current stream of the device.

        Args:
            op: what to do; `Op.DIGEST` writes nothing.
            sms: multiprocessors to use at most; None: all.
            again: whether `Op.COPY_DIGEST` digests what it reads back from the destination.

        Returns:
            int64[groups] on the device, the bits of the digests, ready when the stream has come so far and
            until the next run; None for `Op.COPY`.
        """
        if self.runs and not self._signature:
            raise TransportError("the tables are not bound to any addresses", hint="call bind first")
        if op is not Op.COPY:
            self._digests.zero_()
        few = sms is not None and sms < self._sms
        shape = ALL_SMS if not few else FEW_COPY if op is Op.COPY else FEW_DIGEST
        programs = (sms if few and sms is not None else self._sms) * shape.per_sm
        for table in self._tables:
            self._launch(table, op, shape, programs, again=again)
        return None if op is Op.COPY else self._digests[: self.groups]

    def begin(self, op: Op) -> None:
        """Start a run in sections: clear the digests, on the current stream."""
        if self.runs and not self._signature:
            raise TransportError("the tables are not bound to any addresses", hint="call bind first")
        if op is not Op.COPY:
            self._digests.zero_()

    def section(self, number: int, op: Op, sms: int | None = None) -> None:
        """Launch what one section of `DeviceRuns` does, on the current stream."""
        few = sms is not None and sms < self._sms
        shape = ALL_SMS if not few else FEW_COPY if op is Op.COPY else FEW_DIGEST
        programs = (sms if few and sms is not None else self._sms) * shape.per_sm
        for table in self._tables:
            tile = table.part(number)
            if len(tile):
                self._launch(table, op, shape, programs, again=False, tile=tile)

    def digests(self) -> NDArray[np.uint64]:
        """Return uint64[groups], what the sections since `begin` added up to; wait for the current stream."""
        return self._digests[: self.groups].cpu().numpy().view(np.uint64).copy()

    def _launch(
        self,
        t: _Table,
        op: Op,
        shape: Launch,
        programs: int,
        *,
        again: bool,
        tile: torch.Tensor | None = None,
    ) -> None:
        tile = t.tile if tile is None else tile
        grid = min(programs, -(-len(tile) // shape.tiles))
        self._move[(grid,)](
            tile,
            t.runs,
            self._digests,
            self._keys,
            self._blocks,
            len(tile),
            SRC=t.form.src,
            DST=t.form.dst,
            SRC_BYTES=t.form.src_bytes,
            DST_BYTES=t.form.dst_bytes,
            LANES=t.form.lanes,
            ALIGNED=t.form.aligned,
            TILES=shape.tiles,
            WRITE=op is not Op.DIGEST,
            DIGEST=op is not Op.COPY,
            AGAIN=again and op is Op.COPY_DIGEST,
            AHEAD=shape.ahead,
            num_warps=shape.warps,
        )


_LOADED: set[tuple[int, Op]] = set()
_SAMPLE = 1 << 16


def load(device: int, ops: Collection[Op]) -> None:
    """Compile what nearly every transfer launches; each kernel takes about a second, once.

    Others (odd alignments, casts) are compiled when a program first needs them.
    """
    where = torch.device("cuda", device)
    for op in ops:
        if (device, op) in _LOADED:
            continue
        with torch.cuda.device(where):
            bytes_of = torch.zeros(2 * _SAMPLE, dtype=torch.uint8, device=where)
            sweep = DeviceSweep([_sample()], 1, where)
            sweep.bind(*(np.array([bytes_of.data_ptr() + n], np.int64) for n in (0, _SAMPLE)))
            sweep.run(op)
            torch.cuda.current_stream(where).synchronize()
        _LOADED.add((device, op))


def _sample() -> DeviceRuns:
    """Return two plain copies: one whose cells lie at whole words of the digest, one whose do not."""
    zero, half = np.zeros(2, np.int64), np.array([0, _SAMPLE // 2], np.int64)
    elems, size = zero + _SAMPLE // 4, zero + 2
    pos = np.array([0, 3], np.int64)
    return DeviceRuns("", "", zero + 1, elems, size, zero, half, zero, zero, half, zero, pos, zero, zero)


def _last_byte(runs: DeviceRuns) -> int:
    """Return the last canonical byte position of a table, at least."""
    reach = np.maximum(runs.rows - 1, 0) * np.maximum(runs.pos_stride, 0)
    return int(((runs.pos + reach + runs.elems) * runs.itemsize).max())


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; 1 for the interpreter's."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
