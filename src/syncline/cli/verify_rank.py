"""One rank of ``syncline verify``: loads the checkpoint as the engine would, and compares the rank's dump.

python -m syncline.cli.verify_rank DIRECTORY INSTANCE RANK WORLD STORE_FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from syncline.adapters.huggingface import HuggingFaceEngine
from syncline.verify.effective import compare


def main() -> None:
    """Print {"tensors": ..., "diffs": [...]}."""
    directory, instance, rank, world, store = sys.argv[1:]
    torch.set_num_threads(1)
    if int(world) > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    engine = HuggingFaceEngine.load(Path(directory) / "checkpoint", dtype=torch.float32)
    dump = load_file(Path(directory) / "dumps" / f"instance-{instance}-rank-{rank}.safetensors")
    report = compare(dump, engine.live_tensors())
    sys.stdout.write(json.dumps({"tensors": report.tensors, "diffs": [str(d) for d in report.diffs]}) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
