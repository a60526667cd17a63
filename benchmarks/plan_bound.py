"""The least that the busiest network card could carry: a linear programme over who holds what."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from syncline.layout.dtype import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from syncline.layout import Layout, Manifest
    from syncline.plan import Plan

Box = tuple[tuple[int, int], ...]


def lp_bound(
    writer: Layout, readers: Mapping[str, Layout], times: Mapping[str, int] | None = None
) -> tuple[float, dict[str, int]]:
    """Return the least bytes of the busiest sender, however boxes are split, and the bytes each rank wants.

    Computed from the manifests alone, without the planner. Every rank has a card of its own.
    ``times`` says how many tensors each name stands for; one, if left out.

    Raises:
        RuntimeError: the solver found no optimum.
    """
    holders = _holders(writer)
    demand: dict[tuple[int, ...], int] = defaultdict(int)
    received: dict[str, int] = {}
    wanted: dict[bytes, dict[tuple[int, ...], int]] = {}
    for name, layout in readers.items():
        for rank, manifest in enumerate(layout.manifests):
            if manifest.fingerprint not in wanted:
                wanted[manifest.fingerprint] = _wanted(manifest, holders, times or {})
            mine = wanted[manifest.fingerprint]
            received[f"{name}/{rank}"] = sum(mine.values())
            for ranks, nbytes in mine.items():
                demand[ranks] += nbytes
    return _solve(demand, len(writer.manifests)), received


def _holders(writer: Layout) -> dict[str, dict[Box, tuple[int, ...]]]:
    """Return, by name, every distinct box with the ranks that hold it."""
    ranks: dict[bytes, list[int]] = defaultdict(list)
    distinct = {}
    for rank, manifest in enumerate(writer.manifests):
        ranks[manifest.fingerprint].append(rank)
        distinct[manifest.fingerprint] = manifest
    found: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for fingerprint, manifest in distinct.items():
        for name, box, _ in _boxes(manifest):
            found[name][box] += ranks[fingerprint]
    return {
        name: {box: tuple(sorted(set(held))) for box, held in boxes.items()} for name, boxes in found.items()
    }


def _boxes(manifest: Manifest) -> Iterator[tuple[str, Box, int]]:
    """Yield (name, box, bytes of an element)."""
    columns = (manifest.tensor, manifest.box_offset, manifest.box_size, ITEMSIZE[manifest.dtype])
    for tensor, offset, size, item in zip(*(c.tolist() for c in columns), strict=True):
        yield manifest.names[tensor], tuple((o, o + n) for o, n in zip(offset, size, strict=True)), item


def _wanted(
    manifest: Manifest, holders: dict[str, dict[Box, tuple[int, ...]]], times: Mapping[str, int]
) -> dict[tuple[int, ...], int]:
    found: dict[tuple[int, ...], int] = defaultdict(int)
    for name, box, item in _boxes(manifest):
        for held, ranks in holders[name].items():
            common = item * times.get(name, 1)
            for (a, b), (c, d) in zip(box, held, strict=True):
                common *= max(0, min(b, d) - max(a, c))
            if common:
                found[ranks] += common
    return dict(found)


def _solve(demand: Mapping[tuple[int, ...], int], writers: int) -> float:
    pairs = [(g, w) for g, ranks in enumerate(demand) for w in ranks]
    last, scale = len(pairs), max(sum(demand.values()) / writers, 1.0)
    rows = [w for _, w in pairs] + list(range(writers))
    columns = [*range(last), *[last] * writers]
    upper = coo_array(([1.0] * last + [-1.0] * writers, (rows, columns)), (writers, last + 1))
    equal = coo_array(([1.0] * last, ([g for g, _ in pairs], range(last))), (len(demand), last + 1))
    found = linprog(
        [0.0] * last + [1.0],
        A_ub=upper.tocsr(),
        b_ub=np.zeros(writers),
        A_eq=equal.tocsr(),
        b_eq=[nbytes / scale for nbytes in demand.values()],
        method="highs",
    )
    if found.status != 0:
        raise RuntimeError(f"the bound was not found: {found.message}")
    return float(found.fun) * scale


def busiest(made: Plan, received: Mapping[str, int], cards: int) -> dict[str, float]:
    """Return the bytes a card of the busiest sender, receiver and host; a host has ``cards`` ranks' cards."""
    sent = made.sender_load
    taken = np.array(list(received.values()), np.int64)
    return {
        "sender": float(sent.max()),
        "receiver": float(taken.max()),
        "host": max(_by_host(sent, cards), _by_host(taken, cards)),
    }


def _by_host(nbytes: np.ndarray, cards: int) -> float:
    starts = np.arange(0, len(nbytes), cards)
    return float((np.add.reduceat(nbytes, starts) / np.diff(np.append(starts, len(nbytes)))).max())
