"""``syncline demo --device cuda``: a trainer and two instances on GPUs, by the same API as anywhere.

With one GPU all share it (colocated); with several the trainer has the first, the engines the last (split).
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from syncline.cli.demo.fleet import Child, Fleet
from syncline.errors import EffectiveMismatchError, SynclineError
from syncline.meta import clean

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

INSTANCES = {"a": 1, "b": 2}
_START, _TRAIN, _STEP = 120.0, 180.0, 60.0  # seconds that each stage may take


@dataclass
class Result:
    """What one run found.

    Attributes:
        device: kind of the devices.
        mode: ``colocated`` or ``split``.
        versions: that every instance received.
        tensors: checkpoint tensors of each.
        coverage: smallest coverage of any update.
        before, after: what instance a says.
        published: what the trainer told of each version.
        updates: every update's report.
        effective: tensors equal to the trainer's own checkpoint, by process.
    """

    device: str
    mode: str
    versions: int = 0
    tensors: int = 0
    coverage: float = 0.0
    before: str = ""
    after: str = ""
    published: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    effective: dict[str, int] = field(default_factory=dict)

    @property
    def last_line(self) -> str:
        """The line that a run ends with."""
        return (
            f"demo: {self.versions} versions, {self.tensors} tensors, {100 * self.coverage:.2f}% covered, "
            f"delivered and effective equal; {self.device}, {self.mode}"
        )

    def facts(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return asdict(self)


def devices(kind: str) -> tuple[str, str, str]:
    """Return the trainer's device, the engines', and what that is called.

    Raises:
        SynclineError: no such device here.
    """
    if kind == "cpu":
        return "cpu", "cpu", "colocated"
    if kind not in {"cuda", "cuda:0"}:
        raise SynclineError("no such kind of device", expected="cpu, cuda or cuda:0", found=kind)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise SynclineError("no GPU is here", expected="a CUDA device", found="none")
    if kind == "cuda:0" or count == 1:
        return "cuda:0", "cuda:0", "colocated"
    return "cuda:0", f"cuda:{count - 1}", "split"


def run(work: Path, steps: int, kind: str, say: Callable[[str], None], transport: str = "auto") -> Result:
    """Run the demo.

    Args:
        work: for logs and rendezvous files.
        steps: versions.
        kind: of device, ``"cuda"``; ``"cuda:0"``: all on the first; ``"cpu"``: the same in host memory.
        say: shows a line.
        transport: see `syncline.options.Options`.

    Raises:
        EffectiveMismatchError: an instance does not hold the trainer's weights, or says what it said before.
        SynclineError: a process failed, or there is no such device.
    """
    trains, serves, mode = devices(kind)
    result = Result(kind.partition(":")[0], mode)
    job = f"demo-{os.getpid()}"

    def on_event(child: Child, event: dict[str, Any]) -> None:
        if event["kind"] == "updated":
            result.updates.append(event["report"])
            say(_update_line(event["report"]))
        elif event["kind"] == "published":
            result.published.append(event)
            say(f"version {event['version']}: loss {event['loss']:.3f}, publish {event['publish_ms']:.2f} ms")

    environment = {
        "SYNCLINE_RUN_DIR": str(work / "run"),
        "SYNCLINE_CONNECT_TIMEOUT": str(_START),
        "SYNCLINE_TRANSPORT": transport,
        "SYNCLINE_STALL": "30",  # kernels of odd forms are compiled when they are first met
        "OMP_NUM_THREADS": "1",
    }
    checkpoint = work / "checkpoint.safetensors"
    with Fleet(work, environment, on_event) as fleet:
        say(f"starting a trainer on {trains}, and instances a (1 process) and b (2) on {serves}")
        module = "syncline.cli.demo.gpu_trainer"
        trainer = fleet.start("trainer 0", module, trains, work / "trainers", 0, 1, job, steps, checkpoint)
        engines = {
            name: [
                fleet.start(
                    f"instance {name} rank {rank}",
                    "syncline.cli.demo.gpu_engine",
                    serves,
                    name,
                    rank,
                    world,
                    job,
                )
                for rank in range(world)
            ]
            for name, world in INSTANCES.items()
        }
        ranks = [child for children in engines.values() for child in children]
        (ready,) = fleet.take([trainer], "ready", _START)
        fleet.take(ranks, "ready", _START)
        result.tensors = ready["tensors"]
        result.before = _answer(fleet, engines["a"][0])
        fleet.tell([trainer], do="train")
        fleet.take([trainer], "trained", _TRAIN)
        for _ in range(steps):
            fleet.take([children[0] for children in engines.values()], "updated", _STEP)
        result.after = _answer(fleet, engines["a"][0])
        say(f"instance a said {result.before!r}, and says {result.after!r}")
        fleet.tell([trainer], do="save")
        (saved,) = fleet.take([trainer], "saved", _STEP)
        _check(result, steps, moved=kind != "cpu" and saved["places"] != ready["places"])
        fleet.tell(ranks, do="effective", checkpoint=str(checkpoint))
        for child, event in zip(ranks, fleet.take(ranks, "effective", _STEP), strict=True):
            if event["wrong"]:
                raise EffectiveMismatchError(
                    "an engine does not hold the trainer's weights", rank=child.name, found=event["wrong"][:5]
                )
            result.effective[child.name] = event["tensors"]
    clean(job, root=work / "run")
    return result


def _answer(fleet: Fleet, child: Child) -> str:
    fleet.tell([child], do="answer")
    return fleet.take([child], "answer", _STEP)[0]["text"]


def _check(result: Result, steps: int, *, moved: bool) -> None:
    got = {name: {r["key"] for r in result.updates if r["instance"] == name} for name in INSTANCES}
    result.versions = min(len(keys) for keys in got.values())
    result.coverage = min((r["coverage"] for r in result.updates), default=0.0)
    if result.versions != steps:
        raise SynclineError("an instance did not receive every version", expected=steps, found=got)
    if result.before == result.after:
        raise EffectiveMismatchError("the engine says what it said before it was taught", found=result.after)
    if moved:
        raise SynclineError("publishing moved a parameter on the device", expected="the same addresses")


def _update_line(report: dict[str, Any]) -> str:
    seconds = report["seconds"]
    slowest = max((rank.get("transfer_s", 0.0) for rank in report.get("ranks", [])), default=0.0)
    return (
        f"  {report['key']} in instance {report['instance']}: {report['nbytes'] / 1e6:.1f} MB, "
        f"transfer {1e3 * slowest:.2f} ms, paused {1e3 * report['paused']:.2f} ms, "
        f"total {1e3 * seconds.get('total', 0.0):.1f} ms, {report['level']}"
    )
