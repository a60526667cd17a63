"""Trainer ranks that share blocks of scales, in processes: ``python -m tests.megatron.halo_rank CASE``.

CASE is JSON: ``out``, a directory; ``name``, of the job; ``shape`` of the tensor ``w``; ``boxes``, one a
rank, (offset, size) each; ``play``, what happens. Ranks are forked; what each saw is in ``out/RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from syncline.adapters.megatron import BlockFP8, MegatronTrainer
from syncline.errors import SynclineError, to_wire
from syncline.options import Options
from syncline.store.writer import WeightWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

OPTIONS = {"connect_timeout": 40.0, "update_timeout": 40.0, "stall": 20.0, "lease": 30.0}
VERSIONS = (1, 2)


def whole(shape: tuple[int, ...], version: int) -> torch.Tensor:
    """Return the tensor of a version, bfloat16: rows and columns of very different sizes."""
    generator = torch.Generator().manual_seed(version)
    noise = torch.randn(shape, generator=generator)
    down = torch.exp2(torch.randint(-8, 8, (shape[-2], 1), generator=generator))
    across = torch.exp2(torch.randint(-8, 8, (shape[-1],), generator=generator))
    return (noise * down * across).to(torch.bfloat16)


class Part(torch.nn.Module):
    """A chunk that holds a box of ``w``, and says so as Megatron's do."""

    def __init__(self, shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]) -> None:
        super().__init__()
        self.register_parameter(
            "w", torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16), requires_grad=False)
        )
        self._shape, self._offset = shape, offset

    def sharded_state_dict(self, metadata: Any = None) -> dict[str, Any]:
        return {
            "w": SimpleNamespace(
                key="w",
                data=self.get_parameter("w").detach(),
                global_shape=self._shape,
                global_offset=self._offset,
            )
        }

    def load(self, version: int) -> None:
        size = self.get_parameter("w").shape
        where = tuple(slice(o, o + n) for o, n in zip(self._offset, size, strict=True))
        with torch.no_grad():
            self.get_parameter("w").copy_(whole(self._shape, version)[where])


def identity(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(tensors)


class Rank:
    """One forked rank."""

    def __init__(self, case: dict[str, Any], rank: int) -> None:
        self.case, self.rank, self.world = case, rank, len(case["boxes"])
        dist.init_process_group(
            "gloo", rank=rank, world_size=self.world, init_method=f"file://{case['out']}/store"
        )
        offset, size = (tuple(one) for one in case["boxes"][rank])
        self.chunk = Part(tuple(case["shape"]), offset, size)

    def trainer(self, **changes: Any) -> MegatronTrainer:
        settings = {"halo": "exchange", "timeout": 30.0, **self.case.get("fp8", {}), **changes}
        return MegatronTrainer(self.chunk, exporter=identity, fp8=BlockFP8(("w",), **settings))


def publish(rank: Rank) -> dict[str, Any]:
    """Publish two versions."""
    trainer = rank.trainer()
    writer = WeightWriter(trainer, job=rank.case["name"], options=Options(**OPTIONS))
    writer.await_readers("plain", timeout=40.0)
    for version in VERSIONS:
        writer.close_window()
        rank.chunk.load(version)
        writer.publish(version).wait_committed(40.0)
    writer.close()
    return {"scales": sum(s.box.numel for s in trainer.manifest.shards() if s.name == "w_scale_inv")}


def silent(rank: Rank) -> dict[str, Any]:
    """The last rank quiesces once only; the others wait for it, and then know that nothing can follow."""
    trainer = rank.trainer(timeout=1.5)
    rank.chunk.load(1)
    trainer.quiesce()
    if rank.rank == rank.world - 1:
        _wait_for(rank, "told")
        return {}
    errors = []
    for _ in range(2):
        try:
            trainer.quiesce()
        except SynclineError as error:
            errors.append(dict(to_wire(error)))
    _tell(rank, "told")
    return {"errors": errors}


def gone(rank: Rank) -> dict[str, Any]:
    """The last rank ends."""
    trainer = rank.trainer()
    if rank.rank == rank.world - 1:
        os._exit(0)
    began = time.monotonic()
    try:
        trainer.quiesce()
    except SynclineError as error:
        return {"errors": [dict(to_wire(error))], "seconds": time.monotonic() - began}
    return {}


def different(rank: Rank) -> dict[str, Any]:
    """The last rank rounds its scales to powers of two, the others do not."""
    try:
        rank.trainer(power_of_two=rank.rank == rank.world - 1)
    except SynclineError as error:
        return {"errors": [dict(to_wire(error))]}
    return {}


def undescribed(rank: Rank) -> dict[str, Any]:
    """The last rank cannot say what it holds, for a reason that is nobody's own."""

    def fails(metadata: Any = None) -> dict[str, Any]:
        raise KeyError("dp_cp_group")

    if rank.rank == rank.world - 1:
        rank.chunk.sharded_state_dict = fails
    return different(rank)


def refused(rank: Rank) -> dict[str, Any]:
    """Without the exchange, cut blocks are refused on every rank alike."""
    try:
        rank.trainer(halo="refuse")
    except SynclineError as error:
        return {"errors": [dict(to_wire(error))]}
    return {}


def twice(rank: Rank) -> dict[str, Any]:
    """Two adapters over the same ranks, one after the other: their groups are apart."""
    seen = []
    for version in VERSIONS:
        trainer = rank.trainer()
        rank.chunk.load(version)
        trainer.quiesce()
        made = trainer.learned.made["w_scale_inv#0"]
        seen.append(made.view(torch.int32).reshape(-1).tolist())
    return {"seen": seen}


PLAYS: dict[str, Callable[[Rank], dict[str, Any]]] = {
    "publish": publish,
    "silent": silent,
    "gone": gone,
    "different": different,
    "refused": refused,
    "undescribed": undescribed,
    "twice": twice,
}


def _tell(rank: Rank, what: str) -> None:
    (Path(rank.case["out"]) / f"{what}-{rank.rank}").touch()


def _wait_for(rank: Rank, what: str) -> None:
    limit = time.monotonic() + 30
    while sum(1 for _ in Path(rank.case["out"]).glob(f"{what}-*")) < rank.world - 1:
        if time.monotonic() > limit:
            raise TimeoutError(what)
        time.sleep(0.05)


def _child(case: dict[str, Any], number: int) -> None:
    out = Path(case["out"])
    try:
        torch.set_num_threads(1)
        seen = PLAYS[case["play"]](Rank(case, number))
    except BaseException:
        (out / f"{number}.error").write_text(traceback.format_exc())
        os._exit(1)
    (out / f"{number}.json").write_text(json.dumps(seen))
    os._exit(0)


def main() -> None:
    case = json.loads(sys.argv[1])
    children = []
    for number in range(len(case["boxes"])):
        child = os.fork()
        if child == 0:
            _child(case, number)
        children.append(child)
    limit = time.monotonic() + 90
    while children and time.monotonic() < limit:
        children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
        time.sleep(0.05)
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
