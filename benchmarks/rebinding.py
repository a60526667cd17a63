"""What a changed binding costs: a program of many tensors, pointed at new addresses on both sides."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from syncline.layout import Box, Layout, Manifest, Shard, View
from syncline.memory.arena import Arena
from syncline.memory.binding import Binding
from syncline.plan import plan
from syncline.protocol.ids import Fence
from syncline.transport.base import Remote, Rights, Side
from syncline.transport.host import endpoint
from syncline.transport.shm import ShmTransport

JOB, SHAPE, NBYTES = "rebind", (64, 64), 64 * 64 * 2


def milliseconds(tensors: int = 20_000, rounds: int = 15) -> float:
    """Return the median of rebinding; nothing is moved, and no page of the arena is touched."""
    view = [View.simple(i, 0, SHAPE, (SHAPE[1], 1)) for i in range(tensors)]
    whole = Box((0, 0), SHAPE)
    manifest = Manifest.from_shards(
        [Shard(f"layers.{i}.weight", SHAPE, "bfloat16", whole, view[i]) for i in range(tensors)],
        [NBYTES] * tensors,
    )
    layout = Layout((manifest,), ("host",))
    made = plan(layout, {"serve": layout})
    fence = Fence(JOB, 1, 1, 1, 1)
    places = np.arange(tensors, dtype=np.int64) * NBYTES
    with tempfile.TemporaryDirectory(prefix="sl-") as directory, Arena(2 * NBYTES * tensors) as arena:
        writer, reader = ShmTransport(JOB, Path(directory) / "s"), ShmTransport(JOB)
        try:
            registration = writer.register(arena.region, arena.fd)
            ticket = writer.export(registration, Rights.READ, fence)
            link = reader.link(endpoint(JOB, "writer 0", writer.process_id, [writer]), [ticket], 10.0)
            program = reader.compile(made, made.reader("serve", 0), Side.DESTINATION)
            program.tables(digest=True)
            region = replace(arena.region, ptr=0)
            took = []
            for generation in range(1, rounds + 1):
                zero = np.zeros(tensors, np.int32)
                moved = NBYTES * (generation % 2)
                remote = Binding(manifest.fingerprint, generation, zero, places + moved, {0: region})
                local = Binding.private(manifest.fingerprint, arena.address + places + moved, generation)
                began = time.perf_counter()
                program.rebind(local, {0: Remote(link, remote)})
                took.append(time.perf_counter() - began)
        finally:
            reader.close(2.0)
            writer.close(2.0)
    return 1e3 * statistics.median(took)
