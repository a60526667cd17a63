"""What the other processes of the cross-process tests do; both sides make the same world."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from syncline import faults
from syncline.kernels import host
from syncline.memory.binding import Binding
from syncline.protocol.ids import Fence
from syncline.transport.base import Endpoint, Limits, Remote, Rights, Side, Staging, Ticket
from syncline.transport.gloo import GlooTransport
from syncline.transport.host import endpoint
from syncline.transport.shm import ShmTransport
from tests.transport.world import World

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

JOB = "processes"
FENCE = Fence(JOB, 1, 1, 3, 1)
STAGING = Staging(bucket=1 << 20, inflight=2)


def stamped(rows: int = 1024) -> World:
    """One writer, one reader, one tensor of ``rows`` times 32 KiB."""
    model = {"w": torch.arange(rows * 4096, dtype=torch.int64).reshape(rows, 4096)}
    dtypes = {"w": "int64"}
    return World.build(np.random.default_rng(1), model, dtypes, dtypes, 1, 1, how="cut")


def store_at(directory: str):
    """Return what `GlooTransport` wants: a store for each name, here a file."""

    def meet(name: str) -> dist.Store:
        store = dist.FileStore(str(Path(directory) / name.replace("/", "-")), 2)
        store.set_timeout(timedelta(seconds=20))
        return store

    return meet


def die_at(step: str, call: int) -> None:
    """Arm a fault that kills this process, without warning, at the given call of a step."""
    calls = []

    def count() -> None:
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)

    faults._armed[step] = count


def shm_writer(pipe: Connection, socket: str) -> None:
    """Serve a world's memory; tell where; then do as told: fork a child, or stay."""
    torch.set_num_threads(1)
    world = stamped()
    memory = world.writers[0]
    transport = ShmTransport(JOB, Path(socket))
    ticket = transport.export(transport.register(memory.region, memory.fd), Rights.READ, FENCE)
    end = endpoint(JOB, "writer 0", transport.process_id, [transport])
    pipe.send((end.to_text(), ticket.encode(), memory.binding.to_wire()))
    while True:
        order = pipe.recv()
        if order == "fork":
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # never outlives the test by much
                signal.pause()
            pipe.send(child)
        elif order == "revoke":
            found = transport.revoke(ticket, 5.0)
            pipe.send(found.drained)
        else:
            transport.close(5.0)
            world.close()
            return


def shm_reader(pipe: Connection, end: str, ticket: bytes, binding: bytes, death: str) -> None:
    """Pull once and report; or die at a step of it."""
    torch.set_num_threads(1)
    host.load()
    if death:
        die_at(death, 2)
    transport = ShmTransport(JOB)
    world = stamped()
    link = transport.link(Endpoint.from_text(end), [Ticket.decode(ticket)], 10.0)
    program = transport.compile(world.plan, world.plan.reader("serve", 0), Side.DESTINATION)
    program.rebind(world.readers[0].binding, {0: Remote(link, Binding.from_wire(binding))})
    pipe.send("linked")
    pipe.recv()
    running = transport.start(program, FENCE, Limits(deadline=20.0))
    running.wait(20.0)
    world.check_reader(0)
    pipe.send("pulled")
    pipe.recv()
    transport.close(5.0)
    world.close()


def gloo_half(pipe: Connection, directory: str, side: str, ids: tuple[str, str], death: str) -> None:
    """Run one half over gloo and report how it ended; or die at a step of it."""
    torch.set_num_threads(1)
    host.load()
    if death:
        die_at(death, 3)
    world = stamped()
    transport = GlooTransport(JOB, store_at(directory), process_id=ids[0])
    peer = Endpoint(job=JOB, id=ids[1], name="the other", host="h", uid=os.geteuid(), addresses={"gloo": ""})
    ticket = Ticket("gloo", 0, 0, 0, int(Rights.READ), FENCE)
    link = transport.link(peer, [ticket], 20.0)
    remote = {0: Remote(link)}
    if side == "source":
        program = transport.compile(world.plan, world.plan.writer(0, "serve"), Side.SOURCE, STAGING)
        program.rebind(world.writers[0].binding, remote)
    else:
        program = transport.compile(world.plan, world.plan.reader("serve", 0), Side.DESTINATION, STAGING)
        program.rebind(world.readers[0].binding, remote)
    pipe.send("linked")
    running = transport.start(program, FENCE, Limits(deadline=20.0), digest=True)
    running.wait(20.0)
    assert running.digests is not None
    pipe.send(running.digests.tolist())
    pipe.recv()
    transport.close(5.0)
    world.close()
