"""The process of ``syncline verify`` that holds an engine: explains live tensors, or compares dumps to it.

python -m syncline.cli.verify_live REQUEST

REQUEST is JSON; the answer is one event, see `syncline.cli.demo.wire`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from syncline.cli.demo.wire import Events
from syncline.errors import SynclineError, to_wire

if TYPE_CHECKING:
    from syncline.adapters.explained import Explained

_VLLM: dict[str, Any] = {  # nothing is generated
    "max_model_len": 64,
    "max_num_seqs": 1,
    "kv_cache_memory_bytes": 1 << 30,
    "enforce_eager": True,
}
_SGLANG: dict[str, Any] = {"max_total_tokens": 1024, "mem_fraction_static": 0.5, "log_level": "error"}


def main() -> None:
    """Answer, and end at once: engines' modules may hang at exit."""
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
    try:
        if "instance" in request:
            return {"ranks": _compare(request)}
        return {"ranks": [rank.plain() for rank in _explain(request)]}
    except SynclineError as error:
        return {"error": to_wire(error)}


def _compare(request: dict[str, Any]) -> list[dict[str, Any]]:
    from syncline.adapters.vllm.explain import ask_ranks  # noqa: PLC0415 (only where vLLM is)
    from syncline.cli.verify_vllm import ComparingRank  # noqa: PLC0415

    directory = request["directory"]
    arguments = (directory, request["dumps"], request["instance"])
    options = {"ranks": request["ranks"], "dtype": request["dtype"], **_VLLM}
    return ask_ranks(directory, ComparingRank, "syncline_compare", arguments, **options)


def _explain(request: dict[str, Any]) -> list[Explained]:
    directory = Path(request["directory"])
    options = {"ranks": request["ranks"], "dtype": request["dtype"], "local": request["local"]}
    if request["engine"] == "sglang":
        from syncline.adapters.sglang import explain as of_sglang  # noqa: PLC0415 (only where SGLang is)

        return of_sglang.explain(directory, **options, **_SGLANG)
    from syncline.adapters.vllm import explain as of_vllm  # noqa: PLC0415 (only where vLLM is)

    return of_vllm.explain(directory, **options, **_VLLM)


if __name__ == "__main__":
    main()
