"""Tiny Megatron models of several families, cut in any way, and one optimizer step on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.engines import checkpoints
from tests.megatron import context, grouped


@dataclass(frozen=True)
class Cut:
    """How a model is cut over processes."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int = 1
    cp: int = 1
    vpp: int | None = None

    @property
    def world(self) -> int:
        # expert parallelism lies across data, context and tensor parallelism
        dense = self.tp * self.pp * self.dp * self.cp
        experts = self.ep * (self.etp or self.tp) * self.pp
        return max(dense, experts)


@dataclass
class Model:
    """A Megatron model of this process."""

    chunks: list[Any]
    optimizer: Any
    config: Any
    bridge: Any
    provider: Any
    rest: dict[str, Any] = field(default_factory=dict)


def hf_config(family: str, **changes: Any) -> Any:
    """Return a Transformers configuration."""
    import transformers  # noqa: PLC0415 (only where it is installed)

    name, arguments = checkpoints.FAMILIES[family]
    made = getattr(transformers, name)(**{**arguments, **changes})
    made.architectures = [name.removesuffix("Config") + "ForCausalLM"]
    return made


def groups(cut: Cut) -> None:
    """Initialise Megatron's process groups."""
    from megatron.core import parallel_state  # noqa: PLC0415 (only where it is installed)

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=cut.tp,
        pipeline_model_parallel_size=cut.pp,
        virtual_pipeline_model_parallel_size=cut.vpp,
        context_parallel_size=cut.cp,
        expert_model_parallel_size=cut.ep,
        expert_tensor_parallel_size=cut.etp,
        create_gloo_process_groups=True,
    )


def _spec(config: Any, vp_stage: int | None = None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: PLC0415 (only where it is installed)

    return get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )


def build(family: str, cut: Cut, *, dtype: str = "float32", megatron: Any = None, **changes: Any) -> Model:
    """Build this process's chunks, random but the same under every cut of replicas."""
    from megatron.bridge import AutoBridge  # noqa: PLC0415 (only where it is installed)
    from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: PLC0415 (only where it is installed)

    if cut.cp > 1:
        context.install()
    if (megatron or {}).get("moe_grouped_gemm"):
        grouped.install()
    config = hf_config(family, **changes)
    bridge = AutoBridge.from_hf_config(config)
    provider = bridge.to_megatron_provider(load_weights=False)
    kind = getattr(torch, dtype)
    settings = {
        "tensor_model_parallel_size": cut.tp,
        "pipeline_model_parallel_size": cut.pp,
        "virtual_pipeline_model_parallel_size": cut.vpp,
        "context_parallel_size": cut.cp,
        "expert_model_parallel_size": cut.ep,
        "expert_tensor_parallel_size": cut.etp or cut.tp,
        "use_cpu_initialization": True,
        "params_dtype": kind,
        "pipeline_dtype": kind,
        "autocast_dtype": kind,
        "bf16": kind is torch.bfloat16,
        "fp16": False,
        "transformer_layer_spec": partial(_spec),
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "cross_entropy_loss_fusion": False,
        "cross_entropy_fusion_impl": "native",
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "moe_shared_expert_overlap": False,
        "moe_router_load_balancing_type": "none",
        "moe_router_fusion": False,
        "seq_length": 64,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **(megatron or {}),
    }
    for key, value in settings.items():
        setattr(provider, key, value)
    if hasattr(provider, "finalize"):
        provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    torch.manual_seed(7)
    stages = [None] if cut.vpp is None else range(cut.vpp)
    chunks = [provider.provide(vp_stage=stage) for stage in stages]
    for chunk in chunks:
        chunk.to(kind)
    return Model(chunks, None, config, bridge, provider)


def scramble(model: Model) -> None:
    """Make every parameter and persistent buffer random: replicas alike, everything else different."""
    from megatron.core import parallel_state as ps  # noqa: PLC0415 (only where it is installed)

    for stage, chunk in enumerate(model.chunks):
        for own, tensor in [*chunk.named_parameters(), *buffers(chunk)]:
            name, stage_of, pp = own, stage, ps.get_pipeline_model_parallel_rank()
            if getattr(tensor, "shared_embedding", False):
                name, stage_of, pp = "shared embedding", 0, 0
            cut = getattr(tensor, "tensor_model_parallel", False)
            expert = getattr(tensor, "allreduce", True) is False
            tp = ps.get_expert_tensor_parallel_rank() if expert else ps.get_tensor_model_parallel_rank()
            ep = ps.get_expert_model_parallel_rank() if expert else 0
            seed = hash((name, stage_of, pp, tp if cut else 0, ep)) % (1 << 31)
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                fan = tensor.shape[-1] ** 0.5 if tensor.ndim > 1 else 4.0
                tensor.copy_((noise / fan + (tensor.ndim == 1)).to(tensor.dtype))


