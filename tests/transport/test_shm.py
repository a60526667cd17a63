"""What is shared memory's own: few descriptors, large regions, and what the registry offers."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch

from syncline import extensions
from syncline.errors import TransportError
from syncline.layout import Box, Layout, Manifest, Shard, View
from syncline.memory.arena import Arena
from syncline.memory.binding import Binding
from syncline.plan import plan
from syncline.transport import registry
from syncline.transport.base import Endpoint, Limits, Remote, Rights, Side, Ticket
from syncline.transport.host import endpoint
from syncline.transport.shm import ShmTransport
from tests.transport.fabric import FENCE, JOB, Fabric
from tests.transport.world import World


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_do_not_grow_with_parameters() -> None:
    """5,000 parameters of all different shapes, with room for a few descriptors only."""
    names = [f"p{i}" for i in range(5000)]
    model = {n: torch.full((i % 71 + 1, i // 71 + 1), i, dtype=torch.int32) for i, n in enumerate(names)}
    dtypes = dict.fromkeys(names, "int32")
    world = World.build(np.random.default_rng(0), model, dtypes, dtypes, 1, 1, how="whole")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(descriptors() + 40, 256), hard))
    try:
        made = Fabric("shm", world)
        try:
            made.transfer()
            before = descriptors()
            for _ in range(50):
                made.transfer()
            assert descriptors() == before
            world.check_reader(0)
        finally:
            made.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_end_of_a_region_beyond_4_gib() -> None:
    """A sparse region of 5 GiB: its last 4 KiB arrive."""
    total, tail = 5 << 30, 4096
    arena = Arena(total, "test", 1)
    arena.storage(total - tail, tail).copy_(torch.arange(tail, dtype=torch.int64).to(torch.uint8))
    whole = Box.whole((total,))
    writer = Manifest.from_shards(
        [Shard("w", (total,), "uint8", whole, View.contiguous(0, 0, (total,)))], [total]
    )
    boxes = [Box((total - tail,), (tail,)), Box((0,), (total - tail,))]
    readers = [
        Manifest.from_shards([Shard("w", (total,), "uint8", b, View.contiguous(0, 0, b.size))], [b.numel])
        for b in boxes
    ]
    made = plan(Layout((writer,), ("h",)), {"r": Layout(tuple(readers), ("h", "h"))})
    target = torch.zeros(tail, dtype=torch.uint8)
    with tempfile.TemporaryDirectory(prefix="sl-") as directory:
        serving, reading = ShmTransport(JOB, Path(directory) / "s"), ShmTransport(JOB)
        registration = serving.register(arena.region, arena.fd)
        ticket = serving.export(registration, Rights.READ, FENCE)
        link = reading.link(endpoint(JOB, "w", serving.process_id, [serving]), [ticket], 5.0)
        program = reading.compile(made, made.reader("r", 0), Side.DESTINATION)
        zero = np.zeros(1, np.int64)
        source = Binding(writer.fingerprint, 0, np.ones(1, np.int32), zero, {1: arena.region})
        remote = {0: Remote(link, Binding.from_wire(source.to_wire()))}
        program.rebind(Binding.private(readers[0].fingerprint, [target.data_ptr()]), remote)
        reading.start(program, FENCE, Limits(deadline=20.0)).wait(20.0)
        reading.close(5.0)
        serving.close(5.0)
    arena.close()
    assert torch.equal(target, torch.arange(tail, dtype=torch.int64).to(torch.uint8))


def test_endpoints_and_tickets_cross_the_wire() -> None:
    end = Endpoint(job="j", id="1", name="writer 0", host="h", uid=3, addresses={"shm": "/x"})
    assert Endpoint.from_text(end.to_text()) == end
    ticket = Ticket("shm", 1, 2, 2**40, 1, FENCE, b"x")
    assert Ticket.decode(ticket.encode()) == ticket
    for broken in (b"", b"\xc0", ticket.encode()[:-3], b"x" * (1 << 17)):
        with pytest.raises(TransportError):
            Ticket.decode(broken)
    with pytest.raises(TransportError):
        Endpoint.from_text('{"job": 3}')


def test_a_closed_transport_does_nothing_more() -> None:
    world = World.random(2, writers=1, readers=1)
    made = Fabric("shm", world)
    made.close()
    with pytest.raises(TransportError, match="closed"):
        made.readers[0].start(made.programs[0], FENCE)
    with pytest.raises(TransportError, match="closed"):
        made.readers[0].link(made.writer_ends[0], [], 1.0)


class TestRegistry:
    def test_own_transports_are_imported_when_used(self) -> None:
        code = (
            "import sys, syncline.transport, syncline.transport.registry as r;"
            "assert r.names()[:4] == ['cuda_ipc', 'gloo', 'nccl', 'shm'];"
            "assert not any(n in sys.modules for n in ('torch', 'numba', 'syncline.transport.shm'))"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        assert registry.factory("shm") is ShmTransport

    def test_others_come_by_entry_point(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = EntryPoint("pigeon", "syncline.transport.shm:ShmTransport", registry.GROUP)
        broken = EntryPoint("broken", "syncline.transport.none:Nothing", registry.GROUP)
        monkeypatch.setattr(
            extensions, "entry_points", lambda group: [found, broken] if group == registry.GROUP else []
        )
        monkeypatch.setattr(extensions, "installed", extensions.Extensions())
        assert registry.names() == ["broken", "cuda_ipc", "gloo", "nccl", "pigeon", "shm"]
        made = registry.make("pigeon", job=JOB)
        assert isinstance(made, ShmTransport)
        made.close(1.0)
        with pytest.raises(TransportError, match="cannot be imported"):
            registry.factory("broken")
        with pytest.raises(TransportError, match="no such transport"):
            registry.factory("carrier")

    def test_a_name_is_given_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registry, "_added", {})
        registry.add("mine", ShmTransport)
        assert registry.factory("mine") is ShmTransport
        with pytest.raises(TransportError, match="exists"):
            registry.add("shm", ShmTransport)
