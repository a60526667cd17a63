"""The process of ``syncline verify`` that holds vLLM: explains its live tensors, or compares dumps with them.

python -m syncline.cli.verify_live REQUEST

REQUEST is JSON; the answer is one event, see `syncline.cli.demo.wire`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from syncline.adapters.vllm.explain import LookingRank, adapter_of, ask_ranks, explain, plainly
from syncline.cli.demo.wire import Events
from syncline.cli.demo.work import dump_name
from syncline.errors import SynclineError, to_wire
from syncline.verify.effective import compare


class ComparingRank(LookingRank):
    """See `LookingRank`."""

    def syncline_compare(self, directory: str, dumps: str, instance: str) -> dict[str, Any]:
        """Compare this rank's dump with the live tensors of an engine that was just started."""

        def task() -> dict[str, Any]:
            adapter = adapter_of(self, directory)
            dump = load_file(Path(dumps) / dump_name(instance, adapter.rank))
            report = compare(dump, adapter.live_tensors())
            return {"tensors": report.tensors, "diffs": [str(diff) for diff in report.diffs]}

        return plainly(task)


def main() -> None:
    """Answer, and end at once: vLLM's modules may hang at exit."""
    request: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    code = 0
    try:
        Events().tell("answered", **_answer(request))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    options = {
        "ranks": request["ranks"],
        "dtype": request["dtype"],
        "max_model_len": 64,  # nothing is generated
        "max_num_seqs": 1,
        "kv_cache_memory_bytes": 1 << 30,
        "enforce_eager": True,
    }
    directory = request["directory"]
    try:
        if "instance" in request:
            arguments = (directory, request["dumps"], request["instance"])
            return {"ranks": ask_ranks(directory, ComparingRank, "syncline_compare", arguments, **options)}
        found = explain(directory, local=request["local"], **options)
    except SynclineError as error:
        return {"error": to_wire(error)}
    return {
        "ranks": [
            {
                "tensors": {
                    name: {
                        "status": status.status.value,
                        "names": status.names,
                        "dtype": status.dtype,
                        "shape": status.shape,
                    }
                    for name, status in rank.tensors.items()
                },
                "own": dict(rank.own),
                "ways": dict(rank.ways),
                "unused": rank.unused,
            }
            for rank in found
        ]
    }


if __name__ == "__main__":
    main()
