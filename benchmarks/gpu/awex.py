"""Awex's own planner, operation builders and batched NCCL messages, for the experts of Qwen3-30B-A3B.

The package is used if it can be imported; its transfer modules alone are, for the rest of it wants engines.
One process holds whole matrices, as a trainer does; the other receives one half of each, as a rank of two.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import statistics
import sys
import time
import types
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.gpu.qwen import EXPERTS, HIDDEN, INNER, expert_name

ROUNDS = 5


def found() -> bool:
    """Whether the package is here."""
    return _place() is not None


def _place() -> str | None:
    finder = importlib.machinery.PathFinder.find_spec("awex", sys.path)
    places = list(finder.submodule_search_locations or ()) if finder is not None else []
    return places[0] if places else None


def _package() -> None:
    """Make the package importable without running what its own first module imports."""
    place = _place()
    if place is None:
        raise ImportError("awex is not installed")
    made = types.ModuleType("awex")
    made.__path__ = [place]
    sys.modules["awex"] = made
    logging.disable(logging.CRITICAL)


def _shapes(layers: int, *, half: bool) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return by name the whole shape, and what one process holds of it."""
    out = {}
    for layer in range(layers):
        for expert in range(EXPERTS):
            for key in ("gate", "up", "down"):
                whole = (HIDDEN, INNER) if key == "down" else (INNER, HIDDEN)
                own = list(whole)
                if half:
                    own[1 if key == "down" else 0] //= 2
                out[expert_name(layer, expert, key)] = whole, tuple(own)
    return out


def _described(layers: int, *, half: bool) -> list[Any]:
    """Return Awex's description of what one process holds."""
    from awex.meta.weight_meta import (  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
        ParameterMeta,
        ParameterReplicaMeta,
        ParameterShardMeta,
    )
    from awex.sharding.param_sharding import (  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
        ShardingType,
    )

    dtype = torch.bfloat16
    ranks = dict.fromkeys(("tp_rank", "attn_tp_rank", "pp_rank", "ep_rank", "ep_tp_rank", "global_rank"), 0)
    out = []
    for name, (whole, own) in _shapes(layers, half=half).items():
        shard = ParameterShardMeta(
            **ranks,
            world_size=1,
            engine_rank=0,
            name=name,
            shape=own,
            numel=own[0] * own[1],
            dtype=dtype,
            global_offset=(0, 0),
            sharding_type=ShardingType.NO_SHARDING,
            num_shards=1,
            sharding_dim=0,
        )
        replicas = [ParameterReplicaMeta(shards=[shard])]
        numel = whole[0] * whole[1]
        out.append(
            ParameterMeta(
                name=name,
                global_numel=numel,
                global_shape=whole,
                dtype=dtype,
                shards=[shard],
                replicas=replicas,
            )
        )
    return out


def _idle(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


def _run(rank: int, port: int, layers: int, out: str, kind: str) -> None:
    _package()
    from awex.transfer.nccl_comm import (  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
        batch_send_recv,
        nccl_build_recv_ops,
        nccl_build_send_ops,
    )
    from awex.transfer.transfer_plan import (  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
        TransferPlanBuilder,
    )

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", rank=rank, world_size=2)
    builder = TransferPlanBuilder(infer_world_size=1, train_world_size=1, num_infer_engines=1)
    plan = builder.build_local_transfer_plan(
        _described(layers, half=True), _described(layers, half=False), rank
    )
    reads = rank == 0
    held = {
        name: torch.randn(own, device=kind).to(torch.bfloat16)
        for name, (_, own) in _shapes(layers, half=reads).items()
    }
    took = []
    for _ in range(ROUNDS):
        dist.barrier()
        _idle(kind)
        began = time.perf_counter()
        if reads:
            operations, pairs, *_ = nccl_build_recv_ops(held, plan, dist.group.WORLD)
            batch_send_recv(None, operations)
            for target, received in pairs:
                target.copy_(received)
        else:
            operations, *_ = nccl_build_send_ops(held, plan, dist.group.WORLD, None)
            batch_send_recv(operations, None)
        _idle(kind)
        dist.barrier()
        _idle(kind)
        took.append(time.perf_counter() - began)
    if reads:
        nbytes = sum(t.nbytes for t in held.values())
        with open(out, "w", encoding="ascii") as file:  # noqa: PTH123
            file.write(f"{nbytes / statistics.median(took[1:]) / 1e9}")
    dist.destroy_process_group()


def measure(layers: int, out: str, port: int, kind: str = "cuda") -> float:
    """Return GB/s of Awex's path between two processes with a GPU each."""
    mp.spawn(_run, (port, layers, out, kind), 2)
    with open(out, encoding="ascii") as file:  # noqa: PTH123
        return float(file.read())
