"""Copies, digests and casts of strided runs between raw addresses of this process.

A table is a set of equal-length columns, one entry a *run*. Run ``i`` has ``rows[i]`` rows; a row is a
contiguous range of elements (or bytes) and the next row lies ``stride`` bytes on. Columns may be int64 or
uint64 (addresses, counts, strides in bytes, canonical positions and their strides in elements); strides may
be negative. Every function works on the runs ``[start, stop)``, so that a caller can run a table in slices,
releases the GIL, and has finished all of its stores, streaming ones included, when it returns.

Nothing here checks addresses: a wrong one is a crash. Callers check descriptors against registered regions
first. Ranges written must not overlap ranges read. numba is imported, and its cache loaded, on the first
call.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from syncline.errors import TransportError
from syncline.kernels.constants import BLOCK_KEYS

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray

    Column = NDArray[np.int64] | NDArray[np.uint64]

CASTS: dict[tuple[str, str], int] = {
    ("float32", "bfloat16"): 1,
    ("bfloat16", "float32"): 2,
    ("float32", "float16"): 3,
    ("float16", "float32"): 4,
}
"""(source dtype, destination dtype) of the casts that have a kernel; the values are the kernel's codes."""

_KEYS = BLOCK_KEYS.ctypes.data
_CHUNK = 4096  # bytes; the kernel's COPY_CHUNK, which a digest through a cast needs as a buffer


@cache
def _kernels() -> ModuleType:
    from syncline.kernels import native  # noqa: PLC0415 -- loads numba

    return native


def load() -> None:
    """Import numba and the compiled kernels now instead of at first use: under a second from its cache."""
    _kernels()


def copy_runs(
    dst: Column,
    src: Column,
    rows: Column,
    nbytes: Column,
    dst_stride: Column,
    src_stride: Column,
    start: int = 0,
    stop: int | None = None,
) -> None:
    """Copy rows of ``nbytes`` bytes; long ones by streaming stores, past the caches."""
    columns, first, last = _prepare((dst, src, rows, nbytes, dst_stride, src_stride), start, stop)
    _kernels().copy_runs(*columns, first, last)


def digest_runs(
    addr: Column,
    rows: Column,
    elems: Column,
    stride: Column,
    pos: Column,
    pos_stride: Column,
    itemsize: int | NDArray[np.uint8],
    group: NDArray[np.int32],
    out: NDArray[np.uint64],
    start: int = 0,
    stop: int | None = None,
) -> NDArray[np.uint64]:
    """Add each run's digest (see `syncline.kernels.reference`) to ``out[group]`` and return ``out``.

    Args:
        addr: addresses of the first rows.
        rows: rows a run.
        elems: elements a row.
        stride: bytes from row to row.
        pos: canonical flat position of the first element in the checkpoint tensor.
        pos_stride: elements from row to row.
        itemsize: bytes an element in the wire dtype, one for all or uint8[R].
        group: int32[R], accumulator of each run; negative: the run is skipped.
        out: uint64[G], accumulated modulo 2**64.
        start: first run.
        stop: one past the last run; None: all.
    """
    columns, first, last = _prepare((addr, rows, elems, stride, pos, pos_stride), start, stop)
    sizes = _sizes(itemsize, len(addr))
    _check_groups(group, out, len(addr), first, last)
    _kernels().digest_runs(*columns, sizes, group, out, _KEYS, first, last)
    return out


def copy_digest_runs(  # noqa: PLR0917 -- a table's columns
    dst: Column,
    src: Column,
    rows: Column,
    elems: Column,
    dst_stride: Column,
    src_stride: Column,
    pos: Column,
    pos_stride: Column,
    itemsize: int | NDArray[np.uint8],
    group: NDArray[np.int32],
    out: NDArray[np.uint64],
    start: int = 0,
    stop: int | None = None,
) -> NDArray[np.uint64]:
    """Copy, and add to ``out[group]`` the digest of the bytes, read again while the nearest cache holds them.

    They are the source's: what is streamed past the caches would have to come back from memory. Level
    ``installed`` does that, as a pass of its own.

    Arguments as in `copy_runs` and `digest_runs`; a negative group copies without digest.
    """
    table = (dst, src, rows, elems, dst_stride, src_stride, pos, pos_stride)
    columns, first, last = _prepare(table, start, stop)
    sizes = _sizes(itemsize, len(dst))
    _check_groups(group, out, len(dst), first, last)
    _kernels().copy_digest_runs(*columns, sizes, group, out, _KEYS, first, last)
    return out


