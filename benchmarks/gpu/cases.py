"""Random cases for the device kernels, and what the CPU reference makes of them: used by tests and `run`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from syncline.kernels import fp8, reference
from syncline.kernels.device import DeviceSweep
from syncline.kernels.device_fp8 import DeviceQuantiser
from syncline.kernels.engine import Op
from syncline.kernels.lower_device import CASTS, DeviceRuns
from syncline.layout.dtype import itemsize

if TYPE_CHECKING:
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]

COPY = ("", "")
FORMS = (COPY, COPY, COPY, *sorted(CASTS))
_GUARD = 0xA5
_GROUPS = 3
_BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class MoveCase:
    """Random runs between two byte buffers; no two of them write the same byte."""

    runs: DeviceRuns
    src: NDArray[np.uint8]
    dst: NDArray[np.uint8]

    @classmethod
    def random(cls, rng: np.random.Generator, form: tuple[str, str], most: int = 6000) -> MoveCase:
        """Draw up to five runs of a copy (``COPY``) of mixed dtypes or of a cast, at any alignment."""
        count = int(rng.integers(1, 6))
        zero = np.zeros(count, np.int64)
        casts = form != COPY
        size = zero + itemsize(form[1]) if casts else rng.choice([1, 2, 4, 8], count).astype(np.int64)
        src_size = zero + itemsize(form[0]) if casts else size
        grain = int(rng.choice([1, 2, 8, 16]))
        rows = rng.integers(0, 12, count) if rng.random() < 0.6 else zero + 1
        elems = rng.integers(0, most, count) // size // grain * grain
        sides = []
        for unit in (src_size, size):
            stride = (elems + rng.integers(0, 4, count) * grain) * unit
            span = rows * stride + 64 * unit
            start = np.cumsum(span) - span + rng.integers(0, 4, count) * unit * grain
            start += -start % unit + int(rng.choice([0, 0, 16])) * unit
            sides.append((start, stride, int(span.sum()) + 1024))
        (src, src_stride, src_bytes), (dst, dst_stride, dst_bytes) = sides
        if rng.random() < 0.2:  # rows in reverse
            src, src_stride = src + np.maximum(rows - 1, 0) * src_stride, -src_stride
        pos = rng.integers(0, 1 << 26, count) // grain * grain
        step = elems + rng.integers(0, 9, count) * grain
        group = rng.integers(-1, _GROUPS, count)
        runs = DeviceRuns(
            *form, rows, elems, size, zero, src, src_stride, zero, dst, dst_stride, pos, step, group
        )
        return cls(
            runs, rng.integers(0, 256, src_bytes, dtype=np.uint8), np.full(dst_bytes, _GUARD, np.uint8)
        )

    def expected(self) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
        """Return the destination buffer and the groups' digests as the CPU reference makes them."""
        r, out = self.runs, self.dst.copy()
        digests = [0] * _GROUPS
        for i in range(len(r)):
            size = int(r.itemsize[i])
            src_size = itemsize(r.src_dtype) if r.casts else size
            for row in range(int(r.rows[i])):
                start = int(r.src[i] + row * r.src_stride[i])
                raw = self.src[start : start + int(r.elems[i]) * src_size]
                wire = cast_reference(raw, r.src_dtype, r.dst_dtype) if r.casts else raw
                at = int(r.dst[i] + row * r.dst_stride[i])
                out[at : at + len(wire)] = wire
                if r.group[i] >= 0:
                    where = int(r.pos[i] + row * r.pos_stride[i]) * size
                    digests[int(r.group[i])] += reference.digest_bytes(wire, where)
        return out, np.array([d % 2**64 for d in digests], np.uint64)

    def wrong(self, device: torch.device, op: Op, *, again: bool = False, sms: int | None = None) -> str:
        """Run on a device; return what differs from the reference, or nothing."""
        src, dst = (torch.from_numpy(b.copy()).to(device) for b in (self.src, self.dst))
        sweep = DeviceSweep([self.runs], _GROUPS, device)
        sweep.bind(*(np.array([b.data_ptr()], np.int64) for b in (src, dst)))
        got = sweep.run(op, sms, again=again)
        want, digests = self.expected()
        if op is Op.DIGEST:
            want = self.dst
        if not np.array_equal(dst.cpu().numpy(), want):
            return f"bytes of {self.runs.src_dtype or 'copy'} {self.runs.dst_dtype}"
        if got is not None and not np.array_equal(got.cpu().numpy().view(np.uint64), digests):
            return f"digests of {self.runs.src_dtype or 'copy'} {self.runs.dst_dtype}"
        return ""


def cast_reference(raw: NDArray[np.uint8], src: str, dst: str) -> NDArray[np.uint8]:
    """Return the bytes of cast elements: by way of float32, as torch does it."""
    bits = np.ascontiguousarray(raw).view(_BITS[itemsize(src)])
    if src == "float64":
        with np.errstate(all="ignore"):
            bits = bits.view(np.float64).astype(np.float32).view(np.uint32)
    elif src != "float32":
        bits = reference.cast(bits, src, "float32")
    if dst != "float32":
        bits = reference.cast(bits, "float32", dst)
    return np.ascontiguousarray(bits).view(np.uint8)


@dataclass(frozen=True)
class QuantiseCase:
    """A random bfloat16 matrix with rows of some stride, special values and small blocks included."""

    weight: NDArray[np.uint16]
    cols: int
    power_of_two: bool

    @classmethod
    def random(cls, rng: np.random.Generator) -> QuantiseCase:
        """Draw one of up to 3 x 3 blocks."""
        rows = int(rng.integers(1, 400))
        cols = int(rng.integers(1, 25)) * 16 if rng.random() < 0.5 else int(rng.integers(1, 400))
        value = rng.standard_normal((rows, cols + 16)) * 10.0 ** rng.integers(-3, 3)
        value[: rows // 2, : cols // 3] *= float(rng.choice([0, 1e-39, 1, 1e30]))
        if rng.random() < 0.4:
            value[int(rng.integers(rows)), int(rng.integers(cols))] = rng.choice([np.inf, -np.inf, np.nan])
        with np.errstate(all="ignore"):
            single = value.astype(np.float32).view(np.uint32)
        weight = reference.cast(single, "float32", "bfloat16")
        return cls(weight.astype(np.uint16), cols, bool(rng.random() < 0.5))

    def wrong(self, device: torch.device) -> str:
        """Run on a device; return what differs from the reference, or nothing."""
        rows, width = self.weight.shape
        want, scales = fp8.quantise(self.weight[:, : self.cols], power_of_two=self.power_of_two)
        src = torch.from_numpy(self.weight.view(np.int16).copy()).to(device)
        dst = torch.full((rows, width), _GUARD, dtype=torch.uint8, device=device)
        scale = torch.zeros(scales.shape, dtype=torch.float32, device=device)
        shape = (src.data_ptr(), 2 * width, dst.data_ptr(), width, scale.data_ptr(), 4 * scales.shape[1])
        columns = [np.array([n], np.int64) for n in (*shape, rows, self.cols)]
        DeviceQuantiser(fp8.Matrices(*columns), device, power_of_two=self.power_of_two).run()
        got = dst.cpu().numpy()
        if not np.array_equal(scale.cpu().numpy().view(np.uint32), scales.view(np.uint32)):
            return "scales"
        if not np.array_equal(got[:, : self.cols], want):
            return "quantised bytes"
        return "" if (got[:, self.cols :] == _GUARD).all() else "bytes beside the matrix"
