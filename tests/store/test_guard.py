"""An instance that became a mixture while nobody updated it must not go on serving."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from tests.store.pair import Engine, Trainer, module, shard, stamped

if TYPE_CHECKING:
    from tests.store.pair import Job


def half(rank: int) -> Engine:
    tensors = module({"w": torch.full((3, 4), -1.0)})
    return Engine(tensors, shards=[shard("w", (6, 4), (3 * rank, 0), (3, 4))], rank=rank, world=2)


def becomes(engine: Engine, *, paused: bool, within: float = 10.0) -> bool:
    until = time.monotonic() + within
    while engine.paused != paused and time.monotonic() < until:
        time.sleep(0.02)
    return engine.paused == paused


def test_a_rank_that_is_replaced_between_updates_pauses_the_engine_until_the_next(job: Job) -> None:
    writer = job.writer(Trainer(module({"w": stamped(6, 4)})))
    first, second = half(0), half(1)
    old = job.worker(second)
    reader = job.reader(first)
    writer.publish(1)
    reader.update(1)
    assert (first.paused, reader.dirty) == (False, False)
    old.close()
    assert not reader.dirty  # whoever left took nothing along
    assert not first.paused
    third = half(1)
    job.worker(third)
    assert becomes(first, paused=True)
    assert reader.dirty
    report = reader.update(1)  # the same version again: it makes the instance whole
    assert report.changed
    assert (first.paused, reader.dirty) == (False, False)
    assert torch.equal(torch.cat([e.live_tensors()["w"] for e in (first, third)]), stamped(6, 4))


def test_the_engine_is_watched_again_after_it_was_made_whole(job: Job) -> None:
    writer = job.writer(Trainer(module({"w": stamped(6, 4)})))
    first = half(0)
    worker = job.worker(half(1))
    reader = job.reader(first)
    writer.publish(1)
    reader.update(1)
    for _ in range(2):
        worker.close()
        worker = job.worker(half(1))
        assert becomes(first, paused=True)
        reader.update(1)
        assert not first.paused


def test_updates_that_succeed_leave_the_engine_running(job: Job) -> None:
    model = module({"w": stamped(6, 4)})
    writer = job.writer(Trainer(model))
    first = half(0)
    job.worker(half(1))
    reader = job.reader(first)
    for number in range(1, 6):
        writer.publish(number)
        reader.update(number)
        with writer.adapter.mutation("step"):
            model.w.data.add_(1.0)
    assert not first.paused
    assert first.calls.count("pause") == 5  # nobody else paused it
