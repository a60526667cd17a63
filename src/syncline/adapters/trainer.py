"""What adapters of trainers have in common: where live tensors lie, their shared memory, mutations."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from syncline import faults
from syncline.adapters.modules import local_part
from syncline.adapters.placed import device_of
from syncline.adapters.sharing import SharedTensors
from syncline.memory.binding import Binding
from syncline.memory.cuda import DeviceSegments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch
    from numpy import int64
    from numpy.typing import NDArray

    from syncline.adapters.live import LiveTensors
    from syncline.adapters.modules import Tree
    from syncline.adapters.mutation import MutationHandle, MutationPoints
    from syncline.layout.manifest import Manifest


class LiveTrainer:
    """The part of a `syncline.store.adapter.TrainerAdapter` that knows no framework.

    A subclass sets the attributes below when it is made, and offers ``_tree``, ``_live``, ``aliases`` and
    ``manifest``.

    Attributes:
        rank: of this process among the trainers.
        world: number of trainer processes.
    """

    rank: int
    world: int
    _points: MutationPoints
    _tree: cached_property[Tree]
    _live: cached_property[LiveTensors]

    def __init__(self, quiesce: Callable[[], None] | None) -> None:
        self._quiesce = quiesce
        self._bound: tuple[NDArray[int64], Binding] | None = None
        self._generation = 0
        self._shared: SharedTensors | None = None

    @cached_property
    def device(self) -> torch.device:
        """Where the parameters lie: host memory, or one GPU.

        Looked up once: asking twenty thousand tensors costs more than all of `publish` may.
        """
        cells = self._tree.state
        parts = [local_part(cell.get()) for cell in cells.values()]
        return device_of(parts, tuple(cells), f"writer {self.rank}")

    @cached_property
    def segments(self) -> DeviceSegments:
        """The allocator segments of the GPU that the parameters lie on: handed out as they are."""
        return DeviceSegments(self.device.index)

    @property
    def manifest(self) -> Manifest:
        """What this process holds; made when it is first needed, from declared shapes."""
        return self._live.manifest

    def binding(self) -> Binding:
        """Return where the parameters lie now; the same object as long as none moved.

        Raises:
            AdapterError: a parameter changed its dtype, shape or strides, or is offloaded; named.
        """
        addresses = self._live.addresses()
        if self.device.type == "cuda":  # also where addresses stay while memory is released and resumed
            whole = self.manifest
            return self.segments.bind(whole.fingerprint, addresses, whole.storage_nbytes)
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

        Parameters on a GPU stay where they are: no copy, and no descriptors.

        Returns a read-only descriptor of each region of `binding`, by region id; they stay the adapter's.
        A second call moves nothing.

        Raises:
            MemoryBudgetError: not enough memory; nothing was touched.
            AdapterError: parameters on another kind of device, or on several.
        """
        self._live.addresses()  # refuses what is absent or changed
        if self.device.type == "cuda":
            return {}
        if self._shared is None:
            faults.point("adapters.share")
            self._shared = SharedTensors(self._tree, self._live.names)
            self._bound = None
        return self._shared.descriptors

    def quiesce(self) -> None:
        """Finish what would still change the parameters without a mutation point being called.

        What is still queued on a GPU is waited for by readers, not here.
        """
        faults.point("adapters.quiesce")
        if self._quiesce is not None:
            self._quiesce()

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
