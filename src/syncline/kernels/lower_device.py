"""From runs to cells: what a device kernel needs to know of a run, as columns, once for all bindings.

A *cell* is what one lane moves: 16 bytes of a plain copy, or four elements of a cast; where addresses,
strides or lengths do not allow that, a unit of 4, 2 or 1 bytes, or one element. A run becomes rows of
cells; what hangs over a cell's border on both sides alike is cut off into runs of its own, so that one odd
byte does not slow down a gigabyte.

Addresses are (slot, byte offset) pairs, as everywhere: only the lowest bits of a slot's address matter here.
Pure numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from syncline.errors import TransportError
from syncline.layout.dtype import itemsize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    I64 = NDArray[np.int64]

CELL = 16
"""Bytes of a plain copy's widest cell, which is the widest access of a thread."""
LANES = 4
"""Elements of a cast's widest cell."""
MAX_EXTENT = 1 << 30
"""Cells a row, and rows a run, that the kernel's 32-bit indices can count."""
CASTS = frozenset(
    (src, dst)
    for src in ("float64", "float32", "bfloat16", "float16")
    for dst in ("float32", "bfloat16", "float16")
    if src != dst
)
"""(source, destination) dtypes that the device kernels cast."""


class Form(NamedTuple):
    """What one compiled kernel is made for.

    Attributes:
        src, dst: torch's dtype names for a cast; ``u32``, ``u16`` or ``u8`` on both sides for a copy.
        src_bytes, dst_bytes: bytes of a unit.
        lanes: units of a cell.
        aligned: whether every cell's canonical position is a multiple of its wire bytes.
    """

    src: str
    dst: str
    src_bytes: int
    dst_bytes: int
    lanes: int
    aligned: bool


@dataclass(frozen=True, eq=False)
class DeviceRuns:
    """R runs of one pair of dtypes (plain copies may mix dtypes), with relative addresses.

    Attributes:
        src_dtype, dst_dtype: torch's names; equal names mean a copy.
        rows, elems: int64[R]; elems are elements of a row.
        itemsize: int64[R], bytes of an element in the wire dtype, which is the destination's.
        src_slot, dst_slot: int64[R]; src, dst: int64[R], byte offsets from the slot's address.
        src_stride, dst_stride: int64[R], bytes from row to row.
        pos, pos_stride: int64[R], canonical flat position of the first element, and elements from row to row.
        group: int64[R], digest accumulator; negative: none.
        section: int64[R], ascending: which part of a run in sections (`DeviceSweep.section`) each belongs to;
            None: there is one.
    """

    src_dtype: str
    dst_dtype: str
    rows: I64
    elems: I64
    itemsize: I64
    src_slot: I64
    src: I64
    src_stride: I64
    dst_slot: I64
    dst: I64
    dst_stride: I64
    pos: I64
    pos_stride: I64
    group: I64
    section: I64 | None = None

    def __post_init__(self) -> None:
        columns = [f.name for f in fields(self) if not f.name.endswith("dtype") and f.name != "section"]
        lengths = {name: len(getattr(self, name)) for name in columns}
        if self.section is not None:
            lengths["section"] = len(self.section)
        if len(set(lengths.values())) != 1:
            raise TransportError("columns of one table differ in length", found=lengths)
        if self.casts and (self.src_dtype, self.dst_dtype) not in CASTS:
            raise TransportError(
                "no device kernel casts this pair of dtypes",
                expected=", ".join(f"{a} to {b}" for a, b in sorted(CASTS)),
                found=f"{self.src_dtype} to {self.dst_dtype}",
                hint="let the reader install the trainer's dtype, or use a host transport",
            )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def casts(self) -> bool:
        """Whether elements change their dtype."""
        return self.src_dtype != self.dst_dtype

    @property
    def nbytes(self) -> int:
        """Wire bytes."""
        return int((self.rows * self.elems * self.itemsize).sum())


