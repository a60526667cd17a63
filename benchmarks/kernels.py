"""How the host kernels compare with libc's ``memcpy`` of the same bytes, in the same run.

``python -m benchmarks.kernels [--json] [--mib 256] [--rounds 15] [--processes 2] [--cpu-time]``

Every process copies, digests, or does both, from a sealed arena (a writer's parameters) into private memory
(a reader's), one thread each, all starting together. A round times every operation once, so that a
disturbance hits neighbours in time alike; a figure is the median over rounds of (slowest process, operation)
/ (slowest process, memcpy of as many bytes between the same warm buffers). ``copy_ratio`` is the inverse:
higher is faster. On a machine with other work, ``--cpu-time`` leaves out the time that the scheduler gave to
others.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from syncline.kernels.engine import RUN_BYTES, Op, Sweep
from syncline.kernels.table import Table
from syncline.memory.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.synchronize import Barrier

SHAPES = {"contiguous": (0, 0), "columns_2_to_8_kib": (2048, 8192), "rows_half_to_1.5_kib": (512, 1536)}
OPERATIONS = ("memcpy", "copy", "digest", "copy_digest")


def table(shape: str, dst: int, src: int, nbytes: int) -> Table:
    """Return runs that take ``nbytes // 2`` bytes: the left halves of the rows of many bf16 matrices."""
    low, high = SHAPES[shape]
    half = nbytes // 2
    if not low:
        widths, heights = [half], [1]
    else:
        rng = np.random.default_rng(0)
        widths, heights, left = [], [], half
        while left > 0:
            width = int(rng.integers(low // 64, high // 64 + 1)) * 64
            height = min(left // width, 2048)
            if not height:
                break
            widths.append(width)
            heights.append(height)
            left -= width * height
    width, rows = np.array(widths), np.array(heights)
    taken = np.concatenate([[0], np.cumsum(width * rows)[:-1]])
    factor = 2 if low else 1  # a row of the source is two of the destination
    runs = len(width)
    return Table(
        dst=dst + taken,
        src=src + taken * factor,
        rows=rows,
        elems=width // 2,
        dst_stride=width,
        src_stride=width * factor,
        pos=taken // 2 * factor,
        pos_stride=width // 2 * factor,
        itemsize=np.full(runs, 2, np.uint8),
        group=np.zeros(runs, np.int32),
    )


def _with_right_halves(left: Table) -> Table:
    runs = np.arange(len(left))
    both = left.take(np.concatenate([runs, runs]))
    right = np.repeat([0, 1], len(left))
    return replace(both, src=both.src + right * both.dst_stride, pos=both.pos + right * both.elems)


def operations(shape: str, dst: int, src: int, nbytes: int) -> dict[str, Callable[[], object]]:
    """Return the timed calls of one shape by name."""
    libc = ctypes.CDLL(None)
    libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    runs = table(shape, dst, src, nbytes).split(RUN_BYTES)
    sweep = Sweep(runs, groups=1)
    calls: dict[str, Callable[[], object]] = {"memcpy": lambda: libc.memcpy(dst, src, sweep.nbytes)}
    calls["copy"] = lambda: sweep.run(Op.COPY)
    # A writer digests all that it holds: here the right halves of the rows as well, twice the bytes.
    everything = Sweep(_with_right_halves(runs).by_source() if SHAPES[shape][0] else runs, groups=1)
    calls["digest"] = lambda: everything.run(Op.DIGEST)
    calls["copy_digest"] = lambda: sweep.run(Op.COPY_DIGEST)
    return calls


def work(rank: int, barrier: Barrier, results: Any, nbytes: int, rounds: int, cpu_time: bool) -> None:
    """Time every operation ``rounds`` times in step with the other processes."""
    torch.set_num_threads(1)
    clock = time.thread_time if cpu_time else time.perf_counter
    arena = Arena(nbytes)
    arena.reserve(0, nbytes)
    source = arena.storage(0, nbytes)
    source.random_(generator=torch.Generator().manual_seed(rank))
    target = torch.ones(nbytes // 2, dtype=torch.uint8)
    times: dict[str, list[float]] = {}
    for shape in SHAPES:
        calls = operations(shape, target.data_ptr(), arena.address, nbytes)
        for call in calls.values():
            call()
        for _ in range(rounds):
            for name, call in calls.items():
                barrier.wait()
                start = clock()
                call()
                times.setdefault(f"{shape}/{name}", []).append(clock() - start)
    results.put(times)
    arena.close()


def measure(mib: int, rounds: int, processes: int, cpu_time: bool) -> dict[str, float]:
    """Run all processes and return the figures."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(processes), context.SimpleQueue()
    arguments = (barrier, results, mib << 20, rounds, cpu_time)
    workers = [context.Process(target=work, args=(rank, *arguments)) for rank in range(processes)]
    for worker in workers:
        worker.start()
    all_times = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    slowest = {key: np.max([times[key] for times in all_times], axis=0) for key in all_times[0]}
    figures: dict[str, float] = {}
    for shape in SHAPES:
        base = slowest[f"{shape}/memcpy"]
        figures[f"{shape}/memcpy_gb_per_s"] = (mib << 19) / float(np.median(base)) / 1e9
        figures[f"{shape}/copy_ratio"] = float(np.median(base / slowest[f"{shape}/copy"]))
        for name in OPERATIONS[2:]:
            bytes_ratio = 2 if name == "digest" and SHAPES[shape][0] else 1
            ratios = slowest[f"{shape}/{name}"] / base / bytes_ratio
            figures[f"{shape}/{name}_in_memcpy_times"] = float(np.median(ratios))
    return {key: round(value, 3) for key, value in figures.items()}


def load_seconds() -> float:
    """Return what loading the compiled kernels costs a process that has imported torch, from a warm cache."""
    code = (
        "import time, torch\nfrom syncline.kernels import host\n"
        "start = time.perf_counter()\nhost.load()\nprint(time.perf_counter() - start)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(3)
    ]
    return round(statistics.median(map(float, runs)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description="host kernels against memcpy")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--mib", type=int, default=256, help="source bytes a process; half of them are copied"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="threads' CPU time instead of wall time")
    options = parser.parse_args()
    figures = measure(options.mib, options.rounds, options.processes, options.cpu_time)
    figures["warm_load_seconds"] = load_seconds()
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        print(f"{name:48} {value:8.3f}")


if __name__ == "__main__":
    main()
