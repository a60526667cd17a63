"""Trainers whose parameters are DTensors or plain tensors: FSDP2, tensor parallelism, both, or neither."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from syncline.adapters.live import LiveTensors
from syncline.adapters.modules import Tree, walk
from syncline.adapters.mutation import MutationPoints
from syncline.adapters.trainer import LiveTrainer
from syncline.adapters.transformers_names import CheckpointNames, learn_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class FSDPTrainer(LiveTrainer):
    """One trainer process; satisfies `syncline.store.adapter.TrainerAdapter`.

    Parameters and persistent buffers are published under the names, and cut into the tensors, of the model's
    checkpoint; non-persistent buffers stay local. Every rank holds what its placements say.

    FSDP2 itself leaves nothing open after a step: a module that is still gathered
    (``reshard_after_forward=False``) computes with copies; its sharded parameters, which optimizers update,
    are what is published.

    Args:
        model: wrapped (``fully_shard``, ``parallelize_module``, ``torch.compile``, activation checkpointing,
            DDP) or not; its parameters are sharded already.
        optimizers: one or several; their ``step`` closes the read window. Others that hold the same
            parameters are noticed too.
        rank: of this process among the trainers; the default group's if left out.
        world: number of trainer processes; the default group's if left out.
        quiesce: called before each version opens: finishes what the trainer refreshes lazily.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Any = (),
        *,
        rank: int | None = None,
        world: int | None = None,
        quiesce: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(quiesce)
        grouped = dist.is_initialized()
        self.model = model
        self.rank = rank if rank is not None else dist.get_rank() if grouped else 0
        self.world = world if world is not None else dist.get_world_size() if grouped else 1
        listed = optimizers if isinstance(optimizers, list | tuple) else (optimizers,)
        self._points = MutationPoints(model, listed, self._parameters)

    @cached_property
    def _tree(self) -> Tree:
        return walk(self.model)

    @cached_property
    def names(self) -> CheckpointNames:
        """The checkpoint form of the model, learned when it is first needed."""
        return learn_names(self.model, self._tree)

    @cached_property
    def _live(self) -> LiveTensors:
        return LiveTensors(self._tree, self.names, f"writer {self.rank}")

    @property
    def aliases(self) -> dict[str, str]:
        """Second names of tied tensors -> the name that the checkpoint carries."""
        return self.names.aliases
