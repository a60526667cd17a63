"""What planning costs one rank, in a process that has only decoded the layouts.

Run by `benchmarks.plan`, which hands over a file of encoded layouts; prints JSON.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from benchmarks.process import MIB, OwnPeak
from syncline.layout import Layout, Manifest, Rules
from syncline.layout.mesh import MeshLayout
from syncline.plan import Plan, lower
from syncline.plan.bundles import Bundles

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncline.plan import Hops, Runs

ROUNDS = 5


class Side(msgspec.Struct):
    """One side's ranks: number of each rank's frame, and hosts; or one frame for all ranks of a mesh."""

    frame: list[int]
    hosts: list[str]
    mesh: bool = False


class Fleet(msgspec.Struct):
    """Encoded manifests, each once, and who has which."""

    frames: list[bytes]
    writer: Side
    readers: dict[str, Side]

    @classmethod
    def of(cls, writer: Layout | MeshLayout, readers: Mapping[str, Layout]) -> Fleet:
        """Encode both sides."""
        number: dict[bytes, int] = {}
        frames: list[bytes] = []

        def side(layout: Layout) -> Side:
            for m in layout.manifests:
                if m.fingerprint not in number:
                    number[m.fingerprint] = len(frames)
                    frames.append(m.encode())
            return Side([number[m.fingerprint] for m in layout.manifests], list(layout.hosts))

        listed = {name: side(layout) for name, layout in readers.items()}
        if isinstance(writer, MeshLayout):
            frames.append(writer.encode())
            return cls(frames, Side([len(frames) - 1], list(writer.hosts), mesh=True), listed)
        return cls(frames, side(writer), listed)

    def nbytes(self, side: Side) -> int:
        """Return the bytes of a side's distinct manifests."""
        return sum(len(self.frames[i]) for i in set(side.frame))

    def decode(self) -> tuple[Layout | MeshLayout, dict[str, Layout]]:
        """Return both sides as every rank decodes them."""
        plain = self.frames[:-1] if self.writer.mesh else self.frames
        manifests = [Manifest.decode(frame) for frame in plain]

        def layout(side: Side) -> Layout:
            return Layout(tuple(manifests[i] for i in side.frame), tuple(side.hosts))

        listed = {name: layout(side) for name, side in self.readers.items()}
        if self.writer.mesh:
            return MeshLayout.decode(self.frames[-1]), listed
        return layout(self.writer), listed


class Rank:
    """Plans for one reader rank of an instance, or (``instance`` None) for one trainer rank."""

    def __init__(
        self, writer: Layout | MeshLayout, readers: Mapping[str, Layout], instance: str | None, rank: int
    ) -> None:
        self._writer, self._readers = writer, readers
        self._instance, self._rank = instance, rank

    def plan(self) -> tuple[Hops | Bundles, Runs]:
        """Return the rank's rows and its program, from decoded columns; nothing kept from a plan before."""
        writer: Layout | MeshLayout = self._writer
        if isinstance(writer, Layout):
            writer = Layout(writer.manifests, writer.hosts)
        else:
            writer = MeshLayout(writer.whole, writer.mesh, writer.cut, writer.hosts)
        readers = {name: Layout(one.manifests, one.hosts) for name, one in self._readers.items()}
        made = Plan(writer, readers, Rules())
        name = self._instance
        if isinstance(writer, MeshLayout):
            some = made.sent_bundles(self._rank) if name is None else made.received_bundles(name, self._rank)
            return some, some.runs()
        hops = made.writer(self._rank) if name is None else made.reader(name, self._rank)
        return hops, lower(hops.size, [hops.source_stream(), hops.destination_stream()])

    def measure(self) -> dict[str, Any]:
        """Return seconds (median), growth of peak memory in MiB (of the first plan), copies and runs."""
        wall: list[float] = []
        used: list[float] = []
        peak = 0.0
        figures: dict[str, float] = {}
        for _ in range(ROUNDS):
            gc.collect()
            with OwnPeak() as memory:
                began, cpu = time.perf_counter(), time.process_time()
                hops, runs = self.plan()
                wall.append(time.perf_counter() - began)
                used.append(time.process_time() - cpu)
            peak = max(peak, memory.peak / MIB)
            times = hops.count if isinstance(hops, Bundles) else np.ones(len(hops), np.int64)
            nbytes, rows = int((hops.nbytes * times).sum()), int((runs.rows * times[runs.hop]).sum())
            figures = {
                "copies": int(times.sum()),
                "descriptors": len(runs),
                "run_bytes": nbytes / max(rows, 1),
            }
            del hops, runs
        return {
            "seconds": statistics.median(wall),
            "best_seconds": min(wall),
            "cpu_seconds": statistics.median(used),
            "mib": peak,
            **figures,
        }


def main(arguments: Sequence[str]) -> None:
    """Print the figures of one reader rank and one trainer rank."""
    fleet = msgspec.msgpack.decode(Path(arguments[0]).read_bytes(), type=Fleet)
    instance, reader, trainer = arguments[1], int(arguments[2]), int(arguments[3])
    began = time.perf_counter()
    writer, readers = fleet.decode()
    decoded = time.perf_counter() - began
    del fleet
    figures: dict[str, Any] = {"decode_seconds": decoded}
    figures["reader"] = Rank(writer, readers, instance, reader).measure()
    figures["trainer"] = Rank(writer, readers, None, trainer).measure()
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
