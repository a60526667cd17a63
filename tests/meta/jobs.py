"""Small jobs for the tests: writers and instances that speak the protocol, without any weights."""

from __future__ import annotations

from syncline.layout import Box, Manifest, Shard, View
from syncline.options import Options
from syncline.protocol import messages as m
from syncline.protocol.ids import VersionKey

QUICK = Options(connect_timeout=10.0, heartbeat=0.1, lease=1.0, stall=1.0, max_frame=4 << 20)
PLAN = b"p" * 16


def manifest(seed=0, tensors=1):
    """A manifest of ``tensors`` tensors, different for each seed."""
    shards = []
    for index in range(tensors):
        shape = (2 + seed, 3)
        view = View.simple(index, 0, shape, (3, 1))
        shards.append(Shard(f"layer.{index}.weight", shape, "float32", Box((0, 0), shape), view))
    return Manifest.from_shards(shards, [shards[0].box.numel * 4] * tensors)


FP = manifest().fingerprint


def writer(rank=0, world=1, **changes):
    fields = {"table": "t", "rank": rank, "world": world, "manifest_fp": FP, "host": "h"}
    return m.RegisterWriter(**fields | {"endpoint": "e", "process": ""} | changes)


def reader(instance="a", rank=0, world=1, **changes):
    fields = {"table": "t", "instance": instance, "rank": rank, "world": world}
    fp = FP if rank >= 0 else b""
    return m.RegisterReader(
        **fields | {"manifest_fp": fp, "host": "h", "endpoint": "e", "process": ""} | changes
    )


class Trainer:
    """Writer ranks, a client each."""

    def __init__(self, make_client, world=2):
        self.clients = [make_client() for _ in range(world)]
        self.fences = [
            client.register(writer(rank, world), manifest()).fence for rank, client in enumerate(self.clients)
        ]

    def put(self, number, **changes):
        fields = {"manifest_fp": FP, "binding_generation": 0, "source": "live", "binding_fp": b""} | changes
        for client, fence in zip(self.clients, self.fences, strict=True):
            put = client.request(m.Put(fence, "t", number, **fields))
            client.request(m.Digests(fence, "t", put.key, PLAN, b"d"))
        return put.key

    def settle(self):
        """Return when all ranks have met the present server, and refilled it if it is new."""
        for client, fence in zip(self.clients, self.fences, strict=True):
            client.request(m.Heartbeat(fence))

    def close_window(self, key, deadline=5.0):
        return [
            client.request(m.CloseWindow(fence, "t", key, deadline))
            for client, fence in zip(self.clients, self.fences, strict=True)
        ]


class Engine:
    """One instance: a controller and workers, a client each."""

    def __init__(self, make_client, name="a", world=1):
        self.name, self.world = name, world
        self.control, *self.workers = [make_client() for _ in range(world + 1)]
        self.fence = self.control.register(reader(name, -1, world)).fence
        self.worker_fences = [
            client.register(reader(name, rank, world), manifest()).fence
            for rank, client in enumerate(self.workers)
        ]
        self.nonce = 0

    def begin(self, number=None, mode="in_place", deadline=10.0):
        self.nonce += 1
        return m.BeginUpdate(self.fence, "t", number, mode, deadline, self.nonce)

    def verify(self, begun):
        for client, fence in zip(self.workers, self.worker_fences, strict=True):
            client.request(m.Verified(fence, "t", begun.key, begun.attempt, PLAN, 8, 8))

    def commit(self, begun):
        self.control.request(m.Commit(self.fence, "t", self.name, begun.committed, begun.key, begun.attempt))
        for client, fence in zip(self.workers, self.worker_fences, strict=True):
            client.request(m.Applied(fence, "t", begun.key))

    def update(self, number=None, **kwargs):
        begun = self.control.request(self.begin(number, **kwargs))
        self.verify(begun)
        self.commit(begun)
        return begun.key


def status(client):
    (table,) = client.request(m.StatusQuery("t")).tables
    return table


def instance_status(client, name="a"):
    (found,) = [one for one in status(client).instances if one.name == name]
    return found


def key(epoch, number):
    return VersionKey(epoch, number)
