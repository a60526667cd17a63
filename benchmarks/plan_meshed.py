"""Figures of fleets whose trainer is a mesh: its tensors by kinds, found here without the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncline.layout import Layout, Manifest
from syncline.layout.hashing import mixed, weighted
from syncline.layout.mesh import MeshLayout
from syncline.plan.columns import overlaps, sum_by

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from syncline.plan import Plan
    from syncline.plan.bundles import Bundles

    I64 = NDArray[np.int64]


def samples(
    writer: MeshLayout, readers: Mapping[str, Layout]
) -> tuple[Layout, dict[str, Layout], dict[str, int]]:
    """Return both sides with one tensor of each kind, all ranks written out, and how many each stands for.

    Two tensors are of one kind if shape, dtype, placements and every reader's box are the same.
    """
    distinct = {m.fingerprint: m for layout in readers.values() for m in layout.manifests}
    number = {name: i for i, name in enumerate(writer.whole.names)}
    whole = writer.whole
    columns: list[Any] = [whole.global_shape, writer.cut, whole.dtype[:, None]]
    for manifest in distinct.values():
        boxes = np.full((len(number), 2 * manifest.box_size.shape[1]), -1, np.int64)
        place = np.array([number[name] for name in manifest.names])[manifest.tensor]
        boxes[place] = np.concatenate([manifest.box_offset, manifest.box_size], axis=1)
        columns.append(boxes)
    _, first, count = np.unique(
        np.concatenate(columns, axis=1), axis=0, return_index=True, return_counts=True
    )
    kept = {whole.names[i]: int(n) for i, n in zip(first.tolist(), count.tolist(), strict=True)}
    rows = np.sort(first)
    few = MeshLayout(_only(whole, kept), writer.mesh, writer.cut[rows], writer.hosts).written_out()
    made = {key: _only(manifest, kept) for key, manifest in distinct.items()}
    sides = {
        name: Layout(tuple(made[m.fingerprint] for m in layout.manifests), layout.hosts)
        for name, layout in readers.items()
    }
    return few, sides, kept


def _only(m: Manifest, names: Mapping[str, int]) -> Manifest:
    """Return a manifest of row-major boxes with some of its names, each in a storage of its own."""
    tensors = [i for i, name in enumerate(m.names) if name in names]
    rows = np.nonzero(np.isin(m.tensor, tensors))[0]
    return Manifest.from_columns(
        [m.names[i] for i in tensors],
        m.global_shape[tensors],
        ndim=m.ndim[tensors],
        tensor=np.searchsorted(tensors, m.tensor[rows]),
        dtype=m.dtype[rows],
        box_offset=m.box_offset[rows],
        box_size=m.box_size[rows],
        storage=np.arange(len(rows)),
        storage_nbytes=m.box_size[rows].prod(axis=1) * 8,
    )


def coverage(made: Plan, readers: Mapping[str, Layout]) -> tuple[float, bool]:
    """Return (share of elements received exactly once, whether all senders' bundles are all readers')."""
    wanted = once = 0
    halves = [0, 0]
    for name in made.instances:
        for rank, manifest in enumerate(readers[name].manifests):
            some = made.received_bundles(name, rank)
            halves[0] += _sum(some)
            wanted += int(manifest.box_size.prod(axis=1).sum())
            once += _once(some)
    for rank in range(made.writers):
        halves[1] += _sum(made.sent_bundles(rank))
    return once / wanted, (halves[0] - halves[1]) % (1 << 64) == 0


def _once(some: Bundles) -> int:
    """Return the elements of all kinds of which no element comes twice; members count as a dimension."""
    offset = np.concatenate([some.first[:, None], some.offset], axis=1)
    size = np.concatenate([some.count[:, None], some.size], axis=1)
    kinds = int(some.kind.max(initial=-1)) + 1
    good = np.ones(kinds, np.bool_)
    for rows in overlaps(some.kind, offset, size):
        good[some.kind[rows]] = False
    return int(sum_by(some.kind, size.prod(axis=1), kinds)[good].sum())


def _sum(some: Bundles) -> int:
    """Return the sum of hashes of all rows: equal for the same rows in any order."""
    plain = [some.src, some.dst, some.instance, some.kind, some.first, some.count, some.pair, some.place]
    wide = [c.astype(np.int64)[:, None] for c in [*plain, some.src_base, some.dst_base, some.nbytes]]
    tables = [*wide, some.offset, some.size, some.src_stride, some.dst_stride]
    return int(mixed(weighted(tables, 9)).sum(dtype=np.uint64))
