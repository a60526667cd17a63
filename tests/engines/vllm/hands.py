"""What a scene does inside vLLM's workers; every function gets the worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from syncline.adapters import checkpoint
from syncline.adapters.vllm import twin as twins
from syncline.adapters.vllm.adapter import VLLMAdapter
from syncline.verify.twin import twin_check

POISON = 0.37  # no weight of a tiny checkpoint; finite, since caches of keys and values outlive it


def adapter_of(worker: Any) -> VLLMAdapter:
    """Return the worker's adapter."""
    adapter = worker.weight_transfer_engine.adapter
    assert isinstance(adapter, VLLMAdapter)
    return adapter


@torch.no_grad()
def poison(worker: Any) -> list[str]:
    """Spoil everything that an update has to write, kernels' hidden copies too; return the names."""
    adapter = adapter_of(worker)
    live = twins.tensors(adapter.model)
    for name in adapter.layout.plan.direct:
        live[name].fill_(POISON)
    first = len(adapter.stages) - len(adapter.layout.plan.groups)
    for index in range(first, len(adapter.stages)):
        adapter.begin_stage(index)
        for group in adapter.layout.plan.groups[index - first]:
            for slot in (*group.live.values(), *group.inputs.values()):
                slot.tensor(adapter._arena).fill_(POISON)
        adapter.end_stage(index)
    adapter._derive()
    return sorted(name for name, s in adapter.live_status().items() if s.status != "local")


def describe(worker: Any, directory: str) -> dict[str, Any]:
    """Return what was learned, and a check of it on a twin in real memory."""
    adapter = adapter_of(worker)
    layout = adapter.layout
    status = adapter.live_status()
    config = adapter._config
    twin: Any = twins.build(config, torch.device("cpu"))
    apart = {n: t for n, t in twins.tensors(twin).items() if n in layout.trace.live or n in layout.trace.ties}
    with twins.context(config, config.model_config.dtype):
        specs = checkpoint.from_directory(Path(directory))
        checked = twin_check(layout.trace, apart, twin.load_weights, specs)
    return {
        "rank": adapter.rank,
        "world": adapter.world,
        "ways": adapter.ways,
        "stages": len(adapter.stages),
        "arena": layout.plan.arena_nbytes,
        "bytes": sum(layout.plan.storage_nbytes),
        "traced": sum(map(len, layout.trace.writes.values())),
        "replayed": len(layout.trace.replays),
        "checked": checked.tensors,
        "unused": list(layout.trace.unused),
        "status": {name: [str(s.status), list(s.names)] for name, s in status.items()},
    }


def pointers(worker: Any) -> dict[str, int]:
    """Return the address of every live tensor."""
    return {name: t.data_ptr() for name, t in twins.tensors(adapter_of(worker).model).items()}


def move(worker: Any) -> str:
    """Move a live parameter, as a careless extension might; return its name."""
    model = adapter_of(worker).model
    name, parameter = next((n, p) for n, p in model.named_parameters() if p.numel())
    parameter.data = parameter.data.clone()
    return name
