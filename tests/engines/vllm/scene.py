"""Engines and a trainer in a process of their own: ``python -m tests.engines.vllm.scene < CASES``.

A case is a line of JSON: ``out``, ``log``, ``run`` (its directories and files), ``versions`` (checkpoint
directories), ``tp``, ``dtype``, ``eager``, ``play``. A scene writes what it saw, as JSON, into ``out``.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import sys
import time
from importlib import import_module
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
    from collections.abc import Callable, Iterator

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
        enable_prefix_caching=case.get("prefix", True),
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

    def __init__(
        self, directory: str, *, drop: str | None = None, add: str | None = None, job: str = JOB
    ) -> None:
        held = {n: t.clone() for n, t in checkpoints.tensors(directory).items() if n != drop}
        if add is not None:
            held[add] = torch.ones(4)
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
    """Compare an engine that is poisoned and updated, twice, with fresh ones.

    The engine is started on the second version's checkpoint: until it is poisoned, it is a fresh one itself.
    """
    a, b = case["versions"]
    seen: dict[str, Any] = {"fresh": [], "updated": []}
    llm = engine(a, case)
    seen["fresh"].append(facts(llm))
    stop(llm)
    del llm
    gc.collect()
    llm = engine(b, case, weight_transfer_config={"backend": "syncline"})
    seen["fresh"].append(facts(llm))
    trainer = Trainer(a)
    instance = VLLMInstance(llm, job=JOB, options=OPTIONS)
    try:
        before = llm.collective_rpc(hands.pointers)
        for number, directory in enumerate((a, b), 1):
            poisoned = llm.collective_rpc(hands.poison)
            llm.reset_prefix_cache()
            spoiled = facts(llm)
            trainer.publish(number, directory)
            report = instance.update(number, verify="installed" if number == 1 else "delivered")
            seen["updated"].append(
                {
                    "key": str(report.key),
                    "changed": report.changed,
                    "seconds": dict(report.seconds),
                    "poisoned": poisoned,
                    "spoiled": spoiled,
                    **facts(llm),
                }
            )
        seen["ranks"] = llm.collective_rpc(hands.describe, args=(a,))
        seen["moved"] = before != llm.collective_rpc(hands.pointers)
        instance.check_effective(b)
        seen["wrong"] = refusal(lambda: instance.check_effective(a))
        seen["stale"] = refusal(lambda: instance.update(1, timeout=5))
        seen["after"] = [x["tokens"] for x in answers(llm)]
        instance.close()
    finally:
        trainer.writer.close()
        stop(llm)
    return seen


def facts(llm: Any) -> dict[str, Any]:
    """Return what an engine answers, and a digest of each live tensor of each rank."""
    return {"answers": answers(llm), "digests": llm.collective_rpc(hands.digests)}


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
    more = Trainer(a, add=case["ignored"], job="more")
    seen["ignored"] = refusal(lambda: VLLMInstance(llm, job="more", options=OPTIONS))
    VLLMInstance(llm, job="more", options=OPTIONS, extras=[case["ignored"]]).close()
    more.writer.close()
    trainer = Trainer(a)
    llm.collective_rpc(hands.grow)
    seen["grown"] = refusal(lambda: VLLMInstance(llm, job=JOB, options=OPTIONS))
    VLLMInstance(llm, job=JOB, options=OPTIONS, local=["grown"]).close()
    llm.collective_rpc(hands.grow, kwargs={"back": True})
    with unrepeatable():
        seen["unrepeatable"] = refusal(lambda: VLLMInstance(llm, job=JOB, options=OPTIONS))
    with VLLMInstance(llm, job=JOB, options=OPTIONS, hold=True) as held:
        refused = refusal(lambda: held.update(timeout=2))
        seen["held"] = refused.get("kind") == "DeadlineError" and held.paused
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


@contextlib.contextmanager
def unrepeatable() -> Iterator[None]:
    """Let vLLM's linear layers transform their weights in another way each time."""
    method = import_module("vllm.model_executor.layers.linear").UnquantizedLinearMethod
    kept, count = method.process_weights_after_loading, itertools.count(2)

    def process(self: Any, layer: Any) -> None:
        layer.weight.data.mul_(next(count))
        kept(self, layer)

    method.process_weights_after_loading = process
    try:
        yield
    finally:
        method.process_weights_after_loading = kept


def draft(case: dict[str, Any]) -> dict[str, Any]:
    """Update an engine that speculates with a draft model; only where the draft may stay behind."""
    a, b = case["versions"]
    llm = engine(b, case)
    fresh = [x["tokens"] for x in answers(llm)]
    stop(llm)
    del llm
    gc.collect()
    speculative = {"method": "draft_model", "model": case["draft"], "num_speculative_tokens": 2}
    llm = engine(a, case, weight_transfer_config={"backend": "syncline"}, speculative_config=speculative)
    before = llm.collective_rpc(hands.draft_digests)
    trainer = Trainer(b)
    seen: dict[str, Any] = {"refused": refusal(lambda: VLLMInstance(llm, job=JOB, options=OPTIONS))}
    trainer.publish(1, b)
    with VLLMInstance(llm, job=JOB, options=OPTIONS, frozen_draft=True) as instance:
        instance.update(1)
        instance.check_effective(b)
        seen["same"] = [x["tokens"] for x in answers(llm)] == fresh
    seen["draft"] = [before, llm.collective_rpc(hands.draft_digests)]
    trainer.writer.close()
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


def serve() -> None:
    """Play the scenes that come, one a line, until there are no more."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        case = json.loads(line)
        with Path(case["log"]).open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ["SYNCLINE_RUN_DIR"] = case["run"]
        seen = {"main": main, "misuse": misuse, "draft": draft}[case.get("play", "main")](case)
        gc.collect()
        part = Path(case["out"] + ".part")
        part.write_text(json.dumps(seen))
        part.rename(case["out"])


if __name__ == "__main__":
    serve()
    os._exit(0)  # vLLM's own teardown may hang or warn; everything of ours is closed
