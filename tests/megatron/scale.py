"""One rank's share of a model of a trillion parameters, without memory: what learning it takes."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch.distributed as dist

from syncline.adapters.megatron import learn, state
from syncline.adapters.megatron.bridge import BridgeExport
from syncline.adapters.megatron.quiet import Group
from tests.megatron import models

STAGES, STAGE, EXPERT_RANKS, EXPERT_RANK = 8, 3, 32, 5
VOCABULARY = 163840
SHAPES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 1536,
}
WEIGHTLESS = {
    "init_model_with_meta_device": True,
    "use_cpu_initialization": False,
    "perform_initialization": False,
    "expert_tensor_parallel_size": 1,
}


def learned() -> dict[str, Any]:
    """Learn a weightless stage of 8 layers, 12 of 384 experts each, in groups that have no other ranks."""
    _alone()
    cut = models.Cut(pp=STAGES, ep=EXPERT_RANKS)
    model = models.build("deepseek_v3", cut, dtype="bfloat16", megatron=WEIGHTLESS, **SHAPES)
    tensors = state.live_tensors(state.walk_chunks(model.chunks), 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = time.process_time()
    found = learn.by_bridge(BridgeExport(model.bridge, model.chunks, tensors), tensors, VOCABULARY)
    seconds = time.process_time() - seconds
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    layers = {int(one.name.split(".")[2]) for one in found.held if one.name.startswith("model.layers.")}
    return {
        "seconds": seconds,
        "mib": grown,
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "elements": sum(one.box.numel for one in found.held),
        "layers": sorted(layers),
        "names": len(found.names),
    }


def _alone() -> None:
    """Put groups in place that know their sizes and this rank's place, and nobody else."""
    from megatron.core import parallel_state  # noqa: PLC0415 (only where it is installed)

    parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = Group(STAGES, STAGE, "pipeline")
    parallel_state._EXPERT_MODEL_PARALLEL_GROUP = Group(EXPERT_RANKS, EXPERT_RANK, "expert")
    given = dist.get_rank

    def rank(group: Any = None) -> int:
        return group.rank() if isinstance(group, Group) else given(group)

    dist.get_rank = rank
