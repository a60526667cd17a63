"""Terminal 2: an inference instance that follows the trainer, in one process or tensor-parallel.

python examples/infer.py models/smollm2-135m-instruct
torchrun --standalone --nproc-per-node 3 examples/infer.py models/smollm2-135m-instruct
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

import syncline
from syncline.adapters.huggingface import HuggingFaceEngine

SECONDS = 90.0


def main() -> None:
    """Answer again and again, while versions arrive."""
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    engine = HuggingFaceEngine.load(sys.argv[1])
    instance = f"tp{world}"
    if engine.rank > 0:
        with syncline.WorkerWeightsReader(engine, instance=instance, job="two-terminals"):
            engine.follow()  # takes part in what rank 0 starts
        return
    with syncline.WeightReader(engine, instance=instance, job="two-terminals", pause="abort") as reader:
        follower = reader.follow(on_update=lambda report: print(f"-> {report.key}", flush=True))  # noqa: T201
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and follower.running:
            (answer,) = engine.generate(["The weights of trainer and engines are"], max_new_tokens=12)
            print(f"[{answer.version}] {answer.text!r}", flush=True)  # noqa: T201
        engine.shutdown()


if __name__ == "__main__":
    main()
