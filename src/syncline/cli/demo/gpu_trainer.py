"""The trainer of ``syncline demo --device cuda``: FSDP2, AdamW, the API that any trainer uses.

python -m syncline.cli.demo.gpu_trainer DEVICE STORE_FILE RANK WORLD JOB STEPS CHECKPOINT_FILE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from syncline import WeightWriter
from syncline.adapters.fsdp import FSDPTrainer
from syncline.cli.demo import small
from syncline.cli.demo.wire import Events, commands

_UPDATES = 25
"""Optimizer steps for a version."""


def main() -> None:
    """Train and publish, then wait to be told to save and to stop."""
    where, store, rank, world, job, steps, checkpoint = sys.argv[1:]
    torch.set_num_threads(1)
    device = torch.device(where)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    events = Events()
    model: Any = small.made(device, torch.float32)
    mesh = init_device_mesh(device.type, (int(world),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)
    with WeightWriter(FSDPTrainer(model, optimizer), job=job) as writer:
        names = writer.adapter.manifest.names
        events.tell("ready", tensors=len(names), places=_places(model))
        for command in commands():
            if command["do"] == "train":
                _train(writer, model, optimizer, device, int(steps), events)
            elif command["do"] == "save":
                _save(model, Path(checkpoint), int(rank))
                events.tell("saved", places=_places(model))
            else:
                break
    dist.destroy_process_group()


def _places(model: Any) -> list[int]:
    """Return where the parameters lie: publishing must not move them."""
    return [p.to_local().data_ptr() if isinstance(p, DTensor) else p.data_ptr() for p in model.parameters()]


def _train(
    writer: WeightWriter,
    model: Any,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    steps: int,
    events: Events,
) -> None:
    ids = small.lesson(device)
    publication = None
    for step in range(1, steps + 1):
        began = time.perf_counter()
        loss = torch.zeros(())
        for _ in range(_UPDATES):
            loss = small.loss_of(model, ids)
            loss.backward()
            optimizer.step()  # its hook first closes the window of the version before
            optimizer.zero_grad()
        trained = time.perf_counter()
        publication = writer.publish(step, wait="pulled")
        published = time.perf_counter()
        events.tell(
            "published",
            version=step,
            loss=float(loss),
            train_s=trained - began,
            publish_ms=(published - trained) * 1e3,
        )
    if publication is not None:
        publication.wait_committed()
    events.tell("trained")


def _save(model: Any, checkpoint: Path, rank: int) -> None:
    """Write the whole parameters, gathered by torch: nothing of ours."""
    whole = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu().contiguous()
        for name, p in model.state_dict().items()
    }
    if rank == 0:
        save_file(whole, str(checkpoint))
    dist.barrier()


if __name__ == "__main__":
    main()
