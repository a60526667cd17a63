"""One update: what the engine is told and when, what is proved and reported, and what a failure leaves."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from syncline import faults
from syncline.errors import (
    AdapterError,
    DigestMismatchError,
    StaleVersionError,
    SynclineError,
    TransportError,
    UnknownVersionError,
)
from syncline.meta.client import MetaClient
from syncline.transport.running import Running
from syncline.transport.shm_program import ShmProgram
from tests.store.pair import OPTIONS, Engine, Job, Trainer, blank, module, shard, stamped

if TYPE_CHECKING:
    from syncline.protocol.messages import Message
    from syncline.store.reader import WeightReader
    from syncline.store.writer import WeightWriter

VALUES = {"a.w": stamped(6, 4), "b.w": stamped(5, start=500)}
NBYTES = (24 + 5) * 4


class Pair:
    """A writer and a reader of `VALUES`, joined."""

    def __init__(self, job: Job, **engine: Any) -> None:
        rest = engine.pop("reader", {})
        self.trained = module({n: t.clone() for n, t in VALUES.items()})
        self.served = module(blank(VALUES))
        self.writer: WeightWriter = job.writer(Trainer(self.trained))
        self.engine = Engine(self.served, **engine)
        self.reader: WeightReader = job.reader(self.engine, **rest)

    def step(self, number: int, by: float = 1.0) -> None:
        """Change every weight, as an optimizer would, and publish."""
        with self.writer.adapter.mutation("step"):
            for p in self.trained.parameters():
                p.data.add_(by)
        self.writer.publish(number)

    @property
    def equal(self) -> bool:
        both = zip(self.trained.parameters(), self.served.parameters(), strict=True)
        return all(torch.equal(a, b) for a, b in both)


# --- the engine


def test_the_engine_is_told_each_step_once_and_in_order(job: Job) -> None:
    pair = Pair(job)
    for number in (1, 2):
        pair.engine.calls.clear()
        pair.step(number)
        key = pair.reader.update(number).key
        told = [f"after_update {key}", f"report {key}"]
        assert pair.engine.calls == ["pause", *told, "flush", f"resume {key}"]
        assert pair.equal
        pair.engine.calls.clear()
        again = pair.reader.update(number)
        assert (again.changed, again.nbytes, again.key, again.level) == (False, 0, key, "none")
        assert pair.engine.calls == []


def test_caches_are_flushed_after_the_commit_and_before_serving(job: Job) -> None:
    states: list[tuple[object, bool, bool]] = []

    def flush() -> None:
        states.append((pair.reader.committed, pair.engine.paused, pair.equal))

    pair = Pair(job, flush=flush)
    pair.step(1)
    key = pair.reader.update(1).key
    assert states == [(key, True, True)]


def test_caches_that_could_not_be_flushed_are_flushed_before_the_engine_serves(job: Job) -> None:
    flushed: list[bool] = []

    def flush() -> None:
        flushed.append(pair.engine.paused)
        if len(flushed) == 1:
            raise RuntimeError("cache busy")

    pair = Pair(job, flush=flush)
    pair.step(1)
    with pytest.raises(RuntimeError, match="cache busy"):
        pair.reader.update(1)
    assert pair.engine.paused
    assert str(pair.reader.committed) == "1.1"  # decided and applied: only serving waits
    assert not pair.reader.update(1).changed
    assert flushed == [True, True]
    assert not pair.engine.paused
    assert pair.equal


def test_forward_passes_meet_whole_versions_only(job: Job) -> None:
    pair = Pair(job)
    pair.step(1)
    pair.reader.update(1)
    seen = []
    with faults.arm("worker.before_first_byte", lambda: seen.append(pair.engine.paused)):
        pair.step(2)
        pair.reader.update(2)
    assert seen == [True]
    with pair.engine.forward(1.0):
        assert pair.equal
    assert str(pair.engine.version) == "1.2"


def test_the_post_load_hook_recomputes_once_a_version_and_is_a_phase_of_its_own(job: Job) -> None:  # B32
    cached: dict[str, torch.Tensor] = {}
    calls: list[float] = []

    def hook(model: nn.Module) -> None:
        calls.append(float(model.a.w[0, 0]))
        time.sleep(0.2)
        cached["product"] = model.a.w.sum() * model.b.w

    pair = Pair(job, after_update=hook)
    pair.step(1)
    report = pair.reader.update(1)
    assert torch.equal(cached["product"], pair.trained.a.w.sum() * pair.trained.b.w)
    assert report.seconds["apply"] >= 0.2
    assert report.seconds["pull"] < report.seconds["total"]
    assert report.paused >= report.seconds["apply"]
    with pair.writer.adapter.mutation("one input only"):
        pair.trained.b.w.data.add_(1.0)
    pair.writer.publish(2)
    pair.reader.update(2)
    pair.reader.update(2)
    assert torch.equal(cached["product"], pair.trained.a.w.sum() * pair.trained.b.w)
    assert len(calls) == 2


def test_a_hook_that_reallocates_fails_the_update_and_names_the_parameter(job: Job) -> None:  # B111
    def hook(model: nn.Module) -> None:
        if "broken" in armed:
            model.b.w.data = model.b.w.data.clone()

    armed: set[str] = set()
    pair = Pair(job, after_update=hook)
    pair.step(1)
    pair.reader.update(1)
    home = pair.served.b.w.data
    armed.add("broken")
    pair.step(2)
    with pytest.raises(AdapterError, match="a live tensor moved") as caught:
        pair.reader.update(2)
    assert caught.value.tensor == "b.w"
    assert any("DIRTY" in note for note in caught.value.__notes__)
    assert pair.engine.paused
    assert pair.reader.dirty
    armed.clear()
    pair.served.b.w.data = home
    pair.step(3)
    pair.reader.update(3)
    assert pair.equal
    assert not pair.reader.dirty
    assert not pair.engine.paused


# --- what a failure leaves


def test_a_failure_before_the_first_byte_leaves_the_engine_serving(job: Job) -> None:  # B79
    pair = Pair(job)
    pair.step(1)
    first = pair.reader.update(1)
    held = {n: p.detach().clone() for n, p in pair.served.named_parameters()}
    pair.step(2)
    with faults.arm("reader.before_start", "raise:no"), pytest.raises(SynclineError, match="no"):
        pair.reader.update(2)
    assert pair.reader.committed == first.key
    assert not pair.reader.dirty
    assert not pair.engine.paused
    assert pair.engine.calls[-1] == "resume None"
    assert pair.engine.version == first.key
    assert all(torch.equal(p, held[n]) for n, p in pair.served.named_parameters())
    assert pair.reader.update(2).key.number == 2
    assert pair.equal


def test_a_failure_after_the_first_byte_leaves_the_engine_paused_at_its_version(job: Job) -> None:  # B84
    pair = Pair(job)
    pair.step(1)
    first = pair.reader.update(1)
    pair.step(2)
    with (
        faults.arm("worker.before_verified", "raise:disk full"),
        pytest.raises(SynclineError, match="disk full") as caught,
    ):
        pair.reader.update(2)
    assert any("DIRTY" in note for note in caught.value.__notes__)
    assert pair.reader.committed == first.key
    assert pair.engine.version == first.key
    assert pair.reader.dirty
    assert pair.engine.paused
    assert not any(call.startswith("after_update 1.2") for call in pair.engine.calls)
    report = pair.reader.update(2)  # the same version again makes it whole
    assert pair.equal
    assert not pair.engine.paused
    assert pair.reader.committed == report.key == pair.engine.version


def test_a_commit_that_is_refused_is_no_commit(job: Job) -> None:
    pair = Pair(job)
    pair.step(1)
    first = pair.reader.update(1)
    pair.step(2)
    with faults.arm("reader.before_commit", "raise:too late"), pytest.raises(SynclineError, match="late"):
        pair.reader.update(2)
    assert pair.reader.committed == first.key
    assert pair.engine.version == first.key
    assert pair.engine.paused
    assert pair.reader.update().key.number == 2
    assert pair.equal


def test_one_rank_that_fails_keeps_the_whole_instance_at_its_version(job: Job) -> None:
    trained = module({"w": stamped(6, 4)})
    writer = job.writer(Trainer(trained))
    engines = [
        Engine(
            module({"w": torch.full((3, 4), -1.0)}),
            shards=[shard("w", (6, 4), (3 * rank, 0), (3, 4))],
            rank=rank,
            world=2,
        )
        for rank in range(2)
    ]
    job.worker(engines[1])
    reader = job.reader(engines[0])
    writer.publish(1)
    first = reader.update(1)
    once = iter([True])

    def fail_one() -> None:
        if next(once, None):
            raise TransportError("socket closed")

    with writer.adapter.mutation("step"):
        trained.w.data.add_(100.0)
    writer.publish(2)
    with (
        faults.arm("worker.before_verified", fail_one),
        pytest.raises(TransportError, match="closed") as caught,
    ):
        reader.update(2)
    assert "instance a, rank" in str(caught.value.rank)
    assert reader.committed == first.key
    assert [engine.version for engine in engines] == [first.key] * 2
    assert not any("1.2" in call for engine in engines for call in engine.calls)
    report = reader.update(2)
    assert torch.equal(torch.cat([e.live_tensors()["w"] for e in engines]), stamped(6, 4) + 100.0)
    assert [engine.version for engine in engines] == [report.key] * 2
    assert sum(int(rank["nbytes"]) for rank in report.ranks) == report.nbytes == 96


def test_a_transport_that_moves_nothing_but_says_it_did_is_caught(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:  # B74
    pair = Pair(job)
    pair.step(1)
    first = pair.reader.update(1)
    pair.step(2)

    def idle(self: ShmProgram, limits: Any, *, digest: bool) -> Running:
        return Running("pull", lambda _running: None, self.nbytes, self.hops, limits)

    with monkeypatch.context() as patch:
        patch.setattr(ShmProgram, "run", idle)
        with pytest.raises(TransportError, match="without having moved every byte") as caught:
            pair.reader.update(2)
    assert (caught.value.expected, caught.value.found) == (f"{NBYTES} bytes", "0 bytes")
    assert pair.reader.committed == first.key
    assert pair.engine.paused
    pair.reader.update(2)
    assert pair.equal


def test_a_transport_that_miscounts_is_refused_by_the_server_and_by_the_digests(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:  # B74, with a lie about the count
    pair = Pair(job)
    pair.step(1)
    first = pair.reader.update(1)
    pair.step(2)

    def lie(self: ShmProgram, limits: Any, *, digest: bool) -> Running:
        def body(running: Running) -> None:
            running.add(self.nbytes, self.hops)
            running.digests = torch.zeros(self.hops, dtype=torch.uint64).numpy()

        return Running("pull", body, self.nbytes, self.hops, limits)

    with monkeypatch.context() as patch:
        patch.setattr(ShmProgram, "run", lie)
        with pytest.raises(
            DigestMismatchError, match="the delivered bytes are not the published ones"
        ) as caught:
            pair.reader.update(2)
    assert caught.value.tensor in VALUES
    assert "instance a, rank 0, from writer 0" in str(caught.value.rank)
    assert "first differing element" in caught.value.found
    assert pair.reader.committed == first.key
    assert pair.engine.paused
    pair.reader.update(2)
    assert pair.equal


def test_a_weight_that_changes_inside_its_window_is_caught(job: Job) -> None:
    pair = Pair(job)
    pair.step(1)
    pair.reader.update(1)

    def change() -> None:
        pair.trained.a.w.data[2, 1] += 1.0  # a mutation that no hook sees

    pair.step(2)
    pair.writer._current.wait()
    with faults.arm("worker.before_first_byte", change), pytest.raises(DigestMismatchError) as caught:
        pair.reader.update(2)
    assert caught.value.tensor == "a.w"
    assert "changed inside its read window" in caught.value.found
    assert pair.engine.paused


def test_bytes_that_do_not_stand_in_memory_are_caught_by_installed_only(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(job)
    real = ShmProgram.run

    def scribble(self: ShmProgram, limits: Any, *, digest: bool) -> Running:
        running = real(self, limits, digest=digest)
        running.wait(5.0)
        pair.served.b.w.data[4] = 9999.0  # somebody overwrites what was installed and proved
        return running

    pair.step(1)
    monkeypatch.setattr(ShmProgram, "run", scribble)
    assert pair.reader.update(1, verify="delivered").level == "delivered"
    pair.step(2)
    with pytest.raises(DigestMismatchError, match="the installed bytes are not the published ones") as caught:
        pair.reader.update(2, verify="installed")
    assert caught.value.tensor == "b.w"
    assert "first differing element (4,)" in caught.value.found


# --- numbers


def test_stale_and_unknown_numbers_are_refused_at_once(job: Job) -> None:
    pair = Pair(job)
    pair.step(5)
    pair.reader.update(5)
    for number in (5, 4, 0):
        with pytest.raises(StaleVersionError, match="must grow") as caught:
            pair.writer.publish(number)
        assert (caught.value.expected, caught.value.found) == ("more than 5", str(number))
        assert pair.writer._current is not None  # the window of version 5 is still open
    began = time.monotonic()
    with pytest.raises(StaleVersionError, match="older than what instance a can take"):
        pair.reader.update(4)
    assert time.monotonic() - began < 2.0
    assert not pair.engine.paused
    pair.step(7)
    pair.reader.update(7)
    with pytest.raises((StaleVersionError, UnknownVersionError)):
        pair.reader.update(6)
    assert pair.equal
    assert str(pair.reader.committed) == "1.7"


def test_a_future_number_is_waited_for_until_the_deadline(job: Job) -> None:
    pair = Pair(job)
    pair.step(1)
    with pytest.raises(SynclineError, match=r"version 1\.9"):
        pair.reader.update(9, timeout=0.3)
    assert not pair.engine.paused
    assert pair.reader.update().key.number == 1


# --- reports and levels


@pytest.mark.parametrize("level", ["none", "delivered", "installed"])
def test_a_report_says_what_was_done_and_proved(job: Job, level: Any) -> None:
    pair = Pair(job)
    pair.step(1)
    report = pair.reader.update(1, verify=level)
    assert (str(report.key), report.instance, report.level, report.changed) == ("1.1", "a", level, True)
    assert (report.nbytes, report.tensors, report.coverage) == (NBYTES, 2, 1.0)
    assert set(report.seconds) == {"wait", "pause", "pull", "commit", "apply", "resume", "total"}
    spent = sum(v for k, v in report.seconds.items() if k != "total")
    assert spent <= report.seconds["total"] <= spent + 0.5
    assert report.gb_per_s == pytest.approx(NBYTES / report.seconds["pull"] / 1e9)
    assert 0 < report.paused < report.seconds["total"]
    (rank,) = report.ranks
    assert (rank["nbytes"], rank["tensors"]) == (NBYTES, 2)
    assert ("hops_proved" in rank) == (level != "none")
    assert rank.get("installed", 0) == int(level == "installed")
    assert {"plan_s", "bind_s", "transfer_s", "proof_s"} <= set(rank)
    assert report.as_dict()["key"] == "1.1"
    assert report.as_dict()["gb_per_s"] == report.gb_per_s


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("pause", ["abort", "wait", "keep"])
@pytest.mark.parametrize("released", [False, True])
def test_no_combination_of_options_skips_an_update(  # B88
    job: Job, transport: str, pause: Any, released: bool
) -> None:
    job.options = type(job.options)(**{**OPTIONS, "transport": transport})
    pair = Pair(job, reader={"pause": pause, "verify_every": 2})
    for number, level in enumerate(("none", "delivered", "installed", "none"), 1):
        pair.step(number, by=float(number))
        assert pair.reader.update(number, verify=level).changed
        assert pair.equal
        assert str(pair.engine.version) == f"1.{number}"
        if released:
            pair.writer.release()


def test_only_every_nth_update_is_proved_and_the_reports_say_so(job: Job) -> None:
    pair = Pair(job, reader={"verify_every": 3})
    levels = []
    for number in range(1, 8):
        pair.step(number)
        if number == 4:  # due: a failure does not use the proof up
            with (
                faults.arm("worker.before_verified", "raise:no"),
                pytest.raises(SynclineError, match="no"),
            ):
                pair.reader.update(number, verify="installed")
        report = pair.reader.update(number, verify="installed")
        levels.append(report.level)
        assert ("installed" in report.ranks[0]) == (report.level == "installed")
        assert pair.equal
        if number == 1:
            assert not pair.reader.update(number).changed  # nothing moves, nothing is counted
    assert levels == ["installed", "none", "none", "installed", "none", "none", "installed"]


def test_between_two_proofs_nobody_looks(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(job, reader={"verify_every": 2})
    pair.step(1)
    pair.reader.update(1)
    real = ShmProgram.run
    asked: list[bool] = []

    def watch(self: ShmProgram, limits: Any, *, digest: bool) -> Running:
        asked.append(digest)
        return real(self, limits, digest=digest)

    monkeypatch.setattr(ShmProgram, "run", watch)
    for number in (2, 3):
        pair.step(number)
        pair.reader.update(number)
    assert asked == [False, True]
    with pytest.raises(SynclineError, match="prove"):
        job.reader(Engine(module(blank(VALUES))), instance="b", verify_every=0)


# --- contents that never change (B89)


def same_versions(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "no tensor changed" in r.getMessage()]


def test_three_equal_versions_are_remarked_once(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(job)
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            pair.writer.publish(number)
            pair.reader.update(number)
        assert same_versions(caplog) == []
        for number in (3, 4, 5):
            pair.writer.publish(number)
            pair.reader.update(number)
        pair.writer.close_window()
        (message,) = same_versions(caplog)
        assert "writer 0: no tensor changed in 3 versions, up to 1.3" in message
        caplog.clear()
        pair.step(6)
        pair.reader.update(6)
        for number in (7, 8):
            pair.writer.publish(number)
            pair.reader.update(number)
        pair.writer.close_window()
        assert ["up to 1.8" in one for one in same_versions(caplog)] == [True]


def test_one_element_that_changes_is_enough(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(job)
    with caplog.at_level(logging.WARNING):
        for number in range(1, 6):
            with writer_step(pair):
                pair.trained.b.w.data[0] += 1.0
            pair.writer.publish(number)
            pair.reader.update(number)
        pair.writer.close_window()
    assert same_versions(caplog) == []
    assert pair.equal


def writer_step(pair: Pair) -> Any:
    return pair.writer.adapter.mutation("step")


def test_another_plan_starts_the_count_anew(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(job)
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            pair.writer.publish(number)
            pair.reader.update(number)
        job.reader(Engine(module(blank(VALUES))), instance="late")
        for number in (3, 4):
            pair.writer.publish(number)
            pair.reader.update(number)
        pair.writer.close_window()
    assert same_versions(caplog) == []


def test_kernels_are_compiled_before_anybody_watches_progress(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    ask = MetaClient.request

    def request(self: MetaClient, message: Message, deadline: float | None = None) -> object:
        order.append(type(message).__name__)
        return ask(self, message, deadline)

    monkeypatch.setattr(MetaClient, "request", request)
    monkeypatch.setattr("syncline.kernels.host.load", lambda: order.append("load"))
    Pair(job)
    assert order.index("load") < order.index("RegisterWriter")
    ranks = [i for i, what in enumerate(order) if what == "RegisterReader"]
    assert "load" in order[ranks[0] : ranks[1]]  # the controller's registration, then the worker's
