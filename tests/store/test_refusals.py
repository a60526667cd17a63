"""What does not fit is refused by name before a byte moves, and leaves both sides as they were."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from syncline.errors import (
    CoverageError,
    LayoutError,
    MemoryBudgetError,
    NameMismatchError,
    ProtocolError,
    ReplicaDivergenceError,
    ShapeMismatchError,
    SynclineError,
    UndeclaredCastError,
)
from syncline.layout import Rules
from syncline.memory import adopt
from syncline.memory.budget import Sources
from syncline.options import Options
from tests.store.pair import OPTIONS, Engine, Trainer, blank, module, shard, stamped

if TYPE_CHECKING:
    from pathlib import Path

    from tests.store.pair import Job

PLAIN = {"w": stamped(4, 6), "b": stamped(6, start=100)}


def untouched(engine: Engine) -> bool:
    """Whether nothing was received and the engine was never stopped."""
    received = any(bool((t.float() != -1).any()) for t in engine.live_tensors().values())
    return not received and not engine.paused and "pause" not in engine.calls


def refuse(job: Job, kind: type[SynclineError], engine: Engine, **rest: object) -> SynclineError:
    """Return how a reader is refused when it joins."""
    with pytest.raises(kind) as caught:
        job.reader(engine, **rest)
    assert untouched(engine)
    return caught.value


# --- names: B24 and B25


def test_a_prefix_that_the_reader_does_not_know_is_counted_and_sampled(job: Job) -> None:
    job.writer(Trainer(module({f"model.language_model.{n}": t for n, t in PLAIN.items()})))
    error = refuse(job, NameMismatchError, Engine(module({f"model.{n}": t for n, t in blank(PLAIN).items()})))
    assert "received 2, applied 0, missing 2" in error.what
    assert (
        "2 sent names that no rank wants, e.g. model.language_model.b, model.language_model.w" in error.found
    )
    assert "2 reader names that nobody sends, e.g. model.b, model.w" in error.found


def test_many_sent_names_that_nobody_wants_fail_unless_declared(job: Job) -> None:
    names = {f"layers.{i}.w": stamped(2, start=10 * i) for i in range(113)}
    writer = job.writer(Trainer(module(names)))
    target = {"layers.7.w": torch.full((2,), -1.0)}
    error = refuse(job, NameMismatchError, Engine(module(target)))
    assert "received 113, applied 1, missing 0" in error.what
    assert "112 sent names" in error.found
    engine = Engine(module(target))
    reader = job.reader(engine, rules=Rules(extras=("layers.*",)))
    writer.publish(1)
    report = reader.update(1)
    assert engine.live_tensors()["layers.7.w"].tolist() == [70.0, 71.0]
    assert (report.nbytes, report.tensors) == (8, 1)


def test_reader_names_that_nobody_sends_fail_unless_frozen_and_then_stay_as_they_are(job: Job) -> None:
    writer = job.writer(Trainer(module(PLAIN)))
    both = blank(PLAIN) | {"vision.tower": torch.full((3,), -1.0)}
    error = refuse(job, NameMismatchError, Engine(module(both)))
    assert "applied 2, missing 1" in error.what
    assert "1 reader names that nobody sends, e.g. vision.tower" in error.found
    assert (error.tensor, error.rank) == ("vision.tower", "instance a")
    engine = Engine(module(both))
    reader = job.reader(engine, rules=Rules(frozen=("vision.*",)))
    writer.publish(1)
    reader.update(1)
    live = engine.live_tensors()
    assert all(torch.equal(live[n], t) for n, t in PLAIN.items())
    assert live["vision.tower"].tolist() == [-1.0] * 3
    assert engine.received == set(PLAIN)  # what a hook of the frozen tower goes by


TOWERS = {
    "model.language.w": stamped(4, 3),
    "model.vision.w": stamped(2, 3, start=100),
    "model.vision.norm": stamped(3, start=200),
    "model.merger.w": stamped(3, 2, start=300),
}


def test_a_trainer_of_the_text_tower_feeds_a_reader_of_all_by_declaration_only(job: Job) -> None:  # B26
    text = {"model.language.w": TOWERS["model.language.w"]}
    writer = job.writer(Trainer(module(text)))
    error = refuse(job, NameMismatchError, Engine(module(blank(TOWERS))))
    assert "applied 1, missing 3" in error.what
    engine = Engine(module(blank(TOWERS)))
    reader = job.reader(engine, rules=Rules(frozen=("model.vision.*", "model.merger.*")))
    for number in (1, 2):
        writer.publish(number)
        report = reader.update(number)
        assert report.tensors == 1
        for name, tensor in engine.live_tensors().items():
            assert torch.equal(tensor, text.get(name, torch.full_like(tensor, -1))), name


def test_a_trainer_of_all_towers_feeds_readers_of_all_and_of_one(job: Job) -> None:  # B26
    writer = job.writer(Trainer(module(TOWERS)))
    whole, text = Engine(module(blank(TOWERS))), Engine(module({"model.language.w": torch.zeros(4, 3)}))
    readers = [
        job.reader(whole, instance="whole"),
        job.reader(text, instance="text", rules=Rules(extras=("model.vision.*", "model.merger.*"))),
    ]
    writer.publish(1)
    assert [reader.update(1).tensors for reader in readers] == [4, 1]
    for engine in (whole, text):
        assert all(torch.equal(t, TOWERS[n]) for n, t in engine.live_tensors().items())


def test_an_update_of_a_misfit_that_skipped_the_check_raises_and_changes_nothing(job: Job) -> None:
    writer = job.writer(Trainer(module(PLAIN)))
    engine = Engine(module({f"model.{n}": t for n, t in blank(PLAIN).items()}))
    reader = job.reader(engine, check=False)
    writer.publish(1)
    with pytest.raises(NameMismatchError, match="received 2, applied 0, missing 2") as caught:
        reader.update(1, timeout=5.0)
    assert "2 reader names that nobody sends, e.g. model.b, model.w" in caught.value.found
    assert reader.committed is None
    assert not reader.dirty
    assert not engine.paused
    assert all(bool((t == -1).all()) for t in engine.live_tensors().values())


# --- shapes and dtypes


def test_the_same_name_with_another_shape_is_refused_with_both(job: Job) -> None:
    job.writer(Trainer(module(PLAIN)))
    error = refuse(job, ShapeMismatchError, Engine(module(blank(PLAIN) | {"w": torch.full((4, 5), -1.0)})))
    assert error.tensor == "w"
    assert "(4, 6), as writer 0 says" in error.expected
    assert error.found == "(4, 5)"


def test_a_narrowing_cast_must_be_declared_and_then_rounds_as_torch_does(job: Job) -> None:
    values = {"w": torch.randn(9, 7), "lm_head.weight": torch.randn(5, 7), "n": torch.randn(3).bfloat16()}
    writer = job.writer(Trainer(module(values)))
    target = {
        "w": torch.full((9, 7), -1, dtype=torch.bfloat16),
        "lm_head.weight": torch.full((5, 7), -1.0),
        "n": torch.full((3,), -1.0),
    }
    error = refuse(job, UndeclaredCastError, Engine(module(target)))
    assert error.tensor == "w"
    assert "float32, as the writers store it" in error.expected
    assert error.found == "bfloat16"
    wrong = {"w": "float16"}
    refuse(job, UndeclaredCastError, Engine(module(target)), rules=Rules(casts=wrong))
    for number, rules in enumerate((Rules(casts={"w": "bfloat16"}), Rules(casts="reader")), 1):
        engine = Engine(module({n: t.clone() for n, t in target.items()}))
        reader = job.reader(engine, instance=f"declared-{number}", rules=rules)
        writer.publish(number)
        report = reader.update(number, verify="installed")
        live = engine.live_tensors()
        assert torch.equal(live["w"], values["w"].bfloat16())
        assert torch.equal(live["lm_head.weight"], values["lm_head.weight"])
        assert torch.equal(live["n"], values["n"].float())
        assert report.level == "installed"
        reader.close()


def test_a_rule_per_name_decides_what_travels_in_which_dtype(job: Job) -> None:  # B36
    values = {"lm_head.weight": torch.randn(5, 7), "a.w": torch.randn(4, 7), "b.w": torch.randn(2, 2)}
    writer = job.writer(Trainer(module(values)))
    dtypes = {"lm_head.weight": torch.float32, "a.w": torch.bfloat16, "b.w": torch.bfloat16}
    target = {n: torch.full(t.shape, -1, dtype=dtypes[n]) for n, t in values.items()}
    rules = Rules(casts={"lm_head.*": "float32", "*": "bfloat16"})
    swapped = {n: t.to(torch.bfloat16) for n, t in target.items()}
    error = refuse(job, UndeclaredCastError, Engine(module(swapped)), rules=rules)
    assert error.tensor == "lm_head.weight"
    model = module(target)
    copies: list[torch.Tensor] = []
    hook = lambda live: copies.append(live.lm_head.weight.double().clone())  # noqa: E731 - a cached copy
    engine = Engine(model, after_update=hook)
    reader = job.reader(engine, rules=rules)
    writer.publish(1)
    report = reader.update(1)
    live = engine.live_tensors()
    assert {n: t.dtype for n, t in live.items()} == dtypes
    assert all(torch.equal(live[n], t.to(dtypes[n])) for n, t in values.items())
    assert report.nbytes == 35 * 4 + (28 + 4) * 2
    assert len(copies) == 1
    assert torch.equal(copies[0], values["lm_head.weight"].double())


def test_contradicting_rules_of_the_two_sides_are_named(job: Job) -> None:
    job.writer(Trainer(module(PLAIN)), rules=Rules(casts={"*": "bfloat16"}))
    half = {n: t.to(torch.float16) for n, t in blank(PLAIN).items()}
    error = refuse(job, LayoutError, Engine(module(half)), rules=Rules(casts={"*": "float16"}))
    assert "two dtypes" in error.what


# --- coverage


def test_a_gap_is_named_with_its_box(job: Job) -> None:
    parts = [shard("w", (10, 4), (at, 0), (n, 4)) for at, n in ((0, 4), (6, 4))]
    for rank, part in enumerate(parts):
        job.writer(Trainer(module({"w": stamped(4, 4)}), shards=[part], rank=rank, world=2))
    error = refuse(job, CoverageError, Engine(module({"w": torch.full((10, 4), -1.0)})))
    assert error.tensor == "w"
    assert "4" in str(error)
    assert "6" in str(error)


def test_a_reader_that_does_not_want_the_gap_is_fed(job: Job) -> None:
    parts = [shard("w", (10, 4), (at, 0), (n, 4)) for at, n in ((0, 4), (6, 4))]
    writers = [
        job.writer(Trainer(module({"w": stamped(4, 4, start=100 * rank)}), shards=[part], rank=rank, world=2))
        for rank, part in enumerate(parts)
    ]
    engine = Engine(module({"w": torch.full((3, 4), -1.0)}), shards=[shard("w", (10, 4), (7, 0), (3, 4))])
    reader = job.reader(engine)
    for writer in writers:
        writer.publish(1)
    reader.update(1)
    assert torch.equal(engine.live_tensors()["w"], stamped(4, 4, start=100)[1:])


def test_writers_that_overlap_without_being_replicas_are_refused(job: Job) -> None:
    parts = [shard("w", (6, 4), (at, 0), (4, 4)) for at in (0, 2)]
    for rank, part in enumerate(parts):
        job.writer(Trainer(module({"w": stamped(4, 4)}), shards=[part], rank=rank, world=2))
    error = refuse(job, CoverageError, Engine(module({"w": torch.full((6, 4), -1.0)})))
    assert error.tensor == "w"
    assert "writer" in str(error)


def test_a_destination_of_stride_zero_is_refused(job: Job) -> None:
    job.writer(Trainer(module({"w": stamped(3, 4)})))
    engine = Engine(
        module({"w": torch.full((4,), -1.0)}), shards=[shard("w", (3, 4), (0, 0), (3, 4), stride=(0, 1))]
    )
    assert refuse(job, CoverageError, engine).tensor == "w"


def test_two_boxes_into_the_same_bytes_are_refused(job: Job) -> None:
    job.writer(Trainer(module({"w": stamped(4, 4)})))
    parts = [shard("w", (4, 4), (at, 0), (2, 4)) for at in (0, 2)]
    engine = Engine(module({"w": torch.full((2, 4), -1.0)}), shards=parts)
    assert refuse(job, CoverageError, engine).tensor == "w"


def test_replicas_with_different_contents_are_named_and_nothing_is_committed(job: Job) -> None:
    values = stamped(4, 4), stamped(4, 4)
    values[1][3, 3] += 1
    writers = [job.writer(Trainer(module({"w": v}), rank=rank, world=2)) for rank, v in enumerate(values)]
    engine = Engine(module({"w": torch.full((4, 4), -1.0)}))
    reader = job.reader(engine)
    for writer in writers:
        writer.publish(1)
    with pytest.raises(ReplicaDivergenceError, match="writers 0 and 1 declare replicas") as caught:
        reader.update(1)
    assert (caught.value.tensor, caught.value.rank) == ("w", "writer 1")
    assert reader.committed is None
    assert engine.paused  # bytes were written, so nothing may be served
    values[1].copy_(values[0])
    for writer in writers:
        writer.publish(2)
    assert reader.update(2).key.number == 2
    assert torch.equal(engine.live_tensors()["w"], values[0])
    assert not engine.paused


# --- options and memory


def test_a_library_option_that_differs_is_refused_by_name(job: Job) -> None:  # B90
    job.writer(Trainer(module(PLAIN)))
    other = Options(**{**OPTIONS, "transport": "gloo"})
    error = refuse(job, ProtocolError, Engine(module(blank(PLAIN))), options=other)
    assert "option transport differs" in error.what
    assert error.expected == "auto as writer 0 has it"
    assert error.found == "gloo"
    job.reader(Engine(module(blank(PLAIN))))


def test_too_little_memory_is_said_before_a_parameter_moves(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 4 kB\n")
    (proc / "self" / "cgroup").write_text("")
    poor = Sources(proc=proc, cgroup=tmp_path / "none", shm=tmp_path / "none")
    values = {"w": stamped(64, 64), "b": stamped(8)}
    model = module(values)
    places = {n: p.data_ptr() for n, p in model.named_parameters()}
    with monkeypatch.context() as patch:
        patch.setattr(adopt.Adoption.__init__, "__defaults__", (None, poor))
        with pytest.raises(MemoryBudgetError) as caught:
            job.writer(Trainer(model))
    assert caught.value.expected == "16384 bytes needed"
    assert caught.value.found == "4096 bytes free, limited by MemAvailable of the machine"
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == places
    assert torch.equal(model.w, stamped(64, 64))
    writer = job.writer(Trainer(model))  # with memory the same process can try again
    engine = Engine(module(blank(values)))
    reader = job.reader(engine)
    writer.publish(1)
    reader.update(1)
    assert torch.equal(engine.live_tensors()["w"], values["w"])
