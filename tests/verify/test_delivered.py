"""The verdicts of level `delivered`: sums of pieces against hops, and replicas against each other."""

from __future__ import annotations

import numpy as np
import pytest

from syncline.errors import DigestMismatchError, ReplicaDivergenceError
from syncline.layout import Box, Layout, Manifest, Shard, View
from syncline.plan import Plan, plan
from syncline.store.offer import decode_digests, encode_digests
from syncline.verify.delivered import Published, collect, describe, mismatched

SHAPE = (12, 4)


def rows(*cuts: tuple[int, int]) -> Layout:
    """Ranks that hold rows [start, stop) of one tensor each."""
    manifests = []
    for start, stop in cuts:
        size = (stop - start, SHAPE[1])
        shard = Shard("w", SHAPE, "float32", Box((start, 0), size), View.contiguous(0, 0, size))
        manifests.append(Manifest.from_shards([shard], [size[0] * size[1] * 4]))
    return Layout(tuple(manifests), ("host",) * len(manifests))


@pytest.fixture
def made() -> Plan:
    readers = {"a": rows((0, 12)), "b": rows((0, 5), (5, 12))}
    return plan(rows((0, 4), (4, 12), (4, 12)), readers)


def columns(made: Plan, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """What a rank would digest: each piece's digest is a power of two of its number."""
    piece = np.unique(made.digest_rows(rank).piece).astype(np.int32)
    return piece, np.uint64(1) << piece.astype(np.uint64)


def expected(made: Plan, instance: str, rank: int) -> np.ndarray:
    hops = made.reader(instance, rank)
    ends = zip(hops.piece_ptr[:-1].tolist(), hops.piece_ptr[1:].tolist(), strict=True)
    return np.array([sum(1 << int(p) for p in hops.piece[a:b]) for a, b in ends], np.uint64)


def test_a_hop_is_the_sum_of_its_pieces(made: Plan) -> None:
    published = collect(made, [columns(made, rank) for rank in range(3)])
    assert published.known.all()
    for instance, rank in (("a", 0), ("b", 0), ("b", 1)):
        hops, want = made.reader(instance, rank), expected(made, instance, rank)
        assert len(mismatched(published, hops, want)) == 0
        for hop in range(len(hops)):
            wrong = want.copy()
            wrong[hop] += np.uint64(1)
            assert mismatched(published, hops, wrong).tolist() == [hop]


def test_sums_wrap_at_64_bits(made: Plan) -> None:
    hops = made.reader("a", 0)
    big = np.full(made.piece_count, np.uint64(2**64 - 1))
    published = Published(big, np.ones(made.piece_count, bool))
    counts = np.diff(hops.piece_ptr).astype(np.uint64)
    assert counts.max() > 1
    assert len(mismatched(published, hops, np.uint64(0) - counts)) == 0


def test_replicas_that_differ_are_named_with_box_and_ranks(made: Plan) -> None:
    by_rank = [columns(made, rank) for rank in range(3)]
    pieces, digests = by_rank[2]
    digests = digests.copy()
    digests[-1] ^= np.uint64(1)
    with pytest.raises(ReplicaDivergenceError, match="writers 1 and 2 declare replicas") as caught:
        collect(made, [by_rank[0], by_rank[1], (pieces, digests)])
    assert (caught.value.tensor, caught.value.rank) == ("w", "writer 2")
    assert caught.value.found == f"1 differing pieces, the first at {describe(made, int(pieces[-1]))}"
    assert describe(made, int(pieces[-1])) == "[5:12, 0:4]"


def test_a_piece_that_nobody_digested_is_no_proof(made: Plan) -> None:
    nothing = (np.zeros(0, np.int32), np.zeros(0, np.uint64))
    published = collect(made, [columns(made, 0), nothing, nothing])
    with pytest.raises(DigestMismatchError, match="no writer digested a piece"):
        mismatched(published, made.reader("a", 0), expected(made, "a", 0))
    one = collect(made, [columns(made, 0), columns(made, 1), nothing])  # one holder is enough
    assert len(mismatched(one, made.reader("a", 0), expected(made, "a", 0))) == 0


def test_digests_cross_the_wire_and_lies_are_refused(made: Plan) -> None:
    pieces, digests = columns(made, 1)
    blob = encode_digests(pieces, digests)
    found = decode_digests(blob, made.piece_count, "writer 1")
    assert np.array_equal(found[0], pieces)
    assert np.array_equal(found[1], digests)
    past = np.array([0, made.piece_count], np.int32)
    values = np.zeros(2, np.uint64)
    lies = {
        "not digests": b"\x80\x04.",
        "odd lengths": encode_digests(past, values[:1]),
        "does not have": encode_digests(past, values),
        "the plan does not": encode_digests(np.array([-1, 0], np.int32), values),
        "pieces that the": encode_digests(np.array([1, 1], np.int32), values),
    }
    for why, lie in lies.items():
        with pytest.raises(DigestMismatchError, match=why) as caught:
            decode_digests(lie, made.piece_count, "writer 1")
        assert caught.value.rank == "writer 1"
