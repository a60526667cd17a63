"""Several instances of one writer: each is its own, and none spoils anything for another."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from syncline import faults
from syncline.errors import LayoutError, NameMismatchError, RemoteError, SynclineError
from syncline.layout import Rules
from tests.store.pair import Engine, Trainer, blank, module, shard, stamped

if TYPE_CHECKING:
    from syncline.memory import Binding
    from tests.store.pair import Job

VALUES = {"w": stamped(6, 4), "b": stamped(4, start=300)}


def engine(dtype: torch.dtype = torch.float32) -> Engine:
    return Engine(module({name: t.to(dtype) for name, t in blank(VALUES).items()}))


def holds(one: Engine, by: float = 0.0) -> bool:
    return all(torch.equal(t, (VALUES[n] + by).to(t.dtype)) for n, t in one.live_tensors().items())


def test_a_misfit_disturbs_neither_the_trainer_nor_its_neighbours(job: Job) -> None:
    model = module({n: t.clone() for n, t in VALUES.items()})
    writer = job.writer(Trainer(model))
    good = engine()
    reader = job.reader(good, instance="good")
    misfit = Engine(module({"model.w": torch.full((6, 4), -1.0)}))
    other = job.reader(misfit, instance="misfit", check=False)
    for number in (1, 2):
        publication = writer.publish(number)
        assert publication.wait().number == number  # not given up
        assert reader.update(number).key.number == number
        assert holds(good, by=number - 1.0)
        with pytest.raises(NameMismatchError, match="received 2, applied 0, missing 1") as caught:
            other.update(number, timeout=5.0)
        assert caught.value.rank == "instance misfit"
        assert (other.committed, other.dirty, misfit.paused) == (None, False, False)
        assert bool((misfit.live_tensors()["model.w"] == -1).all())
        with writer.adapter.mutation("step"):
            for p in model.parameters():
                p.data.add_(1.0)


def test_a_misfit_alone_does_not_stop_the_trainer(job: Job) -> None:
    writer = job.writer(Trainer(module(VALUES)))
    misfit = job.reader(Engine(module({"v": torch.full((1,), -1.0)})), instance="misfit", check=False)
    for number in (1, 2):
        writer.publish(number).wait()
        with pytest.raises(NameMismatchError):
            misfit.update(number, timeout=5.0)
        writer.close_window()


def test_one_frozen_rule_does_not_hide_anothers_gap(job: Job) -> None:
    writer = job.writer(Trainer(module(VALUES)))
    both = blank(VALUES) | {"vision": torch.full((2,), -1.0)}
    tower = Engine(module({n: t.clone() for n, t in both.items()}))
    allowed = job.reader(tower, instance="allowed", rules=Rules(frozen=("vision",)))
    with pytest.raises(NameMismatchError, match="missing 1"):
        job.reader(Engine(module({n: t.clone() for n, t in both.items()})), instance="silent")
    late = job.reader(Engine(module(both)), instance="silent", check=False)
    writer.publish(1)
    allowed.update(1)
    with pytest.raises(NameMismatchError, match="missing 1"):
        late.update(1, timeout=5.0)
    assert torch.equal(tower.live_tensors()["w"], VALUES["w"])
    assert bool((tower.live_tensors()["vision"] == -1).all())


def test_instances_of_three_dtypes_are_fed_by_one_publish(job: Job) -> None:
    writer = job.writer(Trainer(module(VALUES)))
    engines = {d: engine(d) for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
    readers = []
    for number, (dtype, one) in enumerate(engines.items()):
        name = str(dtype).removeprefix("torch.")
        rules = Rules(casts={"*": name}) if dtype.itemsize == 2 else None
        readers.append(job.reader(one, instance=f"i{number}", rules=rules))
    publication = writer.publish(1)
    reports = [reader.update(1, verify="installed") for reader in readers]
    assert publication.wait_committed() == ("i0", "i1", "i2", "i3")
    assert all(holds(one) for one in engines.values())
    assert [report.nbytes for report in reports] == [112, 56, 56, 224]


def test_strictly_on_policy_publishing_waits_for_every_instance(job: Job) -> None:
    writer = job.writer(Trainer(module(VALUES)))
    engines = [engine(), engine()]
    readers = [job.reader(one, instance=f"i{n}") for n, one in enumerate(engines)]
    followers = [reader.follow() for reader in readers]
    for number in (1, 2, 3):
        writer.publish(number, wait="committed")
        assert [str(reader.committed) for reader in readers] == [f"1.{number}"] * 2
        assert [str(one.version) for one in engines] == [f"1.{number}"] * 2
    assert all(follower.error is None for follower in followers)
    assert all(holds(one) for one in engines)


def test_strict_publishing_names_the_instance_that_failed_and_why(job: Job) -> None:
    writer = job.writer(Trainer(module(VALUES)))
    readers = [job.reader(engine(), instance=name) for name in ("good", "sick")]
    failed: list[SynclineError] = []

    def fail() -> None:
        if threading.current_thread().name.endswith("instance sick, rank 0"):
            raise LayoutError("the disk is on fire")

    def update(one: object) -> None:
        try:
            one.update(1, timeout=10.0)
        except SynclineError as error:
            failed.append(error)

    with faults.arm("worker.before_verified", fail):
        threads = [threading.Thread(target=update, args=(one,)) for one in readers]
        for thread in threads:
            thread.start()
        with pytest.raises(RemoteError, match="1 instances failed") as caught:
            writer.publish(1, wait="committed")
        for thread in threads:
            thread.join()
    assert "instance sick" in caught.value.found
    assert "the disk is on fire" in caught.value.found
    assert [type(error) for error in failed] == [LayoutError]
    assert str(readers[0].committed) == "1.1"
    assert readers[1].committed is None
    assert readers[1].dirty
    readers[1].update(1)
    assert not readers[1].dirty


def test_two_writers_feed_three_ranks_and_a_whole_one(job: Job) -> None:
    full = stamped(9, 4)
    parts = [(0, 4), (4, 5)]
    models = [module({"w": full[a : a + n].clone()}) for a, n in parts]
    writers = [
        job.writer(Trainer(m, shards=[shard("w", (9, 4), (a, 0), (n, 4))], rank=r, world=2))
        for r, (m, (a, n)) in enumerate(zip(models, parts, strict=True))
    ]
    ranks = [
        Engine(
            module({"w": torch.full((3, 4), -1.0)}),
            shards=[shard("w", (9, 4), (3 * r, 0), (3, 4))],
            rank=r,
            world=3,
        )
        for r in range(3)
    ]
    for one in ranks[1:]:
        job.worker(one, "three")
    readers = [
        job.reader(ranks[0], "three"),
        job.reader(Engine(module({"w": torch.full((9, 4), -1.0)})), "one"),
    ]
    for number in (1, 2):
        for model in models:
            model.w.data.add_(100.0)
        for writer in writers:
            writer.publish(number)
        reports = [reader.update(number) for reader in readers]
        assert torch.equal(torch.cat([one.live_tensors()["w"] for one in ranks]), full + 100.0 * number)
        assert torch.equal(readers[1].adapter.live_tensors()["w"], full + 100.0 * number)
        assert [report.nbytes for report in reports] == [144, 144]
        for writer in writers:
            writer.close_window()


def test_a_reader_that_leaves_is_not_waited_for(job: Job) -> None:
    writer = job.writer(Trainer(module(VALUES)))
    stays, leaves = job.reader(engine(), instance="stays"), job.reader(engine(), instance="leaves")
    stays.follow()
    leaves.close()
    assert writer.publish(1, wait="committed").wait_committed() == ("stays",)
    assert str(stays.committed) == "1.1"


def _halves(job: Job) -> list[Engine]:
    ranks = [
        Engine(
            module({"w": torch.full((3, 4), -1.0)}),
            shards=[shard("w", (6, 4), (3 * r, 0), (3, 4))],
            rank=r,
            world=2,
        )
        for r in range(2)
    ]
    job.worker(ranks[1], "pair")
    return ranks


def test_a_rank_that_cannot_take_part_fails_before_any_other_has_written(job: Job) -> None:
    writer = job.writer(Trainer(module({"w": VALUES["w"].clone()})))
    ranks = _halves(job)
    reader = job.reader(ranks[0], "pair")
    writer.publish(1)

    def offloaded() -> None:
        if threading.current_thread().name.endswith("instance pair, rank 1"):
            raise LayoutError("rank 1 has no memory now")

    with (
        faults.arm("worker.before_bind", offloaded),
        pytest.raises(LayoutError, match="rank 1 has no memory now"),
    ):
        reader.update(1)
    assert not reader.dirty
    assert all(bool((one.live_tensors()["w"] == -1).all()) for one in ranks)
    reader.update(1)
    assert all(torch.equal(one.live_tensors()["w"], VALUES["w"][3 * one.rank :][:3]) for one in ranks)


def test_a_writer_rests_while_readers_of_its_memory_pull(job: Job) -> None:
    trainer = Trainer(module({"w": VALUES["w"].clone()}))
    writer = job.writer(trainer)
    reader = job.reader(_halves(job)[0], "pair")
    asked: list[str] = []
    binding = trainer.binding

    def counted() -> Binding:
        asked.append(threading.current_thread().name)
        return binding()

    trainer.binding = counted  # type: ignore[method-assign]
    for number in (1, 2):
        writer.publish(number).wait()
        asked.clear()
        reader.update(number)
        assert asked == []
