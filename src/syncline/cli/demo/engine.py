"""One process of an inference instance of the demo: Transformers, whole or tensor-parallel.

python -m syncline.cli.demo.engine MODEL_DIRECTORY STORE_FILE INSTANCE RANK WORLD JOB
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from syncline import WeightReader, WorkerWeightsReader
from syncline.adapters.huggingface import HuggingFaceEngine
from syncline.cli.demo import lesson, work
from syncline.cli.demo.wire import Events, commands

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    """Serve one rank until told to stop."""
    directory, store, instance, rank, world, job = sys.argv[1:]
    torch.set_num_threads(1)
    if int(world) > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    engine = HuggingFaceEngine.load(directory, dtype=torch.float32)
    events = Events()
    events.tell("started", refused=None)
    if engine.rank == 0:
        with WeightReader(engine, instance=instance, job=job) as reader:
            _Process(engine, events, lambda: _follow(reader, events)).serve()
            engine.shutdown()
    else:
        with WorkerWeightsReader(engine, instance=instance, job=job):
            process = _Process(engine, events, lambda: None)
            serving = threading.Thread(target=process.serve, daemon=True)
            serving.start()
            engine.follow()
            serving.join()
    if dist.is_initialized():
        dist.destroy_process_group()


def _follow(reader: WeightReader, events: Events) -> None:
    reader.follow(on_update=lambda report: events.tell("updated", report=report.as_dict()))


class _Process:
    def __init__(self, engine: HuggingFaceEngine, events: Events, follow: Callable[[], None]) -> None:
        self.engine, self.events, self._follow = engine, events, follow

    def serve(self) -> None:
        """Do what is asked, one thing after the other, until told to stop."""
        self.events.tell("ready", tensors=len(self.engine.live_tensors()))
        doing = {
            "answer": self._answer,
            "memcpy": self._memcpy,
            "follow": self._begin,
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
        status = self.engine.live_status()
        nbytes = sum(t.nbytes for n, t in self.engine.live_tensors().items() if status[n].names)
        return work.memcpy(nbytes, command["at"])

    def _begin(self, _command: dict[str, Any]) -> dict[str, Any]:
        self._follow()
        return {}

    def _effective(self, command: dict[str, Any]) -> dict[str, Any]:
        return {"ranks": [work.effective(self.engine, Path(command["checkpoint"]))]}

    def _dump(self, command: dict[str, Any]) -> dict[str, Any]:
        work.dump(
            self.engine, Path(command["directory"]) / work.dump_name(command["instance"], self.engine.rank)
        )
        return {}


if __name__ == "__main__":
    main()
