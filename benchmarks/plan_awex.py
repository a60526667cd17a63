"""Awex's ``TransferPlanBuilder`` on the same layout, in an environment of its own.

Run by `benchmarks.plan` with that environment's python: reads a compressed npz of the two layouts,
builds Awex's metadata, plans one reader rank and one trainer rank, prints JSON. The package's own
``__init__`` imports megatron-core, which planning does not need, so the modules are imported past it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncline.layout import Layout

VERSION = "0.9.0"
#: What Awex's planner imports, at run time, beside torch; installed without their dependencies.
NEEDS = (f"awex=={VERSION}",)


def measure(
    python: Path, writer: Layout, readers: Mapping[str, Layout], ranks: tuple[int, int]
) -> dict[str, Any]:
    """Plan in the other environment; return its figures.

    Args:
        python: of that environment, see `environment`.
        writer: the trainer's layout.
        readers: the instances' layouts, all alike.
        ranks: (rank within the first instance, trainer rank) to plan for.

    Raises:
        subprocess.CalledProcessError: it failed; its error output was passed on.
    """
    one = next(iter(readers.values()))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "layouts.npz"
        columns = {
            f"{side}_{k}": v for side, lay in (("t", writer), ("i", one)) for k, v in _rows(lay).items()
        }
        np.savez_compressed(
            path,
            worlds=np.array([len(writer.manifests), len(one.manifests), len(readers), *ranks]),
            **columns,
        )
        done = subprocess.run(
            [str(python), "-P", __file__, str(path)], check=True, stdout=subprocess.PIPE, text=True
        )
    return json.loads(done.stdout.splitlines()[-1])


def environment(root: Path) -> Path:
    """Make the environment unless it is there; return its python. torch is the calling environment's."""
    python = root / "bin" / "python"
    stamp = root / f"awex-{VERSION}"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", str(root)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, *NEEDS], check=True)
        here = importlib.util.find_spec("torch")
        if here is None or here.origin is None:
            raise ImportError("torch is not installed here")
        site = next(Path(root).glob("lib/python*/site-packages"))
        (site / "shared.pth").write_text(f"{Path(here.origin).parent.parent}\n", encoding="utf-8")
        stamp.touch()
    return python


def _rows(layout: Layout) -> dict[str, Any]:
    """Return plain columns: a row for each shard of each rank."""
    names = sorted({name for m in {id(m): m for m in layout.manifests}.values() for name in m.names})
    number = {name: i for i, name in enumerate(names)}
    shape = np.ones((len(names), 2), np.int64)
    parts: list[list[Any]] = []
    for rank, m in enumerate(layout.manifests):
        place = np.array([number[n] for n in m.names], np.int64)
        shape[place, : m.global_shape.shape[1]] = m.global_shape
        parts.append([place[m.tensor], np.full(m.rows, rank), m.box_offset, m.box_size])
    tensor, rank, offset, size = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((rank, tensor))
    return {
        "names": np.array(names),
        "shape": shape,
        "tensor": tensor[order],
        "rank": rank[order],
        "offset": offset[order],
        "size": size[order],
    }


def _modules() -> tuple[Any, Any, Any]:
    """Import Awex's planner past the package's ``__init__``."""
    found = importlib.util.find_spec("awex")
    if found is None or not found.submodule_search_locations:
        raise ImportError("awex is not installed here")
    package = types.ModuleType("awex")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["awex"] = package
    sys.modules.setdefault("megatron", types.ModuleType("megatron"))
    plan = importlib.import_module("awex.transfer.transfer_plan")
    meta = importlib.import_module("awex.meta.weight_meta")
    sharding = importlib.import_module("awex.sharding.param_sharding")
    return plan, meta, sharding


def _metadata(columns: Mapping[str, Any], side: str, world: int) -> list[Any]:
    """Return Awex's metadata of one side: a parameter with its shards, grouped into whole replicas."""
    import torch  # noqa: PLC0415 (only Awex's own process needs it)

    _, meta, sharding = _modules_once()
    names = [str(n) for n in columns[f"{side}_names"]]
    shapes = columns[f"{side}_shape"].tolist()
    rows = zip(*(columns[f"{side}_{c}"].tolist() for c in ("tensor", "rank", "offset", "size")), strict=True)
    by_tensor: dict[int, dict[tuple[int, ...], list[Any]]] = {}
    for tensor, rank, offset, size in rows:
        shard = meta.ParameterShardMeta(
            tp_rank=0,
            attn_tp_rank=0,
            pp_rank=0,
            ep_rank=0,
            ep_tp_rank=0,
            global_rank=rank,
            world_size=world,
            engine_rank=0,
            name=names[tensor],
            shape=tuple(size),
            numel=size[0] * size[1],
            dtype=torch.bfloat16,
            global_offset=tuple(offset),
            sharding_type=sharding.ShardingType.NO_SHARDING,
            num_shards=1,
            sharding_dim=1 if size[1] < shapes[tensor][1] else 0,
        )
        by_tensor.setdefault(tensor, {}).setdefault(tuple(offset), []).append(shard)
    found = []
    for tensor, boxes in sorted(by_tensor.items()):
        copies = min(map(len, boxes.values()))
        replicas = [[held[i] for held in boxes.values()] for i in range(copies)]
        listed = [shard for replica in replicas for shard in replica]
        for shard in listed:
            shard.num_shards = len(boxes)
        found.append(
            meta.ParameterMeta(
                name=names[tensor],
                global_numel=shapes[tensor][0] * shapes[tensor][1],
                global_shape=tuple(shapes[tensor]),
                dtype=torch.bfloat16,
                shards=listed,
                replicas=[meta.ParameterReplicaMeta(replica) for replica in replicas],
            )
        )
    return found


_cached: list[tuple[Any, Any, Any]] = []


def _modules_once() -> tuple[Any, Any, Any]:
    if not _cached:
        _cached.append(_modules())
    return _cached[0]


def main(path: str) -> None:
    """Plan for both ranks and print the seconds and operations."""
    logging.disable(logging.CRITICAL)
    columns = np.load(path)
    trainers, ranks, engines, reader, trainer = columns["worlds"].tolist()
    plan, _, _ = _modules_once()
    infer = _metadata(columns, "i", ranks)
    train = _metadata(columns, "t", trainers)
    builder = plan.TransferPlanBuilder(
        infer_world_size=ranks * engines, train_world_size=trainers, num_infer_engines=engines
    )
    figures: dict[str, Any] = {"version": VERSION}
    for who, number in (("reader", reader), ("trainer", ranks * engines + trainer)):
        began, used = time.perf_counter(), time.process_time()
        made = builder.build_weights_mapping_operations(infer, train, global_transfer_rank=number)
        figures |= {
            f"{who}_seconds": time.perf_counter() - began,
            f"{who}_cpu_seconds": time.process_time() - used,
            f"{who}_operations": len(made),
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1])
