"""One case of the vLLM benchmark, in processes of its own; `benchmarks.gpu.vllm_live` starts it.

python -m benchmarks.gpu.vllm_case CASE LAYOUT VERSIONS DIRECTORY LOGS RESULT_FILE
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu import vllm_models as models
from syncline.cli.demo.fleet import Fleet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncline.cli.demo.fleet import Child

PLACES = {"colocated": ("cuda:0", "cuda:0"), "split": ("cuda:0", "cuda:1"), "cpu": ("cpu", "cpu")}
"""Devices of the trainer and of the engines, by layout."""
_START, _STEP = 240.0, 120.0  # seconds
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the IPC backend, and questions to workers, carry objects
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "SYNCLINE_CONNECT_TIMEOUT": "200",
    "SYNCLINE_STALL": "60",  # the first update compiles kernels
    "SYNCLINE_UPDATE_TIMEOUT": "100",
}


def main() -> None:
    """Play one case and write what was seen; what went wrong is part of it."""
    name, layout, versions, where, logs, out = sys.argv[1:]
    case, directory = models.CASES[name], Path(where)
    directory.mkdir()
    Path(logs).mkdir(parents=True, exist_ok=True)
    (directory / "secret").write_bytes(secrets.token_bytes(16))
    models.write_configuration(case, directory / "config")
    result: dict[str, Any] = {"case": name, "versions": [], "error": None}
    environment = _ENVIRONMENT | {"SYNCLINE_RUN_DIR": str(directory / "run")}
    try:
        with Fleet(Path(logs), environment, lambda _child, _event: None) as fleet:
            _Scenario(case, directory, PLACES[layout], int(versions), fleet, result).play()
    except Exception as error:  # the other cases go on, and the table says so
        result["error"] = f"{type(error).__name__}: {error}"
    Path(out).write_text(json.dumps(result))


class _Scenario:
    """One case from the start of its processes to the last comparison."""

    def __init__(
        self,
        case: models.Case,
        directory: Path,
        places: tuple[str, str],
        versions: int,
        fleet: Fleet,
        result: dict[str, Any],
    ) -> None:
        self._case, self._directory, self._places, self._fleet = case, directory, places, fleet
        self._result = result
        self._count = versions
        self._job = f"vllm-{os.getpid()}-{case.name}"
        self._model = directory / "config"

    def play(self) -> None:
        """Start everything, take every version to every engine, and compare."""
        trainer = self._fleet.start(
            "trainer",
            "benchmarks.gpu.vllm_trainer",
            self._case.name,
            self._places[0],
            self._job,
            self._directory,
        )
        ready = None
        if (
            self._case.quantisation is not None and self._case.fresh
        ):  # dummy weights are not quantised as real ones are
            (ready,) = self._fleet.take([trainer], "ready", _START)
            self._model = self._saved(trainer, 0)
        ours = self._engine("syncline", self._places[1])
        theirs = self._rivals()
        if ready is None:
            (ready,) = self._fleet.take([trainer], "ready", _START)
        self._result |= {"tensors": ready["tensors"], "nbytes": ready["nbytes"]}
        if "ipc" in theirs:
            trainer.tell(do="open_ipc")
            self._fleet.take([trainer], "open_ipc", _START)
        (started, *_) = self._fleet.take([ours, *theirs.values()], "ready", _START)
        self._result |= {key: started[key] for key in ("ways", "arena", "stages", "seconds", "join")}
        if "nccl" in theirs:
            self._told([trainer, theirs["nccl"]], ("nccl_init", "meet"))
        for number in range(1, self._count + 1):
            self._result["versions"].append(self._version(number, trainer, ours, theirs))
        if self._case.fresh:
            others = [trainer, ours, *theirs.values()]
            self._fleet.tell(others, do="stop")
            for child in others:
                self._fleet.dismiss(child)
            self._compare_fresh()

    def _rivals(self) -> dict[str, Child]:
        """Start engines that vLLM's own backends update, where they can run."""
        trains, serves = self._places
        if trains == "cpu":
            return {}
        found = {"ipc": self._engine("ipc", trains)}  # that backend needs the trainer's own GPU
        if trains != serves:
            found["nccl"] = self._engine("nccl", serves)
        return found

    def _engine(self, role: str, where: str, model: Path | None = None, name: str | None = None) -> Child:
        return self._fleet.start(
            name or role, "benchmarks.gpu.vllm_engine", role, self._case.name, where, model or self._model,
            self._job, self._directory,
        )  # fmt: skip

    def _version(self, number: int, trainer: Child, ours: Child, theirs: dict[str, Child]) -> dict[str, Any]:
        self._told([trainer], ("step",), number=number)
        level = "installed" if self._case.fresh and number == 1 else "delivered"
        ours.tell(do="follow", number=number, verify=level)
        trainer.tell(do="publish", number=number)
        (published,) = self._fleet.take([trainer], "publish", _STEP)
        (updated,) = self._fleet.take([ours], "follow", _STEP)
        found: dict[str, Any] = {"number": number, "syncline": _timed(published, updated)}
        found["syncline"] |= {"seconds": updated["seconds"], "report": updated["report"]}
        found["answer"] = self._asked(ours, "answer")
        if self._case.fresh:
            checkpoint = self._saved(trainer, number)
            found["live_equal"] = self._effective(ours, checkpoint)
        found |= {name: self._rival(name, child, trainer, number) for name, child in theirs.items()}
        mine = self._asked(ours, "sums")["tensors"]
        for name, child in theirs.items():
            found[name]["tokens_equal"] = self._asked(child, "answer") == found["answer"]
            other = self._asked(child, "sums")["tensors"]
            found[name]["differ"] = sorted(
                k for k in mine.keys() | other.keys() if mine.get(k) != other.get(k)
            )
        return found

    def _rival(self, name: str, child: Child, trainer: Child, number: int) -> dict[str, Any]:
        given = {}
        if name == "nccl":
            (listed,) = self._told([trainer], ("listed",))
            given = {"listed": {k: v for k, v in listed.items() if k != "kind"}}
        child.tell(do="receive", **given)
        trainer.tell(do=name, **({"packed": number % 2 == 0} if name == "ipc" else {}))
        (sent,) = self._fleet.take([trainer], name, _STEP)
        (received,) = self._fleet.take([child], "receive", _STEP)
        return _timed(sent, received) | {"packed": name == "nccl" or number % 2 == 0}

    def _effective(self, ours: Child, checkpoint: Path) -> bool:
        self._asked(ours, "effective", checkpoint=str(checkpoint))
        return True

    def _saved(self, trainer: Child, number: int) -> Path:
        checkpoint = self._directory / f"version-{number}"
        self._told([trainer], ("save",), directory=str(checkpoint))
        return checkpoint

    def _compare_fresh(self) -> None:
        """Start a fresh engine on each version's checkpoint, and compare what it says."""
        fresh = [
            self._engine("fresh", self._places[1], self._directory / f"version-{n}", f"fresh {n}")
            for n in range(1, self._count + 1)
        ]
        self._fleet.take(fresh, "ready", _START)
        for version, child in zip(self._result["versions"], fresh, strict=True):
            said = self._asked(child, "answer")
            version["tokens_equal"] = said["tokens"] == version["answer"]["tokens"]
            version["logprobs_equal"] = said["logprobs"] == version["answer"]["logprobs"]
        answers = [version["answer"]["tokens"] for version in self._result["versions"]]
        self._result["answers_differ"] = all(a != b for a, b in pairwise(answers))

    def _asked(self, child: Child, what: str, **given: Any) -> dict[str, Any]:
        child.tell(do=what, **given)
        (told,) = self._fleet.take([child], what, _STEP)
        return {k: v for k, v in told.items() if k != "kind"}

    def _told(self, children: Sequence[Child], what: Sequence[str], **given: Any) -> list[dict[str, Any]]:
        for child, do in zip(children, what, strict=True):
            child.tell(do=do, **given)
        return [self._fleet.take([child], do, _STEP)[0] for child, do in zip(children, what, strict=True)]


def _timed(sent: dict[str, Any], received: dict[str, Any]) -> dict[str, Any]:
    """Return milliseconds from the start of publishing, or sending; all processes have one clock."""
    began = sent["began"]
    return {
        "sync_ms": 1e3 * (received["loaded"] - began),
        "served_ms": 1e3 * (received["accepting"] - began),
        "pause_ms": 1e3 * (received["accepting"] - received["paused"]),
        "call_ms": 1e3 * sent["seconds"],
    }


if __name__ == "__main__":
    main()
