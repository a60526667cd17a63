"""What an engine makes of a checkpoint, tensor by tensor, as its ranks tell it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncline.store.adapter import LiveStatus, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncline.layout.box import Box


@dataclass(frozen=True, slots=True)
class Explained:
    """One rank of an instance.

    Attributes:
        tensors: every live tensor as synced, derived or local.
        own: by name, how many elements of a synced tensor no checkpoint tensor fills, such as padding.
        ways: how many layers, or tensors, are put in which way.
        unused: checkpoint names that the engine's loader did not use.
    """

    tensors: Mapping[str, LiveStatus]
    own: Mapping[str, int]
    ways: Mapping[str, int]
    unused: tuple[str, ...]

    @classmethod
    def of(
        cls,
        status: Mapping[str, LiveStatus],
        holes: Mapping[str, Sequence[Box]],
        ways: Mapping[str, int],
        unused: Iterable[str],
    ) -> Explained:
        """Make it from what an adapter knows; ``holes``: by name, boxes that no checkpoint tensor fills."""
        own = {
            name: sum(box.numel for box in boxes)
            for name, boxes in holes.items()
            if name in status and status[name].status is Status.SYNCED
        }
        return cls(status, own, ways, tuple(unused))

    def plain(self) -> dict[str, Any]:
        """Return it as values that JSON has."""
        tensors = {
            name: {
                "status": found.status.value,
                "names": list(found.names),
                "dtype": found.dtype,
                "shape": list(found.shape),
            }
            for name, found in self.tensors.items()
        }
        return {
            "tensors": tensors,
            "own": dict(self.own),
            "ways": dict(self.ways),
            "unused": list(self.unused),
        }

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> Explained:
        """Undo `plain`."""
        tensors = {
            name: LiveStatus(
                Status(found["status"]), tuple(found["names"]), found["dtype"], tuple(found["shape"])
            )
            for name, found in fields["tensors"].items()
        }
        return cls(tensors, fields["own"], fields["ways"], tuple(fields["unused"]))