def buffers(chunk: Any) -> list[tuple[str, torch.Tensor]]:
    kept = chunk.state_dict()
    return [(n, b) for n, b in chunk.named_buffers() if n in kept]


def wrap(model: Model) -> None:
    """Wrap the chunks for data parallelism, with a distributed optimizer and every overlap that there is."""
    from megatron.core.distributed import (  # noqa: PLC0415 (only where it is installed)
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: PLC0415 (only where it is installed)

    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        overlap_grad_reduce=True,
        bucket_size=100_000,
        grad_reduce_in_fp32=True,
    )
    model.chunks = [DistributedDataParallel(model.provider, config, chunk) for chunk in model.chunks]
    model.provider.no_sync_func = model.chunks[0].no_sync
    model.provider.grad_sync_func = model.chunks[0].start_grad_sync
    model.provider.finalize_model_grads_func = finalize_model_grads
    model.optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
            clip_grad=0.0,
        ),
        model.chunks,
    )


def main_parameters_agree(model: Model, optimizer: Any) -> int:
    """Return how many of this rank's main parameters are, rounded, what the live parameters hold.

    Raises:
        AssertionError: one is not.
    """
    count = 0
    for one in getattr(optimizer, "chained_optimizers", []):
        groups = zip(one.model_float16_groups, one.shard_fp32_from_float16_groups, strict=True)
        for parameters, mains in groups:
            for parameter, main in zip(parameters, mains, strict=True):
                if main is None:
                    continue
                where = one._get_model_param_range_map(parameter)["param"]
                mine = parameter.detach().view(-1)[where.start : where.end]
                assert torch.equal(mine, main.to(mine.dtype)), "a live parameter is not its main parameter"
                count += 1
    return count


def batch(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, positions and a causal mask."""
    tokens = torch.randint(3, vocabulary, (2, 16), generator=torch.Generator().manual_seed(3))
    places = torch.arange(16)[None].expand(2, -1)
    mask = ~torch.tril(torch.ones(1, 1, 16, 16, dtype=torch.bool))
    return tokens, places, mask


def step(model: Model, cut: Cut, optimizer: Any) -> float:
    """Take one real step: forward and backward through Megatron's own schedule; return this rank's loss."""
    from megatron.core import parallel_state  # noqa: PLC0415 (only where it is installed)
    from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: PLC0415 (only where it is installed)

    tokens, places, mask = batch(model.config.vocab_size)
    if cut.cp > 1:
        mine = context.places(tokens.shape[1], cut.cp, parallel_state.get_context_parallel_rank())
        tokens, places = tokens[:, mine], places[:, mine]

    def forward(_data: Any, chunk: Any) -> Any:
        return chunk(tokens, places, mask, labels=tokens), lambda out: (
            out.mean(),
            {"loss": float(out.mean())},
        )

    optimizer.zero_grad()
    for chunk in model.chunks:
        # Experts under TP train with sequence parallelism only, which the local norms lack; without dropout
        # nothing but the check of that tells the two modes apart.
        chunk.train(cut.tp == 1 or not model.provider.num_moe_experts)
        if hasattr(chunk, "zero_grad_buffer"):
            chunk.zero_grad_buffer()
    told = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[None] * len(model.chunks) if cut.vpp else None,
        model=model.chunks if cut.vpp else model.chunks[0],
        num_microbatches=2 * cut.pp,
        seq_length=16,
        micro_batch_size=2,
        forward_only=False,
    )
    if cut.tp > 1 or dist.get_world_size() > 1:
        reduce_replicas(model)
    optimizer.step()
    return sum(one["loss"] for one in told) / max(len(told), 1)


def reduce_replicas(model: Model) -> None:
    """Average gradients of what is held alike by several ranks, as Megatron's wrappers would."""
    from megatron.core import parallel_state as ps  # noqa: PLC0415 (only where it is installed)

    for chunk in model.chunks:
        if hasattr(chunk, "ddp_config"):
            continue
        for _, parameter in chunk.named_parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            expert = getattr(parameter, "allreduce", True) is False
            tensor, data = (
                (ps.get_expert_tensor_parallel_group(), ps.get_expert_data_parallel_group())
                if expert
                else (
                    ps.get_tensor_model_parallel_group(),
                    ps.get_data_parallel_group(with_context_parallel=True),
                )
            )
            if not getattr(parameter, "tensor_model_parallel", False):
                dist.all_reduce(parameter.grad, group=tensor)
            dist.all_reduce(parameter.grad, group=data)
            if getattr(parameter, "shared_embedding", False) and ps.is_rank_in_embedding_group():
                dist.all_reduce(parameter.grad, group=ps.get_embedding_group())
