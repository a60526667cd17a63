"""One process of an inference instance of the demo: Transformers, whole or tensor-parallel.

python -m syncline.cli.demo.engine MODEL_DIRECTORY STORE_FILE INSTANCE RANK WORLD JOB
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syncline import WeightReader, WorkerWeightsReader
from syncline.adapters.huggingface import HuggingFaceEngine
from syncline.cli.demo import lesson
from syncline.cli.demo.wire import Events, commands
from syncline.verify.effective import compare

_COPY_BYTES = 64 << 20


def main() -> None:
    """Serve one rank until told to stop."""
    directory, store, instance, rank, world, job = sys.argv[1:]
    torch.set_num_threads(1)
    if int(world) > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    engine = HuggingFaceEngine.load(directory, dtype=torch.float32)
    process = _Process(engine, Events())
    if engine.rank == 0:
        with WeightReader(engine, instance=instance, job=job) as reader:
            reader.follow(on_update=lambda report: process.events.tell("updated", report=report.as_dict()))
            process.serve()
            engine.shutdown()
    else:
        with WorkerWeightsReader(engine, instance=instance, job=job):
            serving = threading.Thread(target=process.serve, daemon=True)
            serving.start()
            engine.follow()
            serving.join()
    if dist.is_initialized():
        dist.destroy_process_group()


class _Process:
    def __init__(self, engine: HuggingFaceEngine, events: Events) -> None:
        self.engine, self.events = engine, events

    def serve(self) -> None:
        """Do what is asked, one thing after the other, until told to stop."""
        self.events.tell("ready", tensors=len(self.engine.live_tensors()))
        doing = {
            "answer": self._answer,
            "memcpy": self._memcpy,
            "effective": self._effective,
            "dump": self._dump,
        }
        for command in commands():
            if command["do"] == "stop":
                return
            self.events.tell(command["do"], **doing[command["do"]](command))

    def _answer(self, _command: dict[str, Any]) -> dict[str, Any]:
        (completion,) = self.engine.generate([lesson.chat(lesson.QUESTION)], lesson.MAX_NEW_TOKENS)
        return {"text": completion.text, "version": str(completion.version)}

    def _memcpy(self, command: dict[str, Any]) -> dict[str, Any]:
        """Copy as many bytes as an update moves here, between two warm private buffers."""
        status = self.engine.live_status()
        left = nbytes = sum(t.nbytes for n, t in self.engine.live_tensors().items() if status[n].names)
        source, target = (torch.zeros(min(left, _COPY_BYTES), dtype=torch.uint8) for _ in range(2))
        target.copy_(source)
        time.sleep(max(0.0, command["at"] - time.time()))  # all ranks copy at once, as they pull
        began = time.perf_counter()
        while left > 0:
            part = min(left, source.numel())
            target[:part].copy_(source[:part])
            left -= part
        return {"seconds": time.perf_counter() - began, "nbytes": nbytes}

    def _effective(self, command: dict[str, Any]) -> dict[str, Any]:
        report = compare(self.engine.live_tensors(), self.engine.load_fresh(Path(command["checkpoint"])))
        return {"tensors": report.tensors, "diffs": [str(diff) for diff in report.diffs]}

    def _dump(self, command: dict[str, Any]) -> dict[str, Any]:
        self.engine.dump(Path(command["path"]))
        return {"path": command["path"]}


if __name__ == "__main__":
    main()
