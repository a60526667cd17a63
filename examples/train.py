"""Terminal 1: a trainer of two FSDP2 ranks that publishes after every optimizer step.

torchrun --standalone --nproc-per-node 2 examples/train.py models/smollm2-135m-instruct
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import syncline
from syncline.adapters.fsdp import FSDPTrainer

SENTENCE = "The weights of trainer and engines are equal, bit for bit."


def main() -> None:
    """Fine-tune on one sentence."""
    directory = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = AutoTokenizer.from_pretrained(directory)(SENTENCE, return_tensors="pt")["input_ids"]

    with syncline.WeightWriter(FSDPTrainer(model, optimizer), job="two-terminals") as writer:
        for step in range(1, 11):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()  # waits for pulls of the version before, if any are still under way
            optimizer.zero_grad()
            publication = writer.publish(step)  # returns at once
            if writer.adapter.rank == 0:
                publication.wait()
                readers = ", ".join(publication.readers) or "nobody yet"
                print(f"step {step}: loss {loss.item():.3f}, published to {readers}", flush=True)  # noqa: T201
        publication.wait_committed()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
