"""A vLLM engine that Megatron trainers update: ``python -m tests.megatron.into_vllm CASE``.

CASE is JSON: ``out``, ``job``, ``instance``, ``tp``, ``dtype``, ``versions`` (checkpoint directories that the
trainers export, the first from the start). What was seen is written, as JSON, into ``out``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from syncline.adapters.vllm import VLLMInstance
from syncline.options import Options
from tests.engines.vllm import hands, scene
from tests.megatron.waiting import wait

OPTIONS = Options(connect_timeout=300.0, update_timeout=200.0, stall=60.0, lease=60.0)


def main(case: dict[str, Any]) -> dict[str, Any]:
    """Poison, update and compare with the exported checkpoint, twice; then start fresh engines from both."""
    old, *versions = case["versions"]
    llm = scene.engine(wait(old), case, weight_transfer_config={"backend": "syncline"})
    seen: dict[str, Any] = {"old": scene.answers(llm), "updated": [], "fresh": []}
    instance = VLLMInstance(llm, instance=case["instance"], job=case["job"], options=OPTIONS)
    for number, directory in enumerate(versions, 1):
        llm.collective_rpc(hands.poison)
        llm.reset_prefix_cache()
        report = instance.update(number, verify="installed")
        told = scene.facts(llm)
        instance.check_effective(wait(directory))
        seen["updated"].append({"key": str(report.key), **told})
    instance.close()
    scene.stop(llm)
    del llm
    gc.collect()
    for directory in versions:
        llm = scene.engine(directory, case, weight_transfer_config={"backend": "syncline"})
        seen["fresh"].append(scene.facts(llm))
        scene.stop(llm)
        del llm
        gc.collect()
    return seen


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    found = main(given)
    kept = Path(given["out"]).with_suffix(".tmp")
    kept.write_text(json.dumps(found))
    kept.rename(given["out"])
    sys.stdout.flush()
    os._exit(0)  # vLLM's own teardown may hang or warn; everything of ours is closed
