"""The demo: two FSDP2 ranks fine-tune SmolLM2 while two inference instances receive every version."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from syncline.cli.demo.fleet import Child, Fleet
from syncline.cli.demo.screen import slowest
from syncline.cli.engines import Engine, Interpreter, vllm
from syncline.cli.model import is_prepared, prepare
from syncline.errors import EffectiveMismatchError, SynclineError
from syncline.meta import clean

if TYPE_CHECKING:
    from pathlib import Path

    from syncline.cli.demo.screen import Screen

TRAINERS = 2
INSTANCES = {"a": 1, "b": 3}
"""Ranks of each instance; the model's 9 heads cannot be cut in two."""
_START, _TRAIN, _STEP = 240.0, 240.0, 120.0  # seconds that each stage may take
_STALL = 40.0  # seconds in which bytes may stand still
_SLOW = 3.0  # with vLLM: so many times longer, since six processes import and prepare it at once


@dataclass
class Result:
    """What one run found.

    Attributes:
        engine: what the instances run.
        instances: number of ranks of each.
        versions: number of versions that every instance received.
        tensors: checkpoint tensors of each.
        coverage: smallest coverage of any update.
        before, after: answer by instance.
        reports: every update.
        published: what trainer rank 0 told of each version.
        memcpy_s: by instance, seconds of a memcpy of as many bytes as a version has, by all ranks at once.
        effective: tensors compared with the trainer's own checkpoint, by rank's name.
    """

    engine: Engine = Engine.TRANSFORMERS
    instances: dict[str, int] = field(default_factory=lambda: dict(INSTANCES))
    versions: int = 0
    tensors: int = 0
    coverage: float = 0.0
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)
    published: list[dict[str, Any]] = field(default_factory=list)
    memcpy_s: dict[str, float] = field(default_factory=dict)
    effective: dict[str, int] = field(default_factory=dict)

    @property
    def last_line(self) -> str:
        """The line that a run ends with."""
        return (
            f"demo: {self.versions} versions, {self.tensors} tensors, {100 * self.coverage:.2f}% covered, "
            "delivered and effective equal"
        )


