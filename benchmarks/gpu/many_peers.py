"""What others do with the same layouts: a message a tensor, gather and broadcast, and Awex's path.

All by ``torch.distributed``, a process a GPU (Awex: a process a rank, as it is made), on few layers. What
arrives is compared as ours is, so that nobody is timed who moves less.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import statistics
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import plan_awex
from benchmarks.gpu import awex
from benchmarks.gpu.many_cases import INSTANCE, Case, Contents
from benchmarks.gpu.many_processes import once
from syncline.layout import Layout
from syncline.plan import Hops

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.gpu.many_ranks import Setup
    from syncline.layout import Manifest

LAYERS = 4
DTYPE = torch.bfloat16
_ROUNDS = 4
_TOGETHER = 1024
_SECONDS = 150.0
_COLLECTIVE = timedelta(seconds=60)
_SPOILED = 0xA5
_VERSION = 1

Place = tuple[int, int]
"""Row and column, or rows and columns."""


class Side:
    """What one process holds of one side: the storages of a rank, or nothing."""

    def __init__(self, manifest: Manifest | None, device: torch.device) -> None:
        self.manifest = manifest
        sizes = [] if manifest is None else manifest.storage_nbytes.tolist()
        self.storages = [torch.full((n,), _SPOILED, dtype=torch.uint8, device=device) for n in sizes]
        self.flat = [s.view(DTYPE) for s in self.storages]

    def hop(self, hops: Hops, hop: int, end: str) -> torch.Tensor:
        """Return one end of a hop (``src`` or ``dst``)."""
        storage, base, stride = (
            getattr(hops, f"{end}_{name}")[hop] for name in ("storage", "base", "stride")
        )
        return self.flat[int(storage)].as_strided(hops.size[hop].tolist(), stride.tolist(), int(base))

    def boxes(self) -> Iterator[tuple[str, Place, torch.Tensor]]:
        """Yield (name, offset, the tensor as a matrix) of every shard."""
        m = self.manifest
        if m is None:
            return
        for row, (name, at, size) in enumerate(_shards(m)):
            flat, start = self.flat[int(m.storage[row])], int(m.view_offset[row])
            yield name, at, flat[start : start + size[0] * size[1]].view(size)


class PerTensor:
    """An update by one message for every box of a tensor, a thousand in a group."""

    def __init__(self, case: Case, rank: int, device: torch.device) -> None:
        gpus = _gpus(case)
        self.source, self.target = _held(case, gpus[rank], device)
        hops = Hops.concatenate(_received(case))
        hops = hops.take(np.argsort(hops.tensor, kind="stable"))
        ends = zip(hops.src.tolist(), hops.dst.tolist(), strict=True)
        self._groups: list[list[tuple[torch.Tensor | None, torch.Tensor | None, int]]] = []
        for hop, (writer, reader) in enumerate(ends):
            if hop % _TOGETHER == 0:
                self._groups.append([])
            a, b = gpus.index(case.writer_gpus[writer]), gpus.index(case.reader_gpus[reader])
            if rank in {a, b}:
                src = self.source.hop(hops, hop, "src") if a == rank else None
                dst = self.target.hop(hops, hop, "dst") if b == rank else None
                self._groups[-1].append((src, dst, b if a == rank else a))

    def update(self) -> None:
        """Move everything."""
        for group in self._groups:
            exchange = Exchange()
            for src, dst, peer in group:
                if src is not None and dst is not None:
                    dst.copy_(src)
                elif src is not None:
                    exchange.send(src, peer)
                elif dst is not None:
                    exchange.receive(dst, peer)
            exchange.run()


class GatherBroadcast:
    """An update that gathers each tensor at the first trainer rank and broadcasts it to all readers."""

    def __init__(self, case: Case, rank: int, device: torch.device) -> None:
        gpus = _gpus(case)
        self.source, self.target = _held(case, gpus[rank], device)
        self._rank, self._root = rank, gpus.index(case.writer_gpus[0])
        audience = sorted({self._root, *(gpus.index(gpu) for gpu in case.reader_gpus)})
        made = dist.new_group(audience, timeout=_COLLECTIVE)
        self._group = made if isinstance(made, dist.ProcessGroup) else None
        self._parts, self._shapes = _parts(case, gpus), _shapes(case)
        self._mine = {(name, at): view for name, at, view in self.source.boxes()}
        self._wanted: dict[str, list[tuple[Place, torch.Tensor]]] = {}
        for name, at, view in self.target.boxes():
            self._wanted.setdefault(name, []).append((at, view))
        room = max(rows * columns for rows, columns in self._shapes.values())
        hears = rank in audience
        self._whole = torch.empty(room, dtype=DTYPE, device=device) if hears else None

    def update(self) -> None:
        """Move everything."""
        for name, (rows, columns) in self._shapes.items():
            full = None if self._whole is None else self._whole[: rows * columns].view(rows, columns)
            self._gather(name, full)
            if full is not None:
                dist.broadcast(full, self._root, group=self._group)
                for at, view in self._wanted.get(name, ()):
                    view.copy_(_box(full, at, tuple(view.shape)))

    def _gather(self, name: str, full: torch.Tensor | None) -> None:
        exchange = Exchange()
        for holder, at, size in self._parts[name]:
            if self._rank == self._root and full is not None:
                place = _box(full, at, size)
                if holder == self._root:
                    place.copy_(self._mine[name, at])
                else:
                    exchange.receive(place, holder)
            elif holder == self._rank:
                exchange.send(self._mine[name, at], self._root)
        exchange.run()


class Exchange:
    """Messages that go as one group; each is contiguous, and copied where its place is not."""

    def __init__(self) -> None:
        self._messages: list[dist.P2POp] = []
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def send(self, src: torch.Tensor, peer: int) -> None:
        """Add a message to a peer."""
        self._messages.append(dist.P2POp(dist.isend, src.contiguous(), peer))

    def receive(self, dst: torch.Tensor, peer: int) -> None:
        """Add a message from a peer."""
        whole = dst
        if not dst.is_contiguous():
            whole = torch.empty_like(dst, memory_format=torch.contiguous_format)
            self._late.append((dst, whole))
        self._messages.append(dist.P2POp(dist.irecv, whole, peer))

    def run(self) -> None:
        """Exchange them all."""
        if self._messages:
            for request in dist.batch_isend_irecv(self._messages):
                request.wait()
        for dst, whole in self._late:
            dst.copy_(whole)


class Awex:
    """An update by Awex's own planner, operation builders and batched messages; engines come first."""

    def __init__(self, case: Case, rank: int, device: torch.device) -> None:
        planner, _, _ = plan_awex._modules_once()  # noqa: SLF001 - how the planning benchmark finds it
        importlib.import_module("awex.logging").setLevel("CRITICAL")
        self._comm = importlib.import_module("awex.transfer.nccl_comm")
        readers, writers = len(case.reader_gpus), len(case.writer_gpus)
        self._reads = rank < readers
        trainer, engine = case.manifests()
        own = Side(engine[rank] if self._reads else trainer[rank - readers], device)
        none = Side(None, device)
        self.source, self.target = (none, own) if self._reads else (own, none)
        self._held = {name: view for name, _, view in own.boxes()}
        builder = planner.TransferPlanBuilder(
            infer_world_size=readers, train_world_size=writers, num_infer_engines=1
        )
        described = (_described(engine, "i"), _described(trainer, "t"))
        self._plan = builder.build_local_transfer_plan(*described, rank)

    def update(self) -> None:
        """Move everything."""
        if self._reads:
            operations, pairs, *_ = self._comm.nccl_build_recv_ops(self._held, self._plan, dist.group.WORLD)
            self._comm.batch_send_recv(None, operations)
            for target, received in pairs:
                target.copy_(received)
        else:
            build = self._comm.nccl_build_send_ops
            operations, *_ = build(self._held, self._plan, dist.group.WORLD, None)
            self._comm.batch_send_recv(operations, None)


