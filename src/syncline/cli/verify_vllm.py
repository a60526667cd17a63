"""What ``syncline verify`` asks of a vLLM worker about a dump."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from syncline.adapters.vllm.explain import LookingRank, adapter_of, plainly
from syncline.cli.demo.work import dump_name
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
