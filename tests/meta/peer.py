"""What the tests run in processes of their own: each says something when it is there, and waits."""

from __future__ import annotations

import os
import socket
import sys
import time

from syncline import faults
from syncline.cli.serve import serve
from syncline.layout import Manifest
from syncline.meta import JobDir, MetaClient, MetaServer
from tests.meta.jobs import QUICK, reader, writer


def run(pipe, environment, name, args):
    for key in [key for key in os.environ if key.startswith("SYNCLINE_")]:
        del os.environ[key]
    os.environ.update(environment)
    faults._armed.update(faults._from_environment())
    PEERS[name](pipe, *args)


def server(pipe, job, recovery=30.0, port=0):
    with MetaServer(job, options=QUICK, recovery=recovery, port=port) as one:
        pipe.send((one.endpoint, one.boot))
        pipe.recv()


def sockets(pipe, job):
    hold = JobDir.create(job).hold_sockets()
    listener = socket.socket(socket.AF_UNIX)
    os.chdir(hold.path("x").parent)
    listener.bind(hold.path("data").name)
    listener.listen()
    pipe.send(hold.stem)
    pipe.recv()


def member(pipe, job, kind, rank, world, instance=""):
    client = MetaClient(job, QUICK)
    message = writer(rank, world) if kind == "writer" else reader(instance, rank, world)
    pipe.send(client.register(message).fence.member)
    pipe.recv()
    client.close()


def fork(pipe, job):
    """Leave a forked child behind that must not keep the parent's lock alive."""
    lock = JobDir.create(job).claim_server()
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    pipe.send((child, str(lock.path)))
    pipe.recv()


def parse(pipe, blob):
    """Read a trainer's metadata, and say which training libraries that took."""
    manifest = Manifest.decode(blob)
    heavy = [name for name in ("torch", "numba", "transformers", "megatron") if name in sys.modules]
    pipe.send((len(manifest.names), heavy))


def serve_command(pipe, job):
    pipe.send("started")
    serve(job, json=True)


PEERS = {one.__name__: one for one in (server, sockets, member, fork, parse, serve_command)}
