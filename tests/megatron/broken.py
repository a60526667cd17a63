"""Everything that can be wrong with a Megatron trainer, done on purpose; each returns by raising."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from syncline.adapters.megatron import oracle
from syncline.adapters.megatron.quiet import Group

if TYPE_CHECKING:
    from tests.megatron.scene import Rank


def stages(rank: Rank) -> None:
    """Both pipeline stages say that they hold the first layers."""
    for chunk in rank.model.chunks:
        for number, layer in enumerate(chunk.decoder.layers, 1):
            layer.layer_number = number
    rank.trainer()


def experts(rank: Rank) -> None:
    """The second expert-parallel rank takes itself for the first."""
    for chunk in rank.model.chunks:
        chunk.pg_collection.ep = Group(2, 0, "expert")
    rank.trainer()


def nobody(rank: Rank) -> None:
    """The first expert-parallel rank keeps its second expert to itself."""
    mine = rank.model.chunks[0].pg_collection.ep.rank() == 0
    rank.trainer(local=["*.local_experts.1.*"] if mine else [])


def sizes(rank: Rank) -> None:
    """A number of groups that the shards' rows do not have."""
    for chunk in rank.model.chunks:
        chunk.config.num_query_groups = 3
    rank.trainer()


def talks(rank: Rank) -> None:
    """A mapping that asks its peers."""
    from megatron.bridge.models.conversion import param_mapping  # noqa: PLC0415 (only where it is installed)

    given = param_mapping.ReplicatedMapping.megatron_to_hf

    def asks(self: Any, weight: Any, module: Any) -> Any:
        dist.all_reduce(torch.zeros(1))
        return given(self, weight, module)

    param_mapping.ReplicatedMapping.megatron_to_hf = asks
    rank.trainer()


def swapped(rank: Rank) -> None:
    """A bridge whose export is not what it was when it was watched: gate and up change places."""
    from megatron.bridge.models.conversion import param_mapping  # noqa: PLC0415 (only where it is installed)

    trainer = rank.trainer()
    given = param_mapping.GatedMLPMapping.megatron_to_hf

    def other(self: Any, weight: Any, module: Any) -> Any:
        names, tensors = zip(*given(self, weight, module).items(), strict=True)
        return dict(zip(names, reversed(tensors), strict=True))

    param_mapping.GatedMLPMapping.megatron_to_hf = other
    oracle.check_values(trainer, oracle.bridge_export(trainer, rank.model.bridge))


def offloaded(rank: Rank) -> None:
    """A parameter that was offloaded to nothing."""
    parameter = next(rank.model.chunks[0].parameters())
    parameter.data = torch.empty(0)
    rank.trainer()


def offloaded_once(rank: Rank) -> None:
    """The same on one rank of two, where ranks tell each other what they hold."""
    if rank.number == 1:
        next(rank.model.chunks[0].parameters()).data = torch.empty(0)
    rank.trainer(bridge=None, exporter=dict)


def offloaded_later(rank: Rank) -> None:
    """The same between two versions."""
    trainer = rank.trainer()
    trainer.binding()
    parameter = next(rank.model.chunks[0].parameters())
    parameter.data = torch.empty(0)
    trainer.binding()


def unmapped(rank: Rank) -> None:
    """A parameter that no mapping knows, as another version of either library may bring."""
    rank.model.chunks[0].register_parameter("novelty", torch.nn.Parameter(torch.zeros(3)))
    rank.trainer()
