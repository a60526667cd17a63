"""The other way with a block that a border cuts: published as it is held, quantised by the reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from syncline.kernels.fp8 import quantise
from syncline.store.adapter import Stage
from tests.store.pair import Engine, Job, Trainer, module, shard

if TYPE_CHECKING:
    from pathlib import Path


class Quantising(Engine):
    """An engine that receives a layer in bfloat16, and keeps what it makes of it: payload and scales."""

    stages = (Stage("layer", (0,)),)

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__(module({"w": torch.zeros(rows, cols, dtype=torch.bfloat16)}))
        self.payload, self.scale = np.zeros((rows, cols), np.uint8), np.zeros(0, np.float32)

    def begin_stage(self, index: int) -> None:
        self.model.get_parameter("w").data.zero_()

    def end_stage(self, index: int) -> None:
        arrived = self.model.get_parameter("w").data
        self.payload, self.scale = quantise(arrived.view(torch.int16).numpy().view(np.uint16))


def test_a_reader_quantises_what_cut_ranks_publish_as_they_hold_it(run_dir: Path) -> None:
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    cuts = ((0, 100), (100, 200))  # the first block of rows is held by both
    with Job("m") as job:
        writers = [
            job.writer(
                Trainer(
                    module({"w": weight[low : low + n].clone()}),
                    shards=[shard("w", (300, 200), (low, 0), (n, 200), dtype="bfloat16")],
                    rank=rank,
                    world=2,
                )
            )
            for rank, (low, n) in enumerate(cuts)
        ]
        engine = Quantising(300, 200)
        reader = job.reader(engine)
        for writer in writers:
            writer.publish(1)
        reader.update(1)
    payload, scale = quantise(weight.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(engine.payload, payload)
    assert np.array_equal(engine.scale, scale)
