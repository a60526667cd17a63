"""Layouts of whole fleets with real shapes: Megatron and FSDP2 trainers, TP and EP engines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from syncline.layout import Layout, Manifest
from syncline.layout.dtype import ITEMSIZE, code
from syncline.layout.mesh import MeshLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from benchmarks.plan_presets import Model, Tensor

    I64 = NDArray[np.int64]
    Bools = NDArray[np.bool_]

HOST_RANKS = 8
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


class Tensors:
    """A model's tensors as columns, sorted by name; every one seen as a matrix."""

    def __init__(self, model: Model) -> None:
        listed: list[Tensor] = sorted(model.tensors(), key=lambda t: t.name)
        self.listed = listed
        self.names = [t.name for t in listed]
        self.ndim = np.array([len(t.shape) for t in listed])
        self.shape = np.array([(*t.shape, 1)[:2] for t in listed], np.int64)
        self.cut = np.array([-1 if t.cut is None else t.cut for t in listed])
        self.heads = np.array([t.heads for t in listed])
        self.layer = np.array([t.layer for t in listed])
        self.expert = np.array([t.expert for t in listed])
        self.dtype = np.array([code(t.dtype) for t in listed], np.uint8)
        self.item = ITEMSIZE[self.dtype]
        groups: dict[tuple[int, str], int] = {}
        keys = [(t.layer, t.fused or t.name) for t in listed]
        self.group = np.array([groups.setdefault(key, len(groups)) for key in keys])

    def part(self, parts: int, index: int) -> tuple[I64, I64]:
        """Return (offset, size) i64[T, 2] of one of ``parts`` equal cuts; too few heads are repeated.

        Raises:
            ValueError: the cut does not divide a tensor, or an attention head.
        """
        rows = np.nonzero(self.cut >= 0)[0]
        extent = self.shape[rows, self.cut[rows]]
        units = np.where(self.heads[rows] > 0, self.heads[rows], extent)
        repeat = np.maximum(parts // units, 1)
        odd = (parts % repeat > 0) | (units % (parts // repeat) > 0) | (extent % (parts // repeat) > 0)
        if odd.any():
            at = int(rows[np.argmax(odd)])
            raise ValueError(f"{self.names[at]} of shape {self.listed[at].shape} is not divided by {parts}")
        offset, size = np.zeros_like(self.shape), self.shape.copy()
        step = extent * repeat // parts
        offset[rows, self.cut[rows]], size[rows, self.cut[rows]] = index // repeat * step, step
        return offset, size

    def manifest(self, held: Bools, offset: I64, size: I64, storage: I64) -> Manifest:
        """Return a rank's manifest: the held tensors' boxes row-major behind each other in their storages."""
        rows = np.nonzero(held & (size > 0).all(axis=1))[0]
        used, number = np.unique(storage[rows], return_inverse=True)
        nbytes = size[rows].prod(axis=1) * self.item[rows]
        order = np.argsort(number, kind="stable")
        ends = np.cumsum(nbytes[order])
        totals = np.bincount(number, weights=nbytes, minlength=len(used)).astype(np.int64)
        start = np.empty(len(rows), np.int64)
        start[order] = ends - nbytes[order] - np.repeat(np.cumsum(totals) - totals, np.bincount(number))
        return Manifest.from_columns(
            [self.names[i] for i in rows.tolist()],
            self.shape[rows],
            ndim=self.ndim[rows],
            tensor=np.arange(len(rows)),
            dtype=self.dtype[rows],
            box_offset=offset[rows],
            box_size=size[rows],
            storage=number,
            view_offset=start // self.item[rows],
            storage_nbytes=totals,
        )


def _hosts(prefix: str, ranks: int, first: int = 0) -> tuple[str, ...]:
    return tuple(f"{prefix}{(first + rank) // HOST_RANKS}" for rank in range(ranks))


def megatron(model: Model, ranks: int, split: tuple[int, int, int] | None = None) -> Layout:
    """Return a trainer cut by pipeline, expert and tensor parallelism, the rest replicas.

    A rank's parameters lie behind each other in buffers: of experts, of all else, of fp32.

    Raises:
        ValueError: the sizes do not divide.
    """
    pipeline, expert, tensor = split or model.trainer
    stage = ranks // pipeline
    if ranks % pipeline or stage % expert or stage % tensor or model.experts % expert:
        raise ValueError(f"{ranks} ranks are not divided by {pipeline} x {expert} x {tensor}")
    t = Tensors(model)
    layers = -(-model.layers // pipeline)
    stages = np.clip(t.layer, 0, model.layers - 1) // layers
    owner = np.where(t.expert >= 0, t.expert * expert // model.experts, -1)
    storage = np.where(t.item == 4, 2, (t.expert >= 0).astype(np.int64))
    made: dict[tuple[int, int, int], Manifest] = {}
    listed = []
    for rank in range(ranks):
        at, inner = divmod(rank, stage)
        key = (at, inner % expert, inner % tensor)
        if key not in made:
            offset, size = t.part(tensor, key[2])
            whole = (t.expert >= 0)[:, None]
            held = (stages == at) & ((owner < 0) | (owner == key[1]))
            offset, size = np.where(whole, 0, offset), np.where(whole, t.shape, size)
            made[key] = t.manifest(held, offset, size, storage)
        listed.append(made[key])
    return Layout(tuple(listed), _hosts("t", ranks))


def fsdp(model: Model, ranks: int) -> MeshLayout:
    """Return an FSDP2 trainer: every parameter, every expert's too, cut in rows over all ranks, by rule."""
    t = Tensors(model)
    everything = np.ones(len(t.names), np.bool_)
    whole = t.manifest(everything, np.zeros_like(t.shape), t.shape, np.arange(len(t.names)))
    return MeshLayout.of(whole, (ranks,), np.zeros(whole.rows), _hosts("t", ranks))


def packed(model: Model, ranks: int) -> Layout:
    """Return an FSDP2 trainer: every parameter cut in rows over all ranks, as `torch.chunk` cuts.

    A layer's experts are one parameter with the experts as rows, as Transformers 5 holds them, so that an
    expert stays whole.
    """
    t = Tensors(model)
    chunk = -(-model.experts // ranks)
    storage = np.arange(len(t.names))
    step = -(-t.shape[:, 0] // ranks)
    listed = []
    for rank in range(ranks):
        offset, size = np.zeros_like(t.shape), t.shape.copy()
        offset[:, 0] = np.minimum(step * rank, t.shape[:, 0])
        size[:, 0] = np.minimum(step, t.shape[:, 0] - offset[:, 0])
        whole = (t.expert >= 0)[:, None]
        held = (t.expert < 0) | (t.expert // chunk == rank)
        offset, size = np.where(whole, 0, offset), np.where(whole, t.shape, size)
        listed.append(
            t.manifest(held, offset, size, np.where(t.expert >= 0, t.group, storage + t.group.max() + 1))
        )
    return Layout(tuple(listed), _hosts("t", ranks))


def engine(model: Model, kind: str, ranks: int) -> tuple[Manifest, ...]:
    """Return an instance's ranks: tensors cut over TP ranks, or experts dealt to EP ranks, the rest whole.

    Tensors that engines fuse lie in one storage a layer, as do a layer's experts.

    Raises:
        ValueError: the sizes do not divide.
    """
    t = Tensors(model)
    if kind == "EP" and model.experts % ranks:
        raise ValueError(f"{model.experts} experts are not divided by {ranks}")
    owner = np.where(t.expert >= 0, t.expert * ranks // model.experts, -1)
    shared = np.array([name in _VOCABULARY for name in t.names])
    everything = np.ones(len(t.names), np.bool_)
    listed = []
    for rank in range(ranks):
        offset, size = t.part(ranks if kind == "TP" else 1, rank if kind == "TP" else 0)
        held = everything
        if kind == "EP":
            held = (owner < 0) | (owner == rank)
            step = -(-t.shape[shared, 0] // ranks)
            offset[shared, 0] = np.minimum(step * rank, t.shape[shared, 0])
            size[shared, 0] = np.minimum(step, t.shape[shared, 0] - offset[shared, 0])
        listed.append(t.manifest(held, offset, size, t.group))
    return tuple(listed)


def readers(model: Model, text: str) -> dict[str, Layout]:
    """Return instances from a text such as ``8xTP16`` or ``4xEP32``.

    Raises:
        ValueError: another text, or sizes that do not divide.
    """
    found = re.fullmatch(r"(\d+)x(TP|EP)(\d+)", text)
    if found is None:
        raise ValueError(f"readers are given as 8xTP16 or 4xEP32, not as {text}")
    count, ranks = int(found[1]), int(found[3])
    manifests = engine(model, found[2], ranks)
    return {f"i{n:02d}": Layout(manifests, _hosts("r", ranks, n * ranks)) for n in range(count)}
