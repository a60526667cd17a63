"""What the control plane costs: ``python -m benchmarks.meta [--json]``.

A server in a process of its own, clients here, loopback, CURVE on. Printed: milliseconds from a new client to
its first answer; microseconds of a request and its answer (median, 99th percentile); microseconds until a
watcher hears of an event, counted from before the request that causes it; seconds to store, and MiB/s to
fetch, a large manifest; milliseconds until a client has found and refilled the server after a killed one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

from syncline.layout import Box, Manifest, Shard, View
from syncline.meta import MetaClient, MetaServer
from syncline.protocol import messages as m

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from syncline.protocol.ids import Fence

ECHOES, EVENTS, FETCHES, ROWS = 2000, 200, 20, 200_000


def serve(pipe: Connection) -> None:
    with MetaServer("bench"):
        pipe.send("ready")
        signal.pause()


def start() -> BaseProcess:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    pipe.recv()
    return process


def large_manifest(rows: int) -> Manifest:
    shards = []
    for index in range(rows):
        shape = (64 + index * 7919 % 4096, 64)
        view = View.simple(0, 64 * (index * 104_729 % 1_000_003), shape, (64, 1))
        name = f"model.layers.{index // 1000}.experts.{index % 1000}.weight"
        shards.append(Shard(name, shape, "bfloat16", Box((0, 0), shape), view))
    return Manifest.from_shards(shards, [1 << 40])


def writer(manifest_fp: bytes) -> m.RegisterWriter:
    return m.RegisterWriter("t", 0, 1, manifest_fp, "h", "e", "")


def echoes(client: MetaClient, fence: Fence) -> dict[str, float]:
    took = []
    for _ in range(ECHOES):
        began = time.perf_counter()
        client.request(m.Heartbeat(fence))
        took.append(1e6 * (time.perf_counter() - began))
    return {"echo_us": statistics.median(took), "echo_p99_us": statistics.quantiles(took, n=100)[98]}


def events(client: MetaClient, fence: Fence) -> dict[str, float]:
    heard: dict[int, float] = {}

    def listen() -> None:
        with MetaClient("bench") as watcher:
            for event in watcher.watch(60.0):
                if event.kind == "sealed" and event.key is not None:
                    heard[event.key.number] = time.perf_counter()
                    if event.key.number == EVENTS:
                        return

    thread = threading.Thread(target=listen)
    thread.start()
    time.sleep(0.5)
    said = {}
    for number in range(1, EVENTS + 1):
        time.sleep(0.002)
        said[number] = time.perf_counter()
        client.request(m.Put(fence, "t", number, b"f" * 16, 0, "live", b""))
    thread.join()
    return {"watch_us": statistics.median(1e6 * (heard[number] - at) for number, at in said.items())}


def bulk(client: MetaClient, fence: Fence) -> dict[str, float]:
    manifest = large_manifest(ROWS)
    blob = manifest.encode()
    began = time.perf_counter()
    client.request(m.PutManifest(fence, manifest.fingerprint, blob))
    stored = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(FETCHES):
        client.request(m.GetManifest(fence, manifest.fingerprint, 10.0))
    fetched = time.perf_counter() - began
    mib = len(blob) / (1 << 20)
    return {"manifest_rows": ROWS, "manifest_mib": mib, "put_s": stored, "get_mib_s": FETCHES * mib / fetched}


def measure() -> dict[str, float]:
    server = start()
    began = time.perf_counter()
    with MetaClient("bench") as client:
        client.connect()
        figures: dict[str, Any] = {"first_answer_ms": 1e3 * (time.perf_counter() - began)}
        fence = client.register(writer(b"f" * 16)).fence
        figures |= echoes(client, fence) | events(client, fence) | bulk(client, fence)
        server.kill()
        server.join()
        # The next server's own start (a new interpreter) is not counted: from its port's opening.
        server = start()
        began = time.perf_counter()
        client.request(m.Heartbeat(fence))
        figures["refill_ms"] = 1e3 * (time.perf_counter() - began)
    server.kill()
    server.join()
    return {name: round(value, 2) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        os.environ["SYNCLINE_RUN_DIR"] = root
        figures = measure()
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>16} {value}")


if __name__ == "__main__":
    main()
