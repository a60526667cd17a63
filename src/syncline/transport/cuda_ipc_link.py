"""The reader's end: a writer's segments of device memory, opened once, and the event of its writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncline.errors import TransportError
from syncline.memory import cuda_driver as driver
from syncline.memory.region import Kind
from syncline.transport.cuda_ipc_memory import Description, OpenedSegment
from syncline.transport.shm_link import ShmLink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from syncline.memory.region import Region
    from syncline.transport import frames
    from syncline.transport.base import Endpoint
    from syncline.transport.clock import Deadline
    from syncline.transport.loop import Loop
    from syncline.transport.shm_link import Key, OpenRegion


@dataclass(eq=False)
class _Group:
    """Regions always used together, held as one: a model has thousands, and an update has microseconds.

    An idle group keeps its regions open, until one of them is revoked.
    """

    keys: tuple[Key, ...]
    pointers: dict[int, int]
    users: int = 0
    ended: bool = False
    stops: list[Callable[[], None]] = field(default_factory=list)

    def end(self) -> None:
        """Tell the users that a region was revoked."""
        self.ended = True
        for stop in self.stops:
            stop()


class CudaLink(ShmLink):
    """As `ShmLink`, with device memory instead of mappings.

    Args:
        device: index of the device whose kernels will read.
    """

    def __init__(
        self, peer: Endpoint, path: str, hello: frames.Hello, loop: Loop, deadline: Deadline, device: int
    ) -> None:
        self._device = device
        self._events: dict[bytes, driver.Event] = {}
        self._groups: dict[int, _Group] = {}
        self._pointed: dict[int, _Group] = {}  # looked up, and not used yet
        super().__init__(peer, path, hello, loop, deadline)

    def hold(self, stream: int) -> None:
        """Let later work of a stream of this device wait for all writes that the peer recorded."""
        events = list(self._events.values())
        if events:
            with driver.current(self._device):
                for event in events:
                    event.hold(stream)

    def pointers(self, regions: Iterable[Key]) -> dict[int, int]:
        """Return region id -> address; see `ShmLink.pointers`."""
        with self._changed:
            group = self._groups.get(id(regions)) or self._pointed.get(id(regions))
            if group is None or group.ended:
                keys = regions if isinstance(regions, tuple) else tuple(regions)
                group = self._pointed[id(keys)] = _Group(keys, super().pointers(keys))
            return group.pointers

    def acquire(self, regions: Iterable[Key], stop: Callable[[], None]) -> None:
        """Keep regions open until `release`; the same tuple, given again, costs no look at each of them."""
        with self._changed:
            group = self._groups.get(id(regions))
            if group is None or group.ended:
                group = self._grouped(regions if isinstance(regions, tuple) else tuple(regions))
            group.users += 1
            group.stops.append(stop)

    def release(self, regions: Iterable[Key], stop: Callable[[], None]) -> bool:
        """Undo `acquire`; return whether a region was revoked meanwhile."""
        with self._changed:
            group = self._groups[id(regions)]
            group.users -= 1
            group.stops.remove(stop)
            torn = group.ended
            self._dissolve_ended()
            return torn

    def close(self) -> None:
        """Close everything and hang up; what a transfer still uses is closed when it ends."""
        super().close()
        events, self._events = self._events, {}
        if events:
            with driver.current(self._device):
                for event in events.values():
                    event.close()

    def _grouped(self, keys: tuple[Key, ...]) -> _Group:
        for idle in [g for g in self._groups.values() if not g.users]:  # of earlier bindings
            self._dissolve(idle)
        group = self._pointed.get(id(keys)) or _Group(keys, super().pointers(keys))
        self._pointed.clear()
        super().acquire(keys, group.end)
        self._groups[id(keys)] = group
        return group

    def _dissolve(self, group: _Group) -> None:
        del self._groups[id(group.keys)]
        super().release(group.keys, group.end)

    def _dissolve_ended(self) -> None:
        for group in [g for g in self._groups.values() if g.ended and not g.users]:
            self._dissolve(group)

    def _end(self, key: Key) -> None:
        super()._end(key)
        self._pointed.clear()
        self._dissolve_ended()

    def _open(self, descriptor: int, described: Region) -> OpenRegion:
        if described.kind is not Kind.CUDA:
            raise TransportError(
                "a peer handed out memory that is not its device's", expected=Kind.CUDA, found=described
            )
        description = Description.from_descriptor(descriptor)
        if description.nbytes != described.nbytes:
            raise TransportError(
                "a segment that lies about its size", expected=described.nbytes, found=description.nbytes
            )
        opened = OpenedSegment(description, self._device)
        if description.event and description.event not in self._events:
            with driver.current(self._device):
                self._events[description.event] = self._event(description)
        return opened

    def _event(self, description: Description) -> driver.Event:
        """Open the peer's event; within one process it cannot be opened, and its owner lends it."""
        own = _lent.get(description.event)
        return own if own is not None else driver.Event(description.event)


_lent: dict[bytes, driver.Event] = {}


class LentEvent(driver.Event):
    """An event of this process, found by links within the same process as well."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.handle()
        _lent[self.bytes] = self

    def retire(self) -> None:
        """Give it back for good."""
        if _lent.pop(self.bytes, None) is not None:
            super().close()

    def close(self) -> None:
        """Do nothing: links close what they opened, and this is not theirs."""
