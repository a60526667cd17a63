"""Casts of any pair of torch dtypes, run by run through torch views: for the pairs that have no kernel."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from syncline.errors import TransportError
from syncline.kernels import host

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK = 1 << 20  # bytes of wire elements cast at a time


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of this name.

    Raises:
        TransportError: there is none in this torch.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TransportError(
            "a dtype that this torch does not have", expected="a torch dtype's name", found=name
        )
    return dtype


def tensor_at(address: int, elems: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor over memory of this process; nothing keeps that memory alive."""
    raw = (ctypes.c_uint8 * (elems * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype)


def cast_digest_runs(
    columns: list[NDArray[np.uint64]],
    write: bool,
    dst_dtype: str,
    src_dtype: str,
    group: NDArray[np.int32],
    out: NDArray[np.uint64],
    start: int,
    stop: int,
) -> None:
    """Do as `syncline.kernels.host.cast_digest_runs`; ``columns`` are its eight, uint64."""
    src_type, dst_type = torch_dtype(src_dtype), torch_dtype(dst_dtype)
    signed = [c.view(np.int64) for c in columns]
    for run in range(start, stop):
        dst, src, rows, elems, dst_stride, src_stride, pos, pos_stride = (int(c[run]) for c in signed)
        for row in range(rows if elems else 0):
            target = dst + row * dst_stride if write else None
            place = (target, src + row * src_stride, pos + row * pos_stride)
            _cast_row(*place, elems, src_type, dst_type, int(group[run]), out)


def _cast_row(
    dst: int | None,
    src: int,
    pos: int,
    elems: int,
    src_type: torch.dtype,
    dst_type: torch.dtype,
    group: int,
    out: NDArray[np.uint64],
) -> None:
    step = max(1, _BLOCK // dst_type.itemsize)
    for first in range(0, elems, step):
        count = min(step, elems - first)
        cast = tensor_at(src + first * src_type.itemsize, count, src_type).to(dst_type)
        installed = cast
        if dst is not None:
            installed = tensor_at(dst + first * dst_type.itemsize, count, dst_type)
            installed.copy_(cast)
        if group >= 0:
            values = (installed.data_ptr(), 1, count, 0, pos + first, 0)
            addr, rows, width, zero, where, step_on = (np.array([value], np.int64) for value in values)
            which = np.array([group], np.int32)
            host.digest_runs(addr, rows, width, zero, where, step_on, dst_type.itemsize, which, out)