@dataclass(frozen=True, eq=False)
class Cells:
    """R runs of cells of one form.

    Attributes:
        form: of every cell.
        rows, cols: int64[R]; cols are cells of a row.
        src_slot, src, src_stride, dst_slot, dst, dst_stride: as in `DeviceRuns`.
        pos, pos_stride: int64[R], canonical position in wire bytes.
        group, section: int64[R].
    """

    form: Form
    rows: I64
    cols: I64
    src_slot: I64
    src: I64
    src_stride: I64
    dst_slot: I64
    dst: I64
    dst_stride: I64
    pos: I64
    pos_stride: I64
    group: I64
    section: I64

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: NDArray[Any]) -> Self:
        """Return some runs, by index or mask."""
        columns = {name: getattr(self, name)[index] for name in COLUMNS}
        return replace(self, **columns)

    def tiles(self, width: int) -> I64:
        """Return int64[R]: tiles of at most ``width`` cells each run becomes: whole rows, or parts of one."""
        across = -(-self.cols // width)
        together = np.maximum(width // np.maximum(self.cols, 1), 1)
        return across * -(-self.rows // together)


COLUMNS = tuple(f.name for f in fields(Cells) if f.name != "form")


def signature(address: I64) -> bytes:
    """Return what of the slots' addresses the lowering depends on: it must be made anew if that changes."""
    return (address % CELL).astype(np.uint8).tobytes()


def lower_device(runs: DeviceRuns, src_address: I64, dst_address: I64) -> list[Cells]:
    """Compile runs to cells, a table for each form that occurs; runs without elements have none.

    Args:
        runs: of one pair of dtypes.
        src_address: int64[slots], of which the lowest bits count (`signature`).
        dst_address: likewise.

    Raises:
        TransportError: elements of a cast that are not aligned to their own size.
    """
    live = np.flatnonzero((runs.rows > 0) & (runs.elems > 0))
    units = _units(runs, live)
    src_bits = src_address[units.src_slot] % CELL + units.src
    dst_bits = dst_address[units.dst_slot] % CELL + units.dst
    if runs.casts:
        _check_elements(units, src_bits, dst_bits)
    parts = _peeled(units, src_bits, dst_bits)
    found: list[Cells] = []
    for part, src, dst in parts:
        found += _formed(part, src, dst, casts=runs.casts)
    return _joined(found)


def _units(runs: DeviceRuns, live: NDArray[np.intp]) -> Cells:
    """Return the runs with columns of single units: bytes of a copy, elements of a cast."""
    names = [f.name for f in fields(runs) if not f.name.endswith("dtype") and f.name != "section"]
    take = {name: getattr(runs, name)[live] for name in names}
    section = np.zeros(len(live), np.int64) if runs.section is None else runs.section[live]
    size = take["itemsize"]
    if runs.casts:
        form = Form(
            runs.src_dtype, runs.dst_dtype, itemsize(runs.src_dtype), itemsize(runs.dst_dtype), LANES, True
        )
        cols = take["elems"]
    else:
        form = Form("u8", "u8", 1, 1, CELL, True)
        cols = take["elems"] * size
    several = take["rows"] > 1
    return Cells(
        form,
        take["rows"],
        cols,
        take["src_slot"],
        take["src"],
        np.where(several, take["src_stride"], 0),
        take["dst_slot"],
        take["dst"],
        np.where(several, take["dst_stride"], 0),
        take["pos"] * size,
        np.where(several, take["pos_stride"] * size, 0),
        take["group"],
        section,
    )


def _check_elements(units: Cells, src_bits: I64, dst_bits: I64) -> None:
    f = units.form
    off = (src_bits | units.src_stride) % f.src_bytes + (dst_bits | units.dst_stride) % f.dst_bytes
    if off.any():
        raise TransportError(
            "elements of a cast are not aligned to their own size",
            expected=f"multiples of {f.src_bytes} and {f.dst_bytes} bytes",
            found=f"run {int(np.argmax(off > 0))}",
            hint="device kernels load whole elements",
        )


def _peeled(units: Cells, src_bits: I64, dst_bits: I64) -> list[tuple[Cells, I64, I64]]:
    """Cut head and tail off rows whose middle is made of whole, aligned cells.

    Both sides must reach a cell's border at the same unit, in every row.
    """
    f = units.form
    src_cell, dst_cell = _access(f.src_bytes * f.lanes), _access(f.dst_bytes * f.lanes)
    head = (-src_bits // f.src_bytes) % (src_cell // f.src_bytes)
    for _ in range(f.lanes):  # at most `lanes` heads are worth a look
        off = (dst_bits + head * f.dst_bytes) % dst_cell != 0
        head = np.where(off & (head < f.lanes), head + src_cell // f.src_bytes, head)
    level = (units.src_stride % src_cell == 0) & (units.dst_stride % dst_cell == 0)
    level &= ((src_bits + head * f.src_bytes) % src_cell == 0) & (
        (dst_bits + head * f.dst_bytes) % dst_cell == 0
    )
    body = np.where(level, (units.cols - head) // f.lanes * f.lanes, 0)
    whole = body > 0
    tail = np.where(whole, units.cols - head - body, 0)
    out = []
    for start, length, at in (
        (np.zeros_like(head), np.where(whole, head, units.cols), slice(None)),
        (head, body, whole),
        (head + body, tail, whole),
    ):
        keep = np.zeros(len(units), np.bool_)
        keep[at] = length[at] > 0
        part = _columns(units, start, length).take(keep)
        out.append((part, (src_bits + start * f.src_bytes)[keep], (dst_bits + start * f.dst_bytes)[keep]))
    return out


def _access(nbytes: int) -> int:
    return min(nbytes, CELL)


def _columns(units: Cells, start: I64, length: I64) -> Cells:
    f = units.form
    return replace(
        units,
        cols=length,
        src=units.src + start * f.src_bytes,
        dst=units.dst + start * f.dst_bytes,
        pos=units.pos + start * f.dst_bytes,
    )


def _formed(part: Cells, src_bits: I64, dst_bits: I64, *, casts: bool) -> list[Cells]:
    """Give every run the widest cell that its addresses, strides and length allow, and sort by form."""
    if not len(part):
        return []
    f = part.form
    if casts:
        src_cell, dst_cell = _access(f.src_bytes * LANES), _access(f.dst_bytes * LANES)
        wide = (src_bits | part.src_stride) % src_cell == 0
        wide &= ((dst_bits | part.dst_stride) % dst_cell == 0) & (part.cols % LANES == 0)
        lanes = np.where(wide, LANES, 1)
    else:
        low = src_bits | dst_bits | part.src_stride | part.dst_stride | part.cols | CELL
        lanes = low & -low
        lanes = np.where(lanes == CELL // 2, 4, lanes)  # eight bytes go as two words
    where = part.pos | part.pos_stride
    aligned = where % (lanes * f.dst_bytes) == 0
    found = []
    for key in np.unique(lanes * 2 + aligned):
        n, straight = int(key) // 2, bool(key % 2)
        at = (lanes == n) & (aligned == straight)
        found.append(_limited(_cells(part.take(at), n, aligned=straight, casts=casts)))
    return found


def _cells(part: Cells, lanes: int, *, aligned: bool, casts: bool) -> Cells:
    f = part.form
    if casts:
        form = f._replace(lanes=lanes, aligned=aligned)
    elif lanes == CELL:
        form = Form("u32", "u32", 4, 4, CELL // 4, aligned)
    else:
        form = Form(f"u{8 * lanes}", f"u{8 * lanes}", lanes, lanes, 1, aligned)
    return replace(part, form=form, cols=part.cols // lanes)


def _limited(cells: Cells) -> Cells:
    """Cut what the kernel's 32-bit indices could not count."""
    f = cells.form
    for name, steps in (
        ("cols", (f.src_bytes * f.lanes, f.dst_bytes * f.lanes, f.dst_bytes * f.lanes)),
        ("rows", None),
    ):
        total = getattr(cells, name)
        parts = -(-total // MAX_EXTENT)
        if not len(parts) or int(parts.max()) == 1:
            continue
        at = np.repeat(np.arange(len(cells)), parts)
        done = (np.arange(len(at)) - np.repeat(np.cumsum(parts) - parts, parts)) * MAX_EXTENT
        cells = cells.take(at)
        src, dst, pos = steps or (cells.src_stride, cells.dst_stride, cells.pos_stride)
        cells = replace(
            cells,
            src=cells.src + done * src,
            dst=cells.dst + done * dst,
            pos=cells.pos + done * pos,
            **{name: np.minimum(MAX_EXTENT, total[at] - done)},
        )
    return cells


def _joined(parts: Sequence[Cells]) -> list[Cells]:
    """Return one table a form, each in the order of the sections."""
    forms = sorted({p.form for p in parts}, reverse=True, key=lambda f: (f.lanes * f.dst_bytes, f.aligned))
    out = []
    for form in forms:
        same = [p for p in parts if p.form == form]
        joined = Cells(form, **{name: np.concatenate([getattr(p, name) for p in same]) for name in COLUMNS})
        in_order = bool((np.diff(joined.section) >= 0).all())
        out.append(joined if in_order else joined.take(np.argsort(joined.section, kind="stable")))
    return out
