"""What a scene does inside vLLM's workers; every function gets the worker."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from syncline.adapters import checkpoint
from syncline.adapters.vllm import twin as twins
from syncline.adapters.vllm.adapter import VLLMAdapter
from syncline.adapters.vllm.layers import as_computed, width, with_post_processing
from syncline.layout.probe import compare, probe_loader
from syncline.store.adapter import Status

if TYPE_CHECKING:
    from syncline.layout.written import LoaderTrace

COMPUTED = ".(as computed)"  # as the adapter marks a weight that no tensor shows
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
    """Return what was learned, and a check of it on twins in real memory."""
    adapter = adapter_of(worker)
    layout = adapter.layout
    status = adapter.live_status()
    kinds = [s.status for name, s in status.items() if not name.endswith(COMPUTED)]
    replayed = {name for replay in layout.trace.replays for name in replay.live}
    return {
        "rank": adapter.rank,
        "world": adapter.world,
        "ways": adapter.ways,
        "stages": len(adapter.stages),
        "arena": layout.plan.arena_nbytes,
        "bytes": sum(layout.plan.storage_nbytes),
        "tensors": len(kinds),
        "traced": len(layout.trace.writes.keys() - replayed),
        "replayed": len(replayed),
        "probed": probe(adapter, directory),
        "derived": kinds.count(Status.DERIVED),
        "local": kinds.count(Status.LOCAL),
        "checked": adapter.check_twin().tensors,
        "unused": list(layout.trace.unused),
        "status": {name: [str(s.status), list(s.names)] for name, s in status.items()},
    }


def probe(adapter: VLLMAdapter, directory: str) -> int:
    """Send coordinates through vLLM's own loader; return how many tensors land as the trace says."""
    load, state = adapter.real_twin()
    with twins.context(adapter._config, adapter._config.model_config.dtype):
        specs = checkpoint.from_directory(Path(directory))
        probed = probe_loader(state(), load, specs, state=state)
    trace: LoaderTrace = adapter.layout.trace
    compare(trace, probed)
    filled = trace.writes.keys() | {name for replay in trace.replays for name in replay.live}
    return len(filled & (probed.writes.keys() | probed.computed.keys()))


def digests(worker: Any) -> dict[str, str]:
    """Return a digest of every live tensor's bits, and of what a kernel computes with where it hides it.

    Says nothing that the adapter says: a worker without one answers in the same way.
    """
    model, config = worker.model_runner.get_model(), worker.vllm_config
    dtype = config.model_config.dtype
    found = {name: _digest(tensor) for name, tensor in twins.tensors(model).items()}
    with twins.context(config, dtype):
        for name, layer in with_post_processing(model):
            hidden = any(not tensor.numel() for tensor in layer.parameters(recurse=False))
            if hidden and width(layer) is not None:
                found[f"{name}.weight"] = _digest(as_computed(layer, dtype, worker.device))
    return found


def draft_digests(worker: Any) -> dict[str, str]:
    """Return a digest of every tensor of a worker's draft model."""
    return {n: _digest(t) for n, t in twins.tensors(worker.model_runner.get_draft_model()).items()}


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    told = f"{tuple(tensor.shape)} {tensor.dtype} ".encode()
    return hashlib.blake2b(told + flat.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


def pointers(worker: Any) -> dict[str, int]:
    """Return the address of every live tensor."""
    return {name: t.data_ptr() for name, t in twins.tensors(adapter_of(worker).model).items()}


def move(worker: Any) -> str:
    """Move a live parameter, as a careless extension might; return its name."""
    model = adapter_of(worker).model
    name, parameter = next((n, p) for n, p in model.named_parameters() if p.numel())
    parameter.data = parameter.data.clone()
    return name


def grow(worker: Any, *, back: bool = False) -> None:
    """Hang a parameter at the live model that no checkpoint knows, or take it away."""
    model = worker.model_runner.get_model()
    if back:
        del model.grown
    else:
        model.register_parameter("grown", torch.nn.Parameter(torch.ones(3), requires_grad=False))
