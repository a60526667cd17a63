"""Every kernel and transport against the CPU reference, on random layouts, dtypes and alignments."""

from __future__ import annotations

import multiprocessing
import zlib

import numpy as np
import torch

from benchmarks.gpu import worlds
from benchmarks.gpu.cases import COPY, FORMS, MoveCase, QuantiseCase
from syncline.kernels.engine import Op

OPS = ((Op.COPY, False), (Op.DIGEST, False), (Op.COPY_DIGEST, False), (Op.COPY_DIGEST, True))


def _kernels(job: tuple[str, int, int]) -> list[str]:
    """Run the cases of one form, or of the quantiser, in a process of its own: compiling takes longest."""
    name, count, device = job
    torch.set_num_threads(1)
    torch.cuda.set_device(device)
    here = torch.device("cuda", device)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name == "fp8":
        return [QuantiseCase.random(rng).wrong(here) for _ in range(count)]
    form = next(f for f in (COPY, *FORMS) if "-".join(f) == name)
    wrong = []
    for i in range(count):
        op, again = OPS[i % len(OPS)] if form == COPY else OPS[2]
        case = MoveCase.random(rng, form, int(rng.choice([200, 6000, 60000])))
        wrong.append(case.wrong(here, op, again=again, sms=8 if i % 5 == 4 else None))
    return wrong


def kernels(count: int) -> list[str]:
    """Return what was wrong with each of the kernels' cases: empty strings where nothing was."""
    forms = sorted({"-".join(f) for f in FORMS})
    jobs = [(name, count * (4 if name == "-".join(COPY) else 1), 0) for name in [*forms, "fp8"]]
    jobs = [(name, n, i % torch.cuda.device_count()) for i, (name, n, _) in enumerate(jobs)]
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), 12)) as pool:
        return [one for found in pool.map(_kernels, jobs, chunksize=1) for one in found]


def transports(count: int) -> list[str]:
    """Return what was wrong with each pull between processes."""
    last = torch.cuda.device_count() - 1
    wrong = worlds.pulls(count, 0, 0, seed=100)
    wrong += worlds.pulls(count // 2, 0, last, expandable=True, seed=200)
    if last:
        wrong += worlds.pulls(count, 0, last, seed=300)
    return wrong
