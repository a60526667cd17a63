"""One trainer rank of the demo: FSDP2 over gloo, AdamW, real optimizer steps.

    python -m syncline.cli.demo.trainer MODEL_DIRECTORY STORE_FILE RANK WORLD JOB STEPS CHECKPOINT_DIRECTORY

It publishes after every step and goes on: the next step waits until every engine has pulled the version.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from syncline import WeightWriter
from syncline.adapters.fsdp import FSDPTrainer
from syncline.adapters.loading import load_model, load_tokenizer
from syncline.cli.demo import lesson
from syncline.cli.demo.wire import Events, commands


def main() -> None:
    """Train and publish, then wait to be told to save and to stop."""
    directory, store, rank, world, job, steps, checkpoint = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    events = Events()
    model = _sharded(load_model(Path(directory), torch.float32, None), int(world))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lesson.LEARNING_RATE, weight_decay=0.0)
    batches = lesson.examples(load_tokenizer(Path(directory)), int(rank), int(world))
    with WeightWriter(FSDPTrainer(model, optimizer), job=job) as writer:
        events.tell("ready", tensors=len(writer.adapter.manifest.names))
        for command in commands():
            if command["do"] == "train":
                _train(writer, model, optimizer, batches, int(steps), events)
            elif command["do"] == "save":
                _save(model, Path(checkpoint), Path(directory), int(rank))
                events.tell("saved")
            else:
                break
    dist.destroy_process_group()


def _sharded(model: Any, world: int) -> Any:
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _train(
    writer: WeightWriter,
    model: Any,
    optimizer: torch.optim.Optimizer,
    batches: list[Any],
    steps: int,
    events: Events,
) -> None:
    publication = None
    for step in range(1, steps + 1):
        began = time.perf_counter()
        total = 0.0
        for ids, labels in batches:
            loss = model(input_ids=ids, labels=labels).loss / len(batches)
            loss.backward()
            total += float(loss)
        computed = time.perf_counter()
        optimizer.step()  # its hook first closes the window of the version before
        optimizer.zero_grad()
        stepped = time.perf_counter()
        publication = writer.publish(step, wait="pulled")
        published = time.perf_counter()
        events.tell(
            "published",
            version=step,
            loss=total,
            compute_s=computed - began,
            step_s=stepped - computed,
            publish_ms=(published - stepped) * 1e3,
        )
    if publication is not None:
        publication.wait_committed()
    events.tell("trained")


def _save(model: Any, checkpoint: Path, base: Path, rank: int) -> None:
    """Write the trainer's own checkpoint: gathered by torch, written by Transformers, nothing of ours."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            whole[name] = whole[first.setdefault(id(parameter), name)]  # gathered twice, but tied
        model.save_pretrained(checkpoint, state_dict=whole)
        load_tokenizer(base).save_pretrained(checkpoint)
    dist.barrier()


if __name__ == "__main__":
    main()