def run(
    cache: Path,
    work: Path,
    keep: Path | None,
    steps: int,
    screen: Screen,
    *,
    engine: Engine = Engine.TRANSFORMERS,
    python: Path | None = None,
) -> Result:
    """Run the demo.

    Args:
        cache: where the prepared model is kept between runs.
        work: for logs and rendezvous files.
        keep: where the trainer's checkpoint and the ranks' dumps stay; None: nowhere.
        steps: optimizer steps; a version each.
        screen: shows what happens.
        engine: what the inference instances run.
        python: the interpreter that has the engine; None: this one.

    Raises:
        EffectiveMismatchError: an instance does not hold the trainer's weights, or says something else.
        SynclineError: a process failed.
    """
    interpreter = vllm(python) if engine is Engine.VLLM else None
    if not is_prepared(cache):
        screen.status("preparing SmolLM2-135M-Instruct (once)")
    model = prepare(cache)
    slow = 1.0 if interpreter is None else _SLOW
    result = Result(engine)
    job = f"demo-{os.getpid()}"
    outcome = (keep or work).resolve()
    outcome.mkdir(parents=True, exist_ok=True)

    def on_event(child: Child, event: dict[str, Any]) -> None:
        if event["kind"] == "updated":
            report = event["report"]
            report["memcpy_ratio"] = result.memcpy_s[report["instance"]] / slowest(report, "transfer_s")
            result.reports.append(report)
            screen.updated(report)
        elif event["kind"] == "published" and child.name == "trainer 0":
            result.published.append(event)
            screen.published(event)

    environment = {
        "SYNCLINE_RUN_DIR": str(work / "run"),
        "SYNCLINE_CONNECT_TIMEOUT": str(_START * slow),  # six processes load a model at once
        "SYNCLINE_UPDATE_TIMEOUT": str(_STEP * slow),
        "SYNCLINE_STALL": str(_STALL * slow),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with Fleet(work, environment, on_event) as fleet:
        stage = _Stages(fleet, screen, result, outcome, interpreter)
        stage.start(model, work, job, steps)
        stage.train(steps)
        stage.prove()
    clean(job, root=work / "run")
    (outcome / "demo.json").write_bytes(msgspec.json.format(msgspec.json.encode(facts(result)), indent=2))
    return result


class _Stages:
    """The run, stage by stage."""

    def __init__(
        self, fleet: Fleet, screen: Screen, result: Result, outcome: Path, vllm: Interpreter | None
    ) -> None:
        self._fleet, self._screen, self._result, self._vllm = fleet, screen, result, vllm
        self._checkpoint = outcome / "checkpoint"
        self._dumps = outcome / "dumps"
        self._dumps.mkdir(exist_ok=True)
        self._trainers: list[Child] = []
        self._engines: dict[str, list[Child]] = {}

    def start(self, model: Path, work: Path, job: str, steps: int) -> None:
        """Start all processes and hear what the instances say with the weights that they loaded."""
        what = "" if self._vllm is None else " of vLLM"
        self._screen.status(
            f"starting 2 trainer ranks, and instances a (1 process) and b (3, tensor-parallel){what}"
        )
        for rank in range(TRAINERS):
            arguments = (model, work / "trainers", rank, TRAINERS, job, steps, self._checkpoint)
            self._trainers.append(
                self._fleet.start(f"trainer {rank}", "syncline.cli.demo.trainer", *arguments)
            )
        for name in INSTANCES:
            self._start_instance(name, model, work, job)
        for name in INSTANCES:
            self._settle(name, model, work, job)
        ready = self._take(self._trainers, "ready", _START)
        self._take(self._ranks, "ready", _START)
        self._result.tensors = ready[0]["tensors"]
        self._measure()
        self._result.before = self._ask("before")

    def _start_instance(self, name: str, model: Path, work: Path, job: str) -> None:
        world = self._result.instances[name]
        if self._vllm is None:
            self._engines[name] = [
                self._fleet.start(
                    f"instance {name} rank {rank}",
                    "syncline.cli.demo.engine",
                    *(model, work / f"instance-{name}", name, rank, world, job),
                )
                for rank in range(world)
            ]
        else:
            child = self._fleet.start(
                f"instance {name}",
                "syncline.cli.demo.vllm_engine",
                *(model, name, world, job),
                python=self._vllm,
            )
            self._engines[name] = [child]

    def _settle(self, name: str, model: Path, work: Path, job: str) -> None:
        """Wait until an instance's engine runs; one that cannot be cut on these cores is started whole."""
        events = self._take(self._engines[name], "started", _START)
        refused = next((event["refused"] for event in events if event["refused"]), None)
        if refused is None:
            return
        if self._result.instances[name] == 1:
            raise SynclineError(f"instance {name} does not start", found=refused)
        for child in self._engines[name]:
            self._fleet.dismiss(child)
        self._screen.status(f"instance {name} does not start in parts here, so it is whole ({refused})")
        self._result.instances[name] = 1
        self._start_instance(name, model, work, job)
        self._settle(name, model, work, job)

    def train(self, steps: int) -> None:
        """Train, while the instances follow."""
        self._screen.status(f"training: {steps} optimizer steps, a version each")
        self._fleet.tell(self._leaders, do="follow", steps=steps)
        self._fleet.tell(self._trainers, do="train")
        self._take(self._trainers, "trained", _TRAIN)
        for _ in range(steps):  # a report follows its commit, which is all that the trainers wait for
            self._take(self._leaders, "updated", _STEP)
        got = {name: [r for r in self._result.reports if r["instance"] == name] for name in self._engines}
        self._result.versions = min(len({r["key"] for r in reports}) for reports in got.values())
        self._result.coverage = min((r["coverage"] for r in self._result.reports), default=0.0)
        if self._result.versions != steps:
            raise SynclineError(
                "an instance did not receive every version",
                expected=f"{steps} versions",
                found={name: [r["key"] for r in reports] for name, reports in got.items()},
            )
        self._result.after = self._ask("after")
        self._check_answers()

    def prove(self) -> None:
        """Compare every live tensor with the trainer's own checkpoint, and keep what was asked for."""
        self._screen.status("writing the trainer's own checkpoint")
        self._fleet.tell(self._trainers, do="save")
        self._take(self._trainers, "saved", _STEP)
        self._screen.status("comparing every live tensor with a fresh load of it")
        for name, ranks in self._engines.items():
            self._fleet.tell(ranks, do="effective", checkpoint=str(self._checkpoint))
            events = self._take(ranks, "effective", _STEP)
            for rank, found in enumerate(found for event in events for found in event["ranks"]):
                who = f"instance {name} rank {rank}"
                if found["diffs"]:
                    raise EffectiveMismatchError(
                        f"instance {name} does not hold the trainer's weights",
                        rank=who,
                        found="; ".join(found["diffs"][:5]),
                    )
                self._result.effective[who] = found["tensors"]
            self._fleet.tell(ranks, do="dump", directory=str(self._dumps), instance=name)
            self._take(ranks, "dump", _STEP)

    def _take(self, children: list[Child], kind: str, seconds: float) -> list[dict[str, Any]]:
        return self._fleet.take(children, kind, seconds if self._vllm is None else seconds * _SLOW)

    @property
    def _leaders(self) -> list[Child]:
        return [ranks[0] for ranks in self._engines.values()]

    @property
    def _ranks(self) -> list[Child]:
        return [child for ranks in self._engines.values() for child in ranks]

    def _ask(self, when: str) -> dict[str, str]:
        self._screen.status(f"asking both instances ({when})")
        self._fleet.tell(self._leaders, do="answer")
        events = self._take(self._leaders, "answer", _STEP)
        answers = {name: event["text"] for name, event in zip(self._engines, events, strict=True)}
        for name, text in answers.items():
            self._screen.answered(name, when, text)
        return answers

    def _check_answers(self) -> None:
        before, after = self._result.before, self._result.after
        if len(set(after.values())) != 1 or any(before[name] == after[name] for name in before):
            raise EffectiveMismatchError(
                "the instances do not say what they should after the last version",
                expected="one new answer from both",
                found={"before": before, "after": after},
            )

    def _measure(self) -> None:
        """Time a memcpy of as many bytes as a version has, in all ranks at once."""
        self._screen.status("measuring memcpy")
        self._fleet.tell(self._ranks, do="memcpy", at=time.time() + 1.0)
        for name, ranks in self._engines.items():
            copies = self._take(ranks, "memcpy", _STEP)
            self._result.memcpy_s[name] = max(copy["seconds"] for copy in copies)


def facts(result: Result) -> dict[str, Any]:
    """Return a result for JSON."""
    return {
        "engine": result.engine.value,
        "versions": result.versions,
        "tensors": result.tensors,
        "coverage": result.coverage,
        "instances": result.instances,
        "before": result.before,
        "after": result.after,
        "memcpy_s": result.memcpy_s,
        "effective": result.effective,
        "published": result.published,
        "updates": result.reports,
    }