def cast_runs(
    dst: Column,
    src: Column,
    rows: Column,
    elems: Column,
    dst_stride: Column,
    src_stride: Column,
    dst_dtype: str,
    src_dtype: str,
    start: int = 0,
    stop: int | None = None,
) -> None:
    """Cast ``src_dtype`` into ``dst_dtype`` (torch's names), bit-equal to ``.to`` of contiguous tensors.

    float32 to and from bfloat16 and float16 have kernels; every other pair goes through torch, run by run.
    """
    nothing = np.zeros(len(src), np.int64)
    ungrouped = np.full(len(src), -1, np.int32)
    table = (dst, src, rows, elems, dst_stride, src_stride, nothing, nothing)
    cast_digest_runs(*table, dst_dtype, src_dtype, ungrouped, np.zeros(1, np.uint64), start, stop)


def cast_digest_runs(  # noqa: PLR0917 -- a table's columns
    dst: Column | None,
    src: Column,
    rows: Column,
    elems: Column,
    dst_stride: Column | None,
    src_stride: Column,
    pos: Column,
    pos_stride: Column,
    dst_dtype: str,
    src_dtype: str,
    group: NDArray[np.int32],
    out: NDArray[np.uint64],
    start: int = 0,
    stop: int | None = None,
) -> NDArray[np.uint64]:
    """Cast, and add to ``out[group]`` the digest of the cast bytes, read back from the destination.

    With ``dst=None`` nothing is written: the digest is that of what a reader of ``dst_dtype`` would
    install, which is how a sender digests a tensor that is cast on its way. Other arguments as in
    `copy_digest_runs`.
    """
    target = src if dst is None else dst
    target_stride = src_stride if dst_stride is None else dst_stride
    table = (target, src, rows, elems, target_stride, src_stride, pos, pos_stride)
    columns, first, last = _prepare(table, start, stop)
    _check_groups(group, out, len(src), first, last)
    code = CASTS.get((src_dtype, dst_dtype))
    if code is None:
        from syncline.kernels import generic  # noqa: PLC0415 -- loads torch

        generic.cast_digest_runs(columns, dst is not None, dst_dtype, src_dtype, group, out, first, last)
        return out
    buffer = np.empty(_CHUNK if dst is None else 0, np.uint8)
    address = buffer.ctypes.data if dst is None else 0
    _kernels().cast_digest_runs(code, *columns, group, out, _KEYS, address, first, last)
    return out


def first_difference(
    dst: Column,
    src: Column,
    rows: Column,
    nbytes: Column,
    dst_stride: Column,
    src_stride: Column,
    start: int = 0,
    stop: int | None = None,
) -> tuple[int, int, int] | None:
    """Return (run, row, byte within the row) of the first byte that differs, None if all are equal."""
    columns, first, last = _prepare((dst, src, rows, nbytes, dst_stride, src_stride), start, stop)
    run, row, byte = _kernels().first_difference(*columns, first, last)
    return None if run < 0 else (run, row, byte)


def _prepare(
    columns: tuple[Column, ...], start: int, stop: int | None
) -> tuple[list[NDArray[np.uint64]], int, int]:
    count = len(columns[0])
    last = count if stop is None else stop
    if not 0 <= start <= last <= count:
        raise TransportError(
            "a slice outside its table", expected=f"within [0, {count}]", found=(start, last)
        )
    return [_column(c, count) for c in columns], start, last


def _column(column: Any, count: int) -> NDArray[np.uint64]:
    ok = isinstance(column, np.ndarray) and column.shape == (count,) and column.dtype.kind in "iu"
    if not ok or column.dtype.itemsize != 8:
        raise TransportError(
            "a table's columns are int64 or uint64 and of one length",
            expected=f"[{count}]",
            found=f"{getattr(column, 'dtype', type(column))} {getattr(column, 'shape', '')}",
        )
    if column.dtype == np.uint64 and column.flags.c_contiguous:
        return column  # as it is: new arrays for every slice of a table cost more than small slices do
    return np.ascontiguousarray(column).view(np.uint64)


def _sizes(itemsize: int | NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    if isinstance(itemsize, int):
        return np.full(count, itemsize, np.uint8)
    if itemsize.dtype != np.uint8 or itemsize.shape != (count,):
        raise TransportError("itemsize is one integer or uint8[R]", expected=count, found=itemsize.shape)
    return np.ascontiguousarray(itemsize)


def _check_groups(
    group: NDArray[np.int32], out: NDArray[np.uint64], count: int, first: int, last: int
) -> None:
    if group.dtype != np.int32 or group.shape != (count,) or out.dtype != np.uint64 or out.ndim != 1:
        raise TransportError(
            "digests need a group a run and one accumulator a group",
            expected=f"int32[{count}] and uint64[G]",
            found=f"{group.dtype}{group.shape} and {out.dtype}{out.shape}",
        )
    highest = int(group[first:last].max(initial=-1))
    if highest >= len(out):
        raise TransportError("a group without an accumulator", expected=f"below {len(out)}", found=highest)
