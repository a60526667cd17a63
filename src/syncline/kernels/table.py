"""A table of runs with all of its columns, and how it is cut into slices of similar size."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from syncline.errors import TransportError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Table:
    """R runs, all of one pair of dtypes, or of several as long as nothing is cast.

    Attributes:
        dst: int64[R], addresses of the first destination rows; of no meaning where a table is only digested.
        src: int64[R], addresses of the first source rows.
        rows: int64[R].
        elems: int64[R], elements a row.
        dst_stride: int64[R], bytes from row to row.
        src_stride: int64[R], bytes from row to row.
        pos: int64[R], canonical flat position of the first element.
        pos_stride: int64[R], elements from row to row.
        itemsize: uint8[R], bytes an element in the wire dtype, which is the destination's.
        group: int32[R], digest accumulator; negative: none.
        dst_dtype: torch's name; needed only for a cast.
        src_dtype: torch's name; a table is cast when it differs from ``dst_dtype``.
        src_itemsize: bytes an element of the source; needed only for a cast.
    """

    dst: NDArray[np.int64]
    src: NDArray[np.int64]
    rows: NDArray[np.int64]
    elems: NDArray[np.int64]
    dst_stride: NDArray[np.int64]
    src_stride: NDArray[np.int64]
    pos: NDArray[np.int64]
    pos_stride: NDArray[np.int64]
    itemsize: NDArray[np.uint8]
    group: NDArray[np.int32]
    dst_dtype: str = ""
    src_dtype: str = ""
    src_itemsize: int = 0

    def __post_init__(self) -> None:
        lengths = {f.name: len(getattr(self, f.name)) for f in fields(self) if f.type.startswith("NDArray")}
        if len(set(lengths.values())) != 1:
            raise TransportError("columns of one table differ in length", found=lengths)
        if self.casts and self.src_itemsize <= 0:
            raise TransportError(
                "a table that casts needs the size of its source's elements", found=self.src_dtype
            )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def casts(self) -> bool:
        """Whether elements change their dtype on the way."""
        return self.src_dtype != self.dst_dtype

    def nbytes(self) -> NDArray[np.int64]:
        """Return int64[R]: wire bytes of each run."""
        return self.rows * self.elems * self.itemsize.astype(np.int64)

    def take(self, index: NDArray[np.intp]) -> Self:
        """Return the runs at ``index``, in its order."""
        return replace(self, **{name: getattr(self, name)[index] for name in _COLUMNS})

    def shifted(self, dst: NDArray[np.int64] | int = 0, src: NDArray[np.int64] | int = 0) -> Self:
        """Return the table with ``dst`` and ``src`` bytes added to its addresses (one number or int64[R])."""
        return replace(self, dst=self.dst + dst, src=self.src + src)

    def split(self, max_bytes: int) -> Self:
        """Cut runs of more than ``max_bytes`` wire bytes into runs of at most that.

        Rows are kept whole where they fit; a longer row becomes runs of one row; an element is never cut.
        """
        per_row = np.maximum(self.elems * self.itemsize.astype(np.int64), 1)
        by_rows = self._cut(np.maximum(max_bytes // per_row, 1), self.rows, along_rows=True)
        in_row = np.maximum(max_bytes // by_rows.itemsize.astype(np.int64), 1)
        step = np.where(by_rows.rows == 1, in_row, np.maximum(by_rows.elems, 1))
        return by_rows._cut(step, by_rows.elems, along_rows=False)  # noqa: SLF001 -- another table of this class

    def _cut(self, step: NDArray[np.int64], total: NDArray[np.int64], *, along_rows: bool) -> Self:
        parts = np.maximum(-(-total // step), 1)
        if len(parts) == 0 or int(parts.max()) == 1:
            return self
        index = np.repeat(np.arange(len(self)), parts)
        nth = np.arange(len(index)) - np.repeat(np.cumsum(parts) - parts, parts)
        done = nth * step[index]
        out = self.take(index)
        count = np.minimum(step[index], total[index] - done)
        if along_rows:
            steps = (out.dst_stride, out.src_stride, out.pos_stride)
            changed = {"rows": count}
        else:
            size = out.itemsize.astype(np.int64)
            steps = (size, self.src_itemsize if self.casts else size, 1)
            changed = {"elems": count}
        dst, src, pos = (
            base + done * step for base, step in zip((out.dst, out.src, out.pos), steps, strict=True)
        )
        return replace(out, dst=dst, src=src, pos=pos, **changed)

    def by_source(self, block_bytes: int = 128 << 10) -> Self:
        """Return the table cut into blocks of at most ``block_bytes``, ordered by source address.

        For a pass that digests several column ranges of one matrix: the processor fetches on past the end of
        a row, into the next range, and finds that still in its cache if the range comes soon.
        """
        blocks = self.split(block_bytes)
        return blocks.take(np.argsort(blocks.src, kind="stable"))

    def slices(self, target_bytes: int) -> NDArray[np.int64]:
        """Return int64[K + 1], boundaries of K ranges of runs of about ``target_bytes`` each, none empty."""
        ends = np.cumsum(self.nbytes())
        if not len(ends):
            return np.zeros(1, np.int64)
        marks = np.arange(target_bytes, int(ends[-1]), target_bytes)
        inner = np.searchsorted(ends, marks, side="left") + 1
        return np.unique(np.concatenate([[0], inner, [len(self)]])).astype(np.int64)


_COLUMNS = tuple(f.name for f in fields(Table) if f.type.startswith("NDArray"))
