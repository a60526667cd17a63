"""The book of plans: each instance is judged by its own rules, and a misfit spoils nothing for the others."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from syncline.errors import CoverageError, LayoutError, NameMismatchError, UndeclaredCastError
from syncline.layout import Box, Manifest, Rules
from syncline.protocol.messages import InstanceLayout, RankLayout
from syncline.store import rules as rules_wire
from syncline.store.plans import PlanBook
from tests.store.pair import shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncline.layout import Shard


class Shelf:
    """Manifests by fingerprint, and how often they were asked for."""

    def __init__(self) -> None:
        self.manifests: dict[bytes, Manifest] = {}
        self.fetched = 0
        self.book = PlanBook(self._fetch)

    def _fetch(self, fingerprint: bytes) -> Manifest:
        self.fetched += 1
        return self.manifests[fingerprint]

    def rank(self, shards: Sequence[Shard], rules: Rules | None = None) -> RankLayout:
        nbytes = [max(8 * s.box.numel for s in shards) * len(shards)] * (
            1 + max(s.view.storage for s in shards)
        )
        manifest = Manifest.from_shards(shards, nbytes)
        self.manifests[manifest.fingerprint] = manifest
        return RankLayout(manifest.fingerprint, "host", rules_wire.encode(rules or Rules()))

    def instance(self, name: str, shards: Sequence[Shard], rules: Rules | None = None) -> InstanceLayout:
        return InstanceLayout(name, (self.rank(shards, rules),))


def whole(*names: str, dtype: str = "float32") -> list[Shard]:
    return [shard(n, (4, 2), (0, 0), (4, 2), storage=i, dtype=dtype) for i, n in enumerate(names)]


def test_one_instances_frozen_rule_never_hides_a_gap_in_another() -> None:
    shelf = Shelf()
    writers = [shelf.rank(whole("w"))]
    allows = shelf.instance("allows", whole("vision", "w"), Rules(frozen=("vision",)))
    silent = shelf.instance("silent", whole("vision", "w"))
    plan = shelf.book.plan(writers, [allows, silent])
    assert plan.instances == ("allows",)
    assert plan.names == ("w",)
    with pytest.raises(NameMismatchError) as caught:
        shelf.book.plan(writers, [allows, silent], "silent")
    assert (caught.value.tensor, caught.value.rank) == ("vision", "instance silent")
    assert shelf.book.plan(writers, [allows, silent], "allows") is plan


def test_one_instances_extras_never_hide_a_name_that_another_misses() -> None:
    shelf = Shelf()
    writers = [shelf.rank(whole("mtp", "w"))]
    allows = shelf.instance("allows", whole("w"), Rules(extras=("mtp",)))
    silent = shelf.instance("silent", whole("w"))
    assert shelf.book.plan(writers, [allows, silent]).instances == ("allows",)
    with pytest.raises(NameMismatchError, match="mtp"):
        shelf.book.plan(writers, [allows, silent], "silent")
    with pytest.raises(NameMismatchError, match="mtp"):
        shelf.book.check(writers, silent)
    shelf.book.check(writers, allows)


def test_a_misfit_without_rules_is_left_out_by_every_process_alike() -> None:
    shelf, other = Shelf(), Shelf()
    made = []
    for one in (shelf, other):
        writers = [one.rank(whole("w"))]
        good = one.instance("good", whole("w"))
        gap = one.instance("gap", [shard("w", (5, 2), (0, 0), (4, 2))])
        unknown = one.instance("unknown", whole("v"))
        made.append(one.book.plan(writers, [gap, good, unknown]))
        assert made[-1].id == one.book.plan(writers, [gap, good, unknown], "good").id
        with pytest.raises(LayoutError, match="two global shapes"):
            one.book.plan(writers, [gap, good, unknown], "gap")
        with pytest.raises(NameMismatchError):
            one.book.plan(writers, [gap, good, unknown], "unknown")
    assert made[0].id == made[1].id
    assert made[0].instances == ("good",)


def test_when_nobody_fits_the_first_says_why() -> None:
    shelf = Shelf()
    writers = [shelf.rank([shard("w", (6, 2), (0, 0), (4, 2))])]
    instances = [shelf.instance(name, [shard("w", (6, 2), (0, 0), (6, 2))]) for name in ("a", "b")]
    with pytest.raises(CoverageError) as caught:
        shelf.book.plan(writers, instances)
    assert caught.value.tensor == "w"
    with pytest.raises(CoverageError):
        shelf.book.plan(writers, instances[:1], "a")


def test_instances_that_narrow_to_different_dtypes_share_one_plan() -> None:
    shelf = Shelf()
    writers = [shelf.rank(whole("w"))]
    casts = {"bf16": "bfloat16", "fp16": "float16"}
    instances = [shelf.instance(n, whole("w", dtype=d), Rules(casts={"*": d})) for n, d in casts.items()]
    plan = shelf.book.plan(writers, instances)
    assert plan.instances == ("bf16", "fp16")
    assert list(plan.casts) == [("w", "float32", "bfloat16"), ("w", "float32", "float16")]
    undeclared = shelf.instance("wild", whole("w", dtype="bfloat16"))
    assert shelf.book.plan(writers, [*instances, undeclared]).instances == ("bf16", "fp16")
    with pytest.raises(UndeclaredCastError):
        shelf.book.plan(writers, [*instances, undeclared], "wild")


def test_aliases_that_contradict_leave_out_the_later_instance() -> None:
    shelf = Shelf()
    writers = [shelf.rank(whole("embed", "other"))]
    first = shelf.instance("a", whole("embed", "head", "other"), Rules(aliases={"head": "embed"}))
    second = shelf.instance("b", whole("embed", "head", "other"), Rules(aliases={"head": "other"}))
    assert shelf.book.plan(writers, [first, second]).instances == ("a",)
    with pytest.raises(LayoutError, match="two canonical names"):
        shelf.book.plan(writers, [first, second], "b")


def test_a_plan_is_made_once_and_old_ones_are_forgotten() -> None:
    shelf = Shelf()
    writers = [shelf.rank(whole("w"))]
    instances = [shelf.instance(f"i{n}", whole("w")) for n in range(6)]
    first = shelf.book.plan(writers, instances[:1])
    fetched = shelf.fetched
    assert shelf.book.plan(writers, instances[:1]) is first
    assert shelf.fetched == fetched
    for count in range(2, 7):
        shelf.book.plan(writers, instances[:count])
    again = shelf.book.plan(writers, instances[:1])
    assert again is not first
    assert again.id == first.id


def test_past_32_bits_by_metadata_only() -> None:  # B100
    shape, cut = (70_000, 70_000), (0, 23_334, 46_668, 70_000)
    shelf = Shelf()
    boxes = list(itertools.pairwise(cut))
    manifests = [
        Manifest.from_shards(
            [shard("w", shape, (a, 0), (b - a, 70_000), dtype="bfloat16")], [(b - a) * 70_000 * 2]
        )
        for a, b in boxes
    ]
    quarters = [
        Manifest.from_shards([shard("w", shape, (0, c), (70_000, 17_500), dtype="bfloat16")], [2_450_000_000])
        for c in range(0, 70_000, 17_500)
    ]
    for manifest in (*manifests, *quarters):
        again = Manifest.decode(manifest.encode())
        shelf.manifests[again.fingerprint] = again
    writers = [RankLayout(one.fingerprint, "host") for one in manifests]
    ranks = tuple(RankLayout(one.fingerprint, "host") for one in quarters)
    plan = shelf.book.plan(writers, [InstanceLayout("a", ranks)])
    hops = [plan.reader("a", rank) for rank in range(4)]
    assert [int(one.nbytes.sum()) for one in hops] == [2_450_000_000] * 4
    assert sum(int(plan.writer(rank).nbytes.sum()) for rank in range(3)) == 9_800_000_000
    for column, one in enumerate(hops):
        for row in range(len(one)):
            box = Box(tuple(one.offset[row].tolist()), tuple(one.size[row].tolist()))
            source = boxes[int(one.src[row])][0]
            assert int(one.src_base[row]) == (box.offset[0] - source) * 70_000 + box.offset[1]
            assert int(one.dst_base[row]) == box.offset[0] * 17_500 + box.offset[1] - column * 17_500
