"""Who sends how many bytes to whom, what that asks of each GPU's ports, and what those give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.gpu import clock
from benchmarks.gpu.many_cases import INSTANCE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from benchmarks.gpu.many_cases import Case

    I64 = NDArray[np.int64]

_PROBE = 2 << 30
_ROUNDS = 5


@dataclass(frozen=True, eq=False)
class Traffic:
    """A plan's bytes.

    Attributes:
        case: of which.
        pairs: i64[writer ranks, reader ranks].
    """

    case: Case
    pairs: I64

    @classmethod
    def of(cls, case: Case) -> Traffic:
        """Return what the plan of a case moves."""
        made = case.plan()
        columns = [made.link_bytes(INSTANCE, rank) for rank in range(len(case.reader_gpus))]
        return cls(case, np.stack(columns, axis=1))

    @property
    def total(self) -> int:
        """Bytes in all."""
        return int(self.pairs.sum())

    @property
    def between(self) -> dict[tuple[int, int], int]:
        """Bytes of every ordered pair of GPUs that has a writer and a reader; 0 included."""
        found: dict[tuple[int, int], int] = {}
        for w, source in enumerate(self.case.writer_gpus):
            for r, target in enumerate(self.case.reader_gpus):
                found[source, target] = found.get((source, target), 0) + int(self.pairs[w, r])
        return found

    @property
    def links(self) -> dict[tuple[int, int], int]:
        """Bytes of every ordered pair of different GPUs; of each GPU with itself, if there is but one."""
        between = self.between
        return {ends: n for ends, n in between.items() if ends[0] != ends[1]} or between

    def ports(self, side: int) -> dict[int, int]:
        """Return by GPU the bytes that leave it (``side`` 0) or enter it (1), over links."""
        found: dict[int, int] = {}
        for ends, nbytes in self.links.items():
            found[ends[side]] = found.get(ends[side], 0) + nbytes
        return found

    def balance(self) -> dict[str, float]:
        """Return the busiest over the mean: of GPUs by what leaves and enters them, and of links."""
        lists = {"egress": self.ports(0), "ingress": self.ports(1), "link": self.links}
        return {f"{name}_balance": _uneven(list(found.values())) for name, found in lists.items()}

    def predicted(self, link_rate: float, local_rate: float) -> float:
        """Return the seconds that the busiest port needs at the rate of a single link, or a GPU by itself."""
        local = max((n for (a, b), n in self.between.items() if a == b), default=0)
        if len({gpu for ends in self.links for gpu in ends}) < 2:
            return local / local_rate
        port = max(max(self.ports(side).values()) for side in (0, 1))
        return max(port / link_rate, local / local_rate)


def _uneven(values: list[int]) -> float:
    mean = sum(values) / len(values)
    return max(values) / mean if mean else 1.0


def rates(count: int) -> dict[str, float]:
    """Measure, in a process by itself, bytes a second of one large copy within a GPU, and over a link.

    Args:
        count: GPUs that may be used; with one there is no link.
    """
    here = torch.empty(_PROBE, dtype=torch.uint8, device="cuda:0")
    other = torch.empty_like(here)
    found = {"local": _PROBE / clock.median(lambda: other.copy_(here), _ROUNDS)}
    if count > 1:
        del other
        clock.reachable()
        there = torch.empty(_PROBE, dtype=torch.uint8, device=f"cuda:{count - 1}")
        found["link"] = _PROBE / clock.median(lambda: there.copy_(here), _ROUNDS)
    return found


class Copies:
    """One large copy for every pair of GPUs, all at the same time: from one buffer of each source GPU."""

    def __init__(self, between: dict[tuple[int, int], int]) -> None:
        clock.reachable()
        self._between = {ends: n for ends, n in between.items() if n}
        most: dict[int, int] = {}
        for (source, _), nbytes in self._between.items():
            most[source] = max(most.get(source, 0), nbytes)
        src = {gpu: torch.empty(n, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu, n in most.items()}
        self._jobs = []
        for (source, target), nbytes in self._between.items():
            dst = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{target}")
            streams = [torch.cuda.Stream(gpu) for gpu in dict.fromkeys((source, target))]
            with torch.cuda.device(source):  # the copy runs on the source's stream
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._jobs.append(((source, target), src[source][:nbytes], dst, streams, events))

    def run(self) -> None:
        """Queue all copies."""
        for _, src, dst, streams, (began, ended) in self._jobs:
            with torch.cuda.stream(streams[-1]), torch.cuda.stream(streams[0]):
                began.record(streams[0])
                dst.copy_(src, non_blocking=True)
                ended.record(streams[0])

    def port_rates(self, side: int) -> dict[int, float]:
        """Return by GPU the bytes a second that left (0) or entered it (1) over links in the last run."""
        took: dict[int, float] = {}
        moved: dict[int, int] = {}
        for ends, src, _, _, (began, ended) in self._jobs:
            if ends[0] != ends[1]:
                gpu = ends[side]
                took[gpu] = max(took.get(gpu, 0.0), began.elapsed_time(ended) / 1e3)
                moved[gpu] = moved.get(gpu, 0) + src.nbytes
        return {gpu: moved[gpu] / took[gpu] for gpu in moved}


def bound(between: dict[tuple[int, int], int]) -> dict[str, Any]:
    """Measure, in a process by itself, the seconds of a pattern in one large copy a pair."""
    copies = Copies(between)
    seconds = clock.median(copies.run, _ROUNDS)
    return {"seconds": seconds, "egress": copies.port_rates(0), "ingress": copies.port_rates(1)}
