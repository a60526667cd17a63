"""One process of an inference instance of ``syncline demo --device cuda``: plain PyTorch.

python -m syncline.cli.demo.gpu_engine DEVICE INSTANCE RANK WORLD JOB

An instance of one process holds the model in bfloat16 and generates; in one of two, each process holds half
of the rows of every tensor, in float32.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from safetensors.torch import load_file

from syncline import Rules, WeightReader, WorkerWeightsReader
from syncline.adapters.module import Cut, ModuleEngine
from syncline.cli.demo import small
from syncline.cli.demo.wire import Events, commands


def main() -> None:
    """Serve one rank until told to stop."""
    where, instance, rank, world, job = sys.argv[1:]
    torch.set_num_threads(1)
    device = torch.device(where)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    process = _Process(device, int(rank), int(world))
    rules = Rules(casts="reader")
    if int(rank) == 0:
        with WeightReader(process.engine, instance=instance, job=job, rules=rules) as reader:
            reader.follow(on_update=lambda report: process.events.tell("updated", report=report.as_dict()))
            process.serve()
    else:
        with WorkerWeightsReader(process.engine, instance=instance, job=job, rules=rules):
            process.serve()


class _Process:
    def __init__(self, device: torch.device, rank: int, world: int) -> None:
        self.device, self.events = device, Events()
        model: Any = small.made(device, torch.bfloat16 if world == 1 else torch.float32)
        cuts: dict[str, Cut] = {}
        if world > 1:
            model, rows = small.half(model.state_dict(), rank)
            for name, (shape, first) in rows.items():
                cuts[name] = Cut(shape, (first, *[0] * (len(shape) - 1)))
        self.cuts = cuts
        self.engine = ModuleEngine(model, rank=rank, world=world, cuts=cuts)

    def serve(self) -> None:
        """Do what is asked, one thing after the other, until told to stop."""
        self.events.tell("ready")
        for command in commands():
            if command["do"] == "stop":
                return
            if command["do"] == "answer":
                with self.engine.forward():
                    text = small.answer(self.engine.model, self.device)
                self.events.tell("answer", text=text, version=str(self.engine.version))
            else:
                self.events.tell("effective", **self._effective(command["checkpoint"]))

    def _effective(self, checkpoint: str) -> dict[str, Any]:
        """Compare every live tensor, bit for bit, with the trainer's own checkpoint."""
        whole = load_file(checkpoint)
        wrong = []
        live = self.engine.live_tensors()
        for name, tensor in live.items():
            first = self.cuts[name].offset[0] if name in self.cuts else 0
            expected = whole[name][first : first + tensor.shape[0]].to(tensor.dtype)
            found = tensor.cpu()
            if not torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8)):
                wrong.append(name)
        return {"tensors": len(live), "wrong": wrong}


if __name__ == "__main__":
    main()
