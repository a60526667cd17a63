"""What the demo does inside each of vLLM's workers: vLLM adds these methods to its own worker class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.cli.demo import work

if TYPE_CHECKING:
    from syncline.adapters.vllm.adapter import VLLMAdapter


class DemoRank:
    """vLLM's ``worker_extension_cls``; ``self`` is a vLLM worker. Called in all workers at once."""

    weight_transfer_engine: Any

    def demo_memcpy(self, at: float) -> dict[str, Any]:
        """See `work.memcpy`."""
        return work.memcpy(sum(_adapter(self).layout.plan.storage_nbytes), at)

    def demo_report(self) -> dict[str, Any] | None:
        """Return the report of the last update; None but on rank 0."""
        report = self.weight_transfer_engine.report
        return None if report is None else report.as_dict()

    def demo_effective(self, checkpoint: str) -> dict[str, Any]:
        """See `work.effective`."""
        return work.effective(_adapter(self), Path(checkpoint))

    def demo_dump(self, directory: str, instance: str) -> None:
        """See `work.dump`."""
        adapter = _adapter(self)
        work.dump(adapter, Path(directory) / work.dump_name(instance, adapter.rank))


def _adapter(worker: DemoRank) -> VLLMAdapter:
    return worker.weight_transfer_engine.adapter
