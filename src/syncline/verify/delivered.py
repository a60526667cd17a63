"""Level ``delivered``: what arrived, summed, is what was published. Pure: columns in, verdicts out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from syncline.errors import DigestMismatchError, ReplicaDivergenceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncline.plan import Hops, Plan

    Column = tuple[NDArray[np.int32], NDArray[np.uint64]]


@dataclass(frozen=True, slots=True)
class Published:
    """Digests of a version's pieces, as its writers agree on them.

    Attributes:
        digest: uint64[P]; 0 where ``known`` is False.
        known: bool[P], whether any writer digested the piece.
    """

    digest: NDArray[np.uint64]
    known: NDArray[np.bool_]


def collect(plan: Plan, by_rank: Sequence[Column]) -> Published:
    """Join the writers' digests; holders of one piece must agree.

    Args:
        plan: the plan that they digested by.
        by_rank: (pieces, digests) of each writer rank, rank 0 first.

    Raises:
        ReplicaDivergenceError: two holders of one piece differ, naming tensor, box and ranks.
    """
    count = plan.piece_count
    digest, known = np.zeros(count, np.uint64), np.zeros(count, np.bool_)
    owner = np.full(count, -1, np.int32)
    for rank, (pieces, values) in enumerate(by_rank):
        differs = known[pieces] & (digest[pieces] != values)
        if differs.any():
            piece = int(pieces[np.argmax(differs)])
            raise _divergence(plan, piece, int(owner[piece]), rank, int(np.count_nonzero(differs)))
        fresh = pieces[~known[pieces]]
        digest[pieces], known[pieces] = values, True
        owner[fresh] = rank
    return Published(digest, known)


def _divergence(plan: Plan, piece: int, first: int, second: int, count: int) -> ReplicaDivergenceError:
    return ReplicaDivergenceError(
        f"writers {first} and {second} declare replicas of one box but hold different contents",
        tensor=plan.names[int(plan.piece_rows([piece]).tensor[0])],
        rank=f"writer {second}",
        expected=f"the contents of writer {first}",
        found=f"{count} differing pieces, the first at {describe(plan, piece)}",
        hint="the trainer's replicas have drifted apart: look at its gradient reduction",
    )


def describe(plan: Plan, piece: int) -> str:
    """Return a piece as ``[rows 0:4, columns 8:16]``-like text."""
    row = plan.piece_rows([piece])
    ndim = int(plan.ndim[int(row.tensor[0])])
    offset, size = row.offset[0, :ndim], row.size[0, :ndim]
    return "[" + ", ".join(f"{int(o)}:{int(o + s)}" for o, s in zip(offset, size, strict=True)) + "]"


def mismatched(published: Published, hops: Hops, digests: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the hops whose digest is not the sum (mod 2^64) of their pieces' digests.

    Args:
        published: digests by piece.
        hops: the reader's hops; each names its pieces.
        digests: uint64[H], the digest of what each hop received (or, read again, of what stands in memory).

    Raises:
        DigestMismatchError: a piece that nobody digested.
    """
    if not published.known[hops.piece].all():
        missing = int(hops.piece[np.argmin(published.known[hops.piece])])
        raise DigestMismatchError("no writer digested a piece that was received", found=f"piece {missing}")
    if not len(hops):
        return np.zeros(0, np.int64)
    expected = np.add.reduceat(published.digest[hops.piece], hops.piece_ptr[:-1])
    return np.flatnonzero(expected != digests)
