"""Which segments of a manifest may share bytes: a sort of their byte ranges clears nearly all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from syncline.layout.dtype import ITEMSIZE
from syncline.layout.segments import strides

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncline.layout.columns import I64
    from syncline.layout.manifest import Manifest


def tangled(manifest: Manifest) -> I64:
    """Return i64: the segments whose byte range meets another one's, or that may meet themselves."""
    if manifest.plain:
        size, storage, base = manifest.box_size, manifest.storage, manifest.view_offset
        stride = strides(manifest)
        item = ITEMSIZE[manifest.dtype]
    else:
        s = manifest.segments()
        size, storage, base, stride, item = s.size, s.storage, s.base, s.stride, ITEMSIZE[s.dtype]
    if not len(size):
        return np.zeros(0, np.int64)
    low, high = spans(size, base, stride, item)
    alone = nested(size, np.abs(stride) * item[:, None], item)
    return np.nonzero(~alone | _meets(storage, low, high))[0]


def spans(size: I64, base: I64, stride: I64, item: I64) -> tuple[I64, I64]:
    """Return (low, high) i64[N]: the byte range that each view lies in."""
    reach = (size - 1) * stride
    if reach.min(initial=0) >= 0:
        low = base * item
        return low, low + (reach.sum(axis=1) + 1) * item
    low = (base + np.minimum(reach, 0).sum(axis=1)) * item
    return low, low + (np.abs(reach).sum(axis=1) + 1) * item


def nested(size: I64, step: I64, item: I64) -> NDArray[np.bool_]:
    """Return bool[N]: whether each stride steps over all that lies inside it, so no two elements meet.

    Args:
        size: i64[N, D].
        step: i64[N, D], bytes from one index to the next, not negative.
        item: i64[N], bytes of an element.
    """
    step = np.where(size > 1, step, 0)
    if (step[:, 1:] > step[:, :-1]).any():
        order = np.argsort(step, axis=1, kind="stable")[:, ::-1]
        size, step = np.take_along_axis(size, order, axis=1), np.take_along_axis(step, order, axis=1)
    inner = item.copy()
    apart = np.ones(len(size), np.bool_)
    for d in range(size.shape[1] - 1, -1, -1):
        apart &= (size[:, d] == 1) | (step[:, d] >= inner)
        inner += (size[:, d] - 1) * step[:, d]
    return apart


def _meets(storage: NDArray[np.int32], low: I64, high: I64) -> NDArray[np.bool_]:
    """Return bool[N]: whether the byte range of a row meets that of another one in its storage."""
    order = np.lexsort((low, storage))
    storage, low, high = storage[order], low[order], high[order]
    # the farthest end so far within a storage: storages are kept apart by adding more than any end
    first = np.append(True, storage[1:] != storage[:-1])
    ends = np.maximum.reduceat(high, np.nonzero(first)[0])
    shift = np.append(0, np.cumsum(ends.astype(np.float64) + 1))[:-1]
    if float(shift[-1]) + float(ends[-1]) >= 2.0**62:
        return np.ones(len(order), np.bool_)
    lift = np.append(0, np.cumsum(ends + 1))[:-1][np.cumsum(first) - 1]
    start, stop = low + lift, high + lift
    reach = np.maximum.accumulate(stop)
    apart = np.append(True, start[1:] >= reach[:-1])
    group = np.cumsum(apart) - 1
    meets = np.empty(len(order), np.bool_)
    meets[order] = np.bincount(group)[group] > 1
    return meets
