"""An SGLang engine that Megatron trainers of another environment update.

``python -m tests.megatron.into_sglang updated|fresh CASE`` (under `tests.engines.sglang.engine.environment`);
CASE as for `tests.megatron.into_vllm`, and ``version``, the directory of a fresh engine. Each part runs in a
process of its own, since SGLang ends all children of the process that it runs in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.engines.sglang.engine import answers, poison, start
from tests.megatron.waiting import wait

LIMITS = {"connect_timeout": 300.0, "update_timeout": 200.0, "stall": 60.0, "lease": 60.0}


def updated(case: dict[str, Any]) -> dict[str, Any]:
    """Poison, update and compare with the exported checkpoint, twice."""
    from syncline.adapters.sglang import SGLangInstance  # noqa: PLC0415
    from syncline.options import Options  # noqa: PLC0415

    old, *versions = case["versions"]
    engine = start(wait(old), case["tp"], dtype=case["dtype"])
    instance = SGLangInstance(engine, instance=case["instance"], job=case["job"], options=Options(**LIMITS))
    live = instance.live_status()
    spoiled = sorted({name for rank in live for name, one in rank.items() if one.status != "local"})
    seen: dict[str, Any] = {"old": answers(engine), "updated": []}
    for number, directory in enumerate(versions, 1):
        poison(engine, spoiled)
        report = instance.update(number)
        instance.dump(Path(case["dumps"]) / f"updated-{number}")
        told = answers(engine)
        instance.check_effective(Path(wait(directory)))
        seen["updated"].append({"key": str(report.key), "answers": told})
    instance.close()
    engine.shutdown()
    return seen


def fresh(case: dict[str, Any]) -> dict[str, Any]:
    """Start an engine from an exported checkpoint; its live tensors and its answers."""
    from syncline.adapters.sglang import commands  # noqa: PLC0415
    from syncline.adapters.sglang.doors import EngineDoor  # noqa: PLC0415

    engine = start(case["version"], case["tp"], dtype=case["dtype"])
    command = commands.Dump(str(Path(case["dumps"]) / f"fresh-{Path(case['version']).name[-1]}"))
    reply = commands.decode_reply(EngineDoor(engine).command(commands.encode(command), 60.0))
    if reply.error is not None:
        raise RuntimeError(reply.error)
    seen = {"answers": answers(engine)}
    engine.shutdown()
    return seen


def main() -> None:
    part, case = sys.argv[1], json.loads(sys.argv[2])
    seen = {"updated": updated, "fresh": fresh}[part](case)
    kept = Path(case["out"]).with_suffix(".tmp")
    kept.write_text(json.dumps(seen))
    kept.rename(case["out"])


if __name__ == "__main__":
    main()
