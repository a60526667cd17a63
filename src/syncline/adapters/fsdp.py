"""Trainers whose parameters are DTensors or plain tensors: FSDP2, tensor parallelism, both, or neither."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from syncline import faults
from syncline.adapters.live import LiveTensors
from syncline.adapters.modules import Tree, walk
from syncline.adapters.mutation import MutationPoints
from syncline.adapters.sharing import SharedTensors
from syncline.adapters.transformers_names import CheckpointNames, learn_names
from syncline.memory.binding import Binding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy import int64
    from numpy.typing import NDArray
    from torch import nn

    from syncline.adapters.mutation import MutationHandle
    from syncline.layout.manifest import Manifest


class FSDPTrainer:
    """One trainer process; satisfies `syncline.store.adapter.TrainerAdapter`.

    Parameters and persistent buffers are published under the names, and cut into the tensors, of the model's
    checkpoint; non-persistent buffers stay local. Every rank holds what its placements say.

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
        grouped = dist.is_initialized()
        self.model = model
        self.rank = rank if rank is not None else dist.get_rank() if grouped else 0
        self.world = world if world is not None else dist.get_world_size() if grouped else 1
        self._quiesce = quiesce
        listed = optimizers if isinstance(optimizers, list | tuple) else (optimizers,)
        self._points = MutationPoints(model, listed, self._parameters)
        self._bound: tuple[NDArray[int64], Binding] | None = None
        self._generation = 0
        self._shared: SharedTensors | None = None

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

    @cached_property
    def _on_accelerator(self) -> bool:
        # Looked up once: asking twenty thousand tensors costs more than all of `publish` may.
        return any(part.device.type not in {"cpu", "meta"} for part in self._live.parts())

    @property
    def manifest(self) -> Manifest:
        """What this process holds; made when it is first needed, from declared shapes."""
        return self._live.manifest

    @property
    def aliases(self) -> dict[str, str]:
        """Second names of tied tensors -> the name that the checkpoint carries."""
        return self.names.aliases

    def binding(self) -> Binding:
        """Return where the parameters lie now; the same object as long as none moved.

        Raises:
            AdapterError: a parameter changed its dtype, shape or strides, or is offloaded; named.
        """
        addresses = self._live.addresses()
        if self._bound is not None and addresses is self._bound[0]:
            return self._bound[1]
        if self._shared is not None:
            self._shared.bring_back()
            addresses = self._live.addresses()
        self._bound = addresses, self._bind(addresses)
        return self._bound[1]

    def _bind(self, addresses: NDArray[int64]) -> Binding:
        self._generation += 1
        fingerprint = self.manifest.fingerprint
        if self._shared is None:
            return Binding.private(fingerprint, addresses, self._generation)
        region, offset = self._shared.locate(addresses)
        return Binding(fingerprint, self._generation, region, offset, self._shared.regions)

    def share(self) -> dict[int, int]:
        """Move the published storages, in place, into shared memory; what leaves it later is brought back.

        Returns a read-only descriptor of each region of `binding`, by region id; they stay the adapter's.
        A second call moves nothing.

        Raises:
            MemoryBudgetError: not enough memory; nothing was touched.
            AdapterError: parameters that are not in host memory.
        """
        self._live.addresses()  # refuses what is absent or changed
        if self._shared is None:
            faults.point("adapters.share")
            self._shared = SharedTensors(self._tree, self._live.names)
            self._bound = None
        return self._shared.descriptors

    def quiesce(self) -> None:
        """Finish what would still change the parameters.

        FSDP2 itself leaves nothing open: a module that is still gathered (``reshard_after_forward=False``)
        computes with copies, and its sharded parameters, which optimizers update, are what is published.
        """
        faults.point("adapters.quiesce")
        if self._quiesce is not None:
            self._quiesce()
        if self._on_accelerator:
            torch.accelerator.synchronize()

    def on_mutation(self, before: Callable[[str], None]) -> MutationHandle:
        """Call ``before(reason)`` ahead of every optimizer step, load and announced mutation."""
        return self._points.listen(before)

    @contextmanager
    def mutation(self, reason: str) -> Iterator[None]:
        """Announce a change that no hook sees: swapping in averaged weights, an offload, a manual copy."""
        self._points.announce(reason)
        yield

    def _parameters(self) -> Iterable[object]:
        return (cell.get() for cell in self._tree.state.values())
