"""Engines that make something else of their weights: they take them in stages, through one small memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from syncline.errors import AdapterError, DigestMismatchError
from syncline.faults import arm
from syncline.layout.manifest import Manifest
from syncline.memory.binding import Binding
from syncline.store.adapter import Stage
from syncline.store.pull import staged_rows
from tests.store.pair import Engine, Trainer, module, shard, stamped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.store.pair import Job

SHAPES = {"a": (6, 4), "b": (3, 4), "c": (5, 4), "d": (2, 4)}
STAGES = (Stage("direct", (0,)), Stage("layer 1", (1,)), Stage("layer 2", (2, 3)))


class Transposing(Engine):
    """Keeps ``a`` as it comes, and the others transposed: what it receives is not what it computes with."""

    def __init__(self, stages: Sequence[Stage] = STAGES) -> None:
        super().__init__(module({"a": torch.full(SHAPES["a"], -1.0)}))
        self.stages = tuple(stages)
        sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
        self.live = {name: torch.zeros(shape[::-1]) for name, shape in SHAPES.items() if name != "a"}
        self.arena = torch.zeros(max(sizes[1], sizes[2] + sizes[3]))
        shards = [
            shard(name, shape, (0, 0), shape, storage=i) for i, (name, shape) in enumerate(SHAPES.items())
        ]
        self.manifest = Manifest.from_shards(shards, [4 * size for size in sizes])
        base = self.arena.data_ptr()
        places = [self.model.get_parameter("a").data_ptr(), base, base, base + 4 * sizes[2]]
        self._staged = Binding.private(self.manifest.fingerprint, places)

    def binding(self) -> Binding:
        return self._staged

    def begin_stage(self, index: int) -> None:
        self.calls.append(f"begin {self.stages[index].name}")
        if index:
            self.arena.fill_(float("nan"))

    def end_stage(self, index: int) -> None:
        self.calls.append(f"end {self.stages[index].name}")
        at = 0
        for storage in self.stages[index].storages if index else ():
            name = list(SHAPES)[storage]
            rows, columns = SHAPES[name]
            self.live[name].copy_(self.arena[at : at + rows * columns].view(rows, columns).t())
            at += rows * columns


def started(job: Job, engine: Engine) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    tensors = {name: stamped(*shape) for name, shape in SHAPES.items()}
    trainer = Trainer(module(tensors))
    writer, reader = job.writer(trainer), job.reader(engine)
    live = {name: p.detach() for name, p in trainer.model.named_parameters()}
    return writer, reader, live


@pytest.mark.parametrize("level", ["none", "delivered", "installed"])
def test_every_stage_is_received_proved_and_handed_over_before_the_next(job: Job, level: str) -> None:
    engine = Transposing()
    writer, reader, sent = started(job, engine)
    for number in (1, 2):
        engine.calls.clear()
        with writer.adapter.mutation("a step"):
            for tensor in sent.values():
                tensor.mul_(number + 1.5)
        writer.publish(number)
        report = reader.update(number, verify=level)
        staged = [f"{what} {stage.name}" for stage in STAGES for what in ("begin", "end")]
        assert engine.calls[: 1 + len(staged)] == ["pause", *staged]
        assert report.nbytes == sum(4 * t.numel() for t in sent.values())
        assert torch.equal(engine.model.get_parameter("a"), sent["a"])
        for name, live in engine.live.items():
            assert torch.equal(live, sent[name].t())


def test_bytes_that_are_not_the_published_ones_never_reach_the_engine(job: Job) -> None:
    engine = Transposing()
    writer, reader, _sent = started(job, engine)
    writer.publish(1)

    def spoil() -> None:
        if "begin layer 1" in engine.calls:
            engine.arena[0] += 1.0

    with arm("shm.after_last_byte", spoil), pytest.raises(DigestMismatchError, match="tensor: b"):
        reader.update(1, verify="installed")
    assert "end layer 1" not in engine.calls
    assert reader.dirty
    assert engine.paused
    reader.update(1)
    assert not reader.dirty


def test_an_engine_that_refuses_a_stage_stays_dirty_until_a_full_update(job: Job) -> None:
    engine = Transposing()
    writer, reader, sent = started(job, engine)
    writer.publish(1)
    end = engine.end_stage

    def refuse(index: int) -> None:
        if index == 2:
            raise AdapterError("cannot process this layer", tensor="c")
        end(index)

    engine.end_stage = refuse
    with pytest.raises(AdapterError, match="cannot process"):
        reader.update(1)
    assert reader.dirty
    engine.end_stage = end
    reader.update(1)
    assert torch.equal(engine.live["c"], sent["c"].t())


@pytest.mark.parametrize(
    ("stages", "complaint"),
    [
        ((Stage("one", (0, 1)), Stage("two", (1, 2, 3))), "in two stages"),
        ((Stage("one", (0, 1)), Stage("two", (3,))), "in no stage"),
    ],
)
def test_stages_are_a_partition_of_the_storages(job: Job, stages: tuple[Stage, ...], complaint: str) -> None:
    engine = Transposing(stages)
    writer, reader, _sent = started(job, engine)
    writer.publish(1)
    with pytest.raises(AdapterError, match=complaint):
        reader.update(1)
    assert not torch.equal(engine.model.get_parameter("a"), stamped(*SHAPES["a"]))


def test_rows_of_stages_keep_the_order_of_hops() -> None:
    class Hops:
        dst_storage = np.array([3, 0, 1, 3, 2], np.int32)

    found = staged_rows(Hops(), STAGES)  # type: ignore[arg-type]
    assert [rows.tolist() for rows in found] == [[1], [2], [0, 3, 4]]
