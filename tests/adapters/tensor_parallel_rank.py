"""One rank of a tensor-parallel instance, started by `test_tensor_parallel`; reports through a queue."""

from __future__ import annotations

import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from syncline.adapters.huggingface import HuggingFaceEngine
from syncline.protocol.ids import VersionKey
from tests.adapters.helpers import write

DEADLINE = 60.0


def parallelize(model):
    """Shard attention and MLP with torch's own styles; embeddings and head stay whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    styles = {f"self_attn.{x}_proj": ColwiseParallel() for x in "qkv"} | {
        "self_attn.o_proj": RowwiseParallel()
    }
    styles |= {
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, styles)


def _update(engine, full, key):
    """Install a version as a worker beside each rank would, and check it against a fresh load."""
    engine.pause("abort", DEADLINE)
    write(engine.manifest, engine.binding().addresses(), full)
    engine.after_update(key)
    engine.flush_caches()
    engine.report_version(key)
    dist.barrier()
    engine.resume(key)


def rank_main(queue, rank, world, port, old, new, way, prompts, tokens):
    """Run one rank; put its report, or the text of its failure."""
    try:
        queue.put(_rank(rank, world, port, old, new, way, prompts, tokens))
    except BaseException:
        queue.put({"rank": rank, "failed": traceback.format_exc()})
        raise


def _rank(rank, world, port, old, new, way, prompts, tokens):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    start = time.perf_counter()
    engine = HuggingFaceEngine.load(old, tensor_parallel="auto" if way == "auto" else parallelize)
    report = {"rank": engine.rank, "load_s": round(time.perf_counter() - start, 2)}
    full = {n: t.float().numpy() for n, t in load_file(Path(new) / "model.safetensors").items()}
    follower = threading.Thread(target=engine.follow, daemon=True)
    if engine.rank:
        follower.start()
    else:
        begun, result = threading.Event(), []
        report["before"] = _texts(engine, prompts, tokens)
        hook = engine.model.register_forward_hook(lambda *_: begun.set())
        running = threading.Thread(target=lambda: result.extend(engine.generate(prompts, 4000)))
        running.start()
        begun.wait(DEADLINE)
    _update(engine, full, VersionKey(1, 1))
    _update(engine, full, VersionKey(1, 2))
    if not engine.rank:
        running.join(DEADLINE)
        hook.remove()
        report["aborted"] = sorted({c.finish for c in result})
        start = time.perf_counter()
        done = engine.generate(prompts, tokens)
        report |= {"after": [c.text for c in done], "generate_s": time.perf_counter() - start}
        report["version"] = str(done[0].version)
    engine.pause("wait", DEADLINE)
    fresh = engine.load_fresh(Path(new))
    live = engine.live_tensors()
    report["differ"] = sorted(fresh.keys() ^ live.keys()) + [
        n for n, t in live.items() if not torch.equal(t, fresh[n])
    ]
    kinds = {type(p).__name__ for p in engine.model.parameters()}
    report |= {
        "kinds": sorted(kinds),
        "bytes": int(engine.manifest.storage_nbytes.sum()),
        "aliases": engine.aliases,
    }
    dist.barrier()
    engine.resume(None)
    engine.shutdown()
    if engine.rank:
        follower.join(DEADLINE)
        report["followed"] = not follower.is_alive()
    dist.barrier()
    dist.destroy_process_group()
    return report


def _texts(engine, prompts, tokens):
    return [c.text for c in engine.generate(prompts, tokens)]
