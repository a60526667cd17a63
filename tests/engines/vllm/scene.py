"""One engine and one trainer in a process of their own: ``python -m tests.engines.vllm.scene CASE``.

CASE is JSON: ``out``, ``old``, ``versions`` (checkpoint directories), ``tp``, ``dtype``, ``eager``. The scene
writes what it saw, as JSON, into ``out``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from syncline import faults
from syncline.adapters.fsdp import FSDPTrainer
from syncline.adapters.vllm import VLLMInstance
from syncline.errors import SynclineError, to_wire
from syncline.options import Options
from syncline.store.writer import WeightWriter
from tests.engines import checkpoints
from tests.engines.vllm import hands
from tests.store.pair import module

if TYPE_CHECKING:
    from collections.abc import Callable

OPTIONS = Options(connect_timeout=60.0, update_timeout=60.0, stall=30.0)
JOB = "scene"


def engine(directory: str, case: dict[str, Any], **more: Any) -> Any:
    """Start vLLM in this process."""
    from vllm import LLM  # noqa: PLC0415 (heavy)

    return LLM(
        model=directory,
        dtype=case["dtype"],
        enforce_eager=case.get("eager", True),
        max_model_len=128,
        max_num_seqs=8,
        seed=0,
        tensor_parallel_size=case["tp"],
        enable_prefix_caching=True,
        **more,
    )


def stop(llm: Any) -> None:
    """End an engine, its processes included."""
    if hasattr(llm.llm_engine.engine_core, "shutdown"):
        llm.llm_engine.engine_core.shutdown()


def answers(llm: Any) -> list[dict[str, Any]]:
    """Generate greedily; tokens and exact log-probabilities."""
    from vllm import SamplingParams  # noqa: PLC0415 (heavy)

    wanted = SamplingParams(max_tokens=12, temperature=0, logprobs=3, ignore_eos=True)
    found = []
    for done in llm.generate(list(checkpoints.PROMPTS), wanted, use_tqdm=False):
        first = done.outputs[0]
        top = [sorted((token, value.logprob) for token, value in step.items()) for step in first.logprobs]
        versions = [span.version for span in first.weight_versions or []]
        found.append({"tokens": list(first.token_ids), "logprobs": top, "versions": versions})
    return found


class Trainer:
    """A trainer rank that holds a checkpoint's tensors."""

    def __init__(self, directory: str, *, drop: str | None = None, job: str = JOB) -> None:
        held = {n: t.clone() for n, t in checkpoints.tensors(directory).items() if n != drop}
        self._adapter = FSDPTrainer(module(held), rank=0, world=1)
        self.writer = WeightWriter(self._adapter, job=job, options=OPTIONS)

    def publish(self, number: int, directory: str) -> None:
        """Take over a checkpoint's contents and publish them."""
        full = checkpoints.tensors(directory)
        self.writer.close_window("the next version")
        with torch.no_grad(), self._adapter.mutation("the next version"):
            for name, parameter in self._adapter.model.named_parameters():
                parameter.copy_(full[name])
        self.writer.publish(number)


def main(case: dict[str, Any]) -> dict[str, Any]:
    """Compare an engine that is poisoned and updated, twice, with fresh ones."""
    seen: dict[str, Any] = {"fresh": [], "updated": []}
    for directory in case["versions"]:
        llm = engine(directory, case)
        seen["fresh"].append(answers(llm))
        stop(llm)
        del llm
        gc.collect()
    llm = engine(case["old"], case, weight_transfer_config={"backend": "syncline"})
    seen["old"] = answers(llm)
    trainer = Trainer(case["versions"][0])
    instance = VLLMInstance(llm, job=JOB, options=OPTIONS)
    try:
        before = llm.collective_rpc(hands.pointers)
        for number, directory in enumerate(case["versions"], 1):
            poisoned = llm.collective_rpc(hands.poison)
            llm.reset_prefix_cache()
            spoiled = answers(llm)
            trainer.publish(number, directory)
            report = instance.update(number, verify="installed" if number == 1 else "delivered")
            told = answers(llm)
            instance.check_effective(directory)
            seen["updated"].append(
                {
                    "key": str(report.key),
                    "changed": report.changed,
                    "seconds": dict(report.seconds),
                    "answers": told,
                    "poisoned": poisoned,
                    "spoiled": [x["tokens"] for x in spoiled],
                }
            )
        seen["ranks"] = llm.collective_rpc(hands.describe, args=(case["old"],))
        seen["moved"] = before != llm.collective_rpc(hands.pointers)
        seen["wrong"] = refusal(lambda: instance.check_effective(case["old"]))
        seen["stale"] = refusal(lambda: instance.update(1, timeout=5))
        seen["after"] = [x["tokens"] for x in answers(llm)]
        instance.close()
    finally:
        trainer.writer.close()
        stop(llm)
    return seen


def misuse(case: dict[str, Any]) -> dict[str, Any]:
    """Do everything wrong, one after the other, on one engine; return what each was told."""
    a, b = case["versions"]
    llm = engine(case["old"], case, weight_transfer_config={"backend": "syncline"})
    old = [x["tokens"] for x in answers(llm)]
    seen: dict[str, Any] = {}

    def raw() -> None:
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": 1, "timeout": 3}})

    seen["not joined"] = refusal(raw)
    name = next(iter(checkpoints.tensors(a)))
    short = Trainer(a, drop=name, job="short")
    seen["dropped"] = name
    seen["too little"] = refusal(lambda: VLLMInstance(llm, job="short", options=OPTIONS))
    short.writer.close()
    trainer = Trainer(a)
    instance = VLLMInstance(llm, job=JOB, options=OPTIONS)
    seen["before any version"] = refusal(lambda: instance.update(timeout=2))
    seen["unpublished"] = refusal(lambda: instance.update(7, timeout=2))
    seen["goes on"] = [x["tokens"] for x in answers(llm)] == old and not instance.paused
    trainer.publish(1, a)
    instance.update(1)
    served = [x["tokens"] for x in answers(llm)]
    trainer.publish(2, b)
    with faults.arm("adapters.end_stage", "raise:torn on purpose"):
        seen["torn"] = refusal(lambda: instance.update(2, timeout=20))
    seen["torn stays paused"] = instance.paused and instance.dirty
    instance.update(2)
    instance.check_effective(b)
    seen["recovered"] = (
        not instance.paused and not instance.dirty and [x["tokens"] for x in answers(llm)] != served
    )
    seen["moved"] = {"name": llm.collective_rpc(hands.move)[0]}
    trainer.publish(3, a)
    seen["moved"]["error"] = refusal(lambda: instance.update(3, timeout=20))
    trainer.writer.close()
    instance.close()
    stop(llm)
    return seen


def refusal(action: Callable[[], object]) -> dict[str, Any]:
    """Return the error that an action raises, as its parts; empty if it raises none."""
    began = time.monotonic()
    try:
        action()
    except SynclineError as error:
        notes = list(getattr(error, "__notes__", ()))
        return {**to_wire(error), "notes": notes, "seconds": time.monotonic() - began}
    except Exception as error:
        return {"kind": type(error).__name__, "what": str(error)}
    return {}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    play = {"main": main, "misuse": misuse}[given.get("play", "main")]
    Path(given["out"]).write_text(json.dumps(play(given)))
    sys.stdout.flush()
    os._exit(0)  # vLLM's own teardown may hang or warn; everything of ours is closed