def _described(manifests: tuple[Manifest, ...], side: str) -> list[Any]:
    """Return Awex's description of one side."""
    rows = plan_awex._rows(Layout(manifests, ("host",) * len(manifests)))  # noqa: SLF001 - as above
    columns = {f"{side}_{name}": value for name, value in rows.items()}
    return plan_awex._metadata(columns, side, len(manifests))  # noqa: SLF001 - as above


WAYS = {"NCCL per tensor": PerTensor, "gather + broadcast": GatherBroadcast, "Awex": Awex}
_meetings = itertools.count()


def few(case: Case) -> Case:
    """Return the case with so many layers as others are timed with."""
    return replace(case, layers=min(LAYERS, case.layers))


def refused(way: str, case: Case) -> str:
    """Return why a way cannot move a case, or nothing."""
    if len(_gpus(case)) < 2:
        return "it needs two GPUs"
    if way == "Awex" and not awex.found():
        return "it is not installed"
    if way == "Awex" and case.colocated:
        return "two of its ranks would share a GPU, over which NCCL does not work"
    return ""


def measured(way: str, case: Case, setup: Setup, kind: str = "cuda") -> dict[str, Any]:
    """Return bytes, milliseconds, GB/s and how many tensors arrived right, by a way of `WAYS`."""
    gpus = [*case.reader_gpus, *case.writer_gpus] if way == "Awex" else _gpus(case)
    meeting = f"{setup.directory}/others-{next(_meetings)}"
    given = [(way, case, rank, gpu, len(gpus), meeting, setup, kind) for rank, gpu in enumerate(gpus)]
    found = once(_run, given, _SECONDS)
    seconds = max(one["seconds"] for one in found)
    nbytes = int(sum(hops.nbytes.sum() for hops in _received(case)))
    return {
        "bytes": nbytes,
        "ms": 1e3 * seconds,
        "gbs": nbytes / seconds / 1e9,
        "arrived": [sum(one[key] for one in found) for key in ("right", "count")],
    }


