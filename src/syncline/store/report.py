"""What an update and a publication tell their caller, and how a rank's figures cross the wire."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncline.protocol.ids import VersionKey
    from syncline.protocol.parts import Level


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One update of one instance, as its controller saw it.

    Attributes:
        key: the version that the instance now serves.
        instance: its name.
        level: the proof that was made before the commit; ``"none"`` if none was due, or nothing moved.
        changed: False if the instance held the version already and nothing moved.
        nbytes: bytes received by all ranks.
        tensors: checkpoint tensors installed, in whole or in part, by any rank.
        coverage: fraction of the planned bytes that arrived: 1.0, or there is no report.
        seconds: by phase: ``wait`` (for the version), ``pause`` (until the engine stood still), ``pull`` (of
            the slowest rank, proof included), ``commit``, ``apply`` (the engine's post-load), ``resume`` (its
            caches flushed), ``total``.
        paused: seconds between the engine's last forward pass before and its first one after.
        ranks: figures of each rank.
    """

    key: VersionKey
    instance: str
    level: Level
    changed: bool = True
    nbytes: int = 0
    tensors: int = 0
    coverage: float = 1.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    paused: float = 0.0
    ranks: tuple[Mapping[str, float | int | str], ...] = ()

    @property
    def gb_per_s(self) -> float:
        """Bytes of all ranks over the seconds of the slowest rank's pull, in 1e9 bytes per second."""
        pull = self.seconds.get("pull", 0.0)
        return self.nbytes / pull / 1e9 if pull else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; the key as ``"epoch.number"``."""
        return asdict(self) | {"key": str(self.key), "gb_per_s": self.gb_per_s}


class Stopwatch:
    """Seconds by phase: `lap` ends the phase that began with the lap before.

    Args:
        clock: a monotonic clock in seconds.
    """

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self._began = self._last = clock()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> float:
        """Add the time since the last lap to ``phase`` and return it."""
        now = self._clock()
        spent, self._last = now - self._last, now
        self.seconds[phase] = self.seconds.get(phase, 0.0) + spent
        return spent

    @property
    def total(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._began
