"""Fragments of one size, shuffled: the gather kernel, a copy a fragment, and NCCL, against one large copy."""

from __future__ import annotations

import os
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.gpu import clock
from syncline.kernels.device import DeviceSweep
from syncline.kernels.device_fp8 import DeviceQuantiser
from syncline.kernels.engine import Op
from syncline.kernels.fp8 import Matrices
from syncline.kernels.lower_device import DeviceRuns

TOTAL = 4 << 30
FEW = 1024


def runs(size: int, count: int) -> DeviceRuns:
    """Return ``count`` shuffled fragments of ``size`` bytes, each of a tensor of its own."""
    order = np.random.default_rng(0).permutation(count).astype(np.int64)
    place, zero = np.arange(count, dtype=np.int64), np.zeros(count, np.int64)
    item = zero + 2
    shape = (zero + 1, zero + size // 2, item)
    return DeviceRuns("", "", *shape, zero, order * size, zero, zero, place * size, zero, zero, zero, place)


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def measure(size: int, src: torch.Tensor, dst: torch.Tensor) -> dict[str, float]:
    """Return seconds for all bytes by kernel, with digest and politely, and GB/s of a copy a fragment."""
    count = TOTAL // size
    sweep = DeviceSweep([runs(size, count)], count, dst.device)
    sweep.bind(column(src.data_ptr()), column(dst.data_ptr()))
    ours = clock.median(lambda: sweep.run(Op.COPY))
    digest = clock.median(lambda: sweep.run(Op.COPY_DIGEST))
    few = clock.median(lambda: sweep.run(Op.COPY, 24))
    pairs = [(dst[i * size : (i + 1) * size], src[i * size : (i + 1) * size]) for i in range(FEW)]

    def each() -> None:
        for to, at in pairs:
            to.copy_(at, non_blocking=True)

    one = clock.median(each, 3)
    return {"ours": ours, "digest": digest, "few": few, "copies_gbs": FEW * size / one / 1e9}


def fp8(src: torch.Tensor, dst: torch.Tensor) -> tuple[float, int]:
    """Quantise bfloat16 matrices of an expert's shape; return seconds and elements."""
    rows, cols = 2048, 768
    count = src.nbytes // (2 * rows * cols) // 2
    place = np.arange(count, dtype=np.int64)
    zero = np.zeros(count, np.int64)
    scales = torch.zeros(count * rows * cols // 128**2, dtype=torch.float32, device=dst.device)
    per = rows * cols // 128**2
    table = Matrices(
        src.data_ptr() + place * rows * cols * 2,
        zero + cols * 2,
        dst.data_ptr() + place * rows * cols,
        zero + cols,
        scales.data_ptr() + place * per * 4,
        zero + cols // 128 * 4,
        zero + rows,
        zero + cols,
    )
    made = DeviceQuantiser(table, dst.device)
    return clock.median(made.run), count * rows * cols


def _nccl(rank: int, port: int, count: int, size: int, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    whole = torch.zeros(count * size, dtype=torch.uint8, device="cuda")
    parts = list(whole.split(size))

    def batched() -> None:
        kind = dist.isend if rank == 0 else dist.irecv
        for request in dist.batch_isend_irecv([dist.P2POp(kind, p, 1 - rank) for p in parts]):
            request.wait()

    def single() -> None:
        (dist.send if rank == 0 else dist.recv)(whole, 1 - rank)

    found = []
    for work in (single, batched):
        took = []
        for _ in range(5):
            dist.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            torch.cuda.synchronize()
            took.append(time.perf_counter() - began)
        found.append(whole.nbytes / statistics.median(took[2:]) / 1e9)
    if rank == 1:
        with open(out, "w", encoding="ascii") as file:  # noqa: PTH123
            file.write(" ".join(map(str, found)))
    dist.destroy_process_group()


def nccl(count: int, size: int, out: str, port: int) -> tuple[float, float]:
    """Return GB/s of one message and of one message a tensor, between two processes."""
    mp.spawn(_nccl, (port, count, size, out), 2)
    with open(out, encoding="ascii") as file:  # noqa: PTH123
        one, each = map(float, file.read().split())
    return one, each