def _run(
    way: str, case: Case, rank: int, gpu: int, world: int, meeting: str, setup: Setup, kind: str
) -> dict[str, Any]:
    """Be one process of a way."""
    torch.set_num_threads(1)
    device = torch.device("cuda", gpu) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        timeout=_COLLECTIVE,
        device_id=device if kind == "cuda" else None,
    )
    moved = WAYS[way](case, rank, device)
    source, target = moved.source, moved.target
    contents = Contents(Contents.read(*setup.bits).bits.to(device))
    if source.manifest is not None:
        contents.fill(source.manifest, source.storages, _VERSION)
    took = []
    for _ in range(_ROUNDS):
        _idle(device)
        dist.barrier()
        _idle(device)
        began = time.perf_counter()
        moved.update()
        _idle(device)
        dist.barrier()
        _idle(device)
        took.append(time.perf_counter() - began)
    right, count = (0, 0)
    if target.manifest is not None:
        right, count = contents.check(target.manifest, target.storages, _VERSION)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    return {"seconds": statistics.median(took[1:]), "right": right, "count": count}


def _gpus(case: Case) -> list[int]:
    return sorted({*case.writer_gpus, *case.reader_gpus})


def _held(case: Case, gpu: int, device: torch.device) -> tuple[Side, Side]:
    ends = zip((case.writer_gpus, case.reader_gpus), case.manifests(), strict=True)
    made = [Side(manifests[gpus.index(gpu)] if gpu in gpus else None, device) for gpus, manifests in ends]
    return made[0], made[1]


def _received(case: Case) -> list[Hops]:
    made = case.plan()
    return [made.reader(INSTANCE, rank) for rank in range(len(case.reader_gpus))]


def _shards(m: Manifest) -> Iterator[tuple[str, Place, Place]]:
    """Yield (name, offset, size) of every shard, seen as a matrix."""
    offsets, sizes = m.box_offset.tolist(), m.box_size.tolist()
    for tensor, offset, size in zip(m.tensor.tolist(), offsets, sizes, strict=True):
        at, extent = (*offset, 0)[:2], (*size, 1)[:2]
        yield m.names[tensor], (at[0], at[1]), (extent[0], extent[1])


def _parts(case: Case, gpus: list[int]) -> dict[str, list[tuple[int, Place, Place]]]:
    """Return by name every distinct box of the trainer: (process that holds it, offset, size)."""
    found: dict[str, dict[Place, tuple[int, Place, Place]]] = {}
    for gpu, manifest in zip(case.writer_gpus, case.manifests()[0], strict=True):
        for name, at, size in _shards(manifest):
            found.setdefault(name, {}).setdefault(at, (gpus.index(gpu), at, size))
    return {name: list(boxes.values()) for name, boxes in found.items()}


def _shapes(case: Case) -> dict[str, tuple[int, int]]:
    """Return by name the shapes of all tensors, in one order everywhere."""
    made = case.plan()
    shapes = [(*shape, 1)[:2] for shape in made.global_shape.tolist()]
    return {name: (rows, columns) for name, (rows, columns) in zip(made.names, shapes, strict=True)}


def _box(full: torch.Tensor, at: Place, size: tuple[int, ...]) -> torch.Tensor:
    return full[at[0] : at[0] + size[0], at[1] : at[1] + size[1]]


def _idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
