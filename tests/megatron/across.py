"""Megatron trainers in one environment, real engines in others: ``python -m tests.megatron.across``.

Every case starts real Megatron ranks and one engine that each publish and receive two versions, with real
optimizer steps between them. The engine is poisoned before each update, and compared with a fresh engine that
was started from Megatron's own exported checkpoint: every live tensor bit for bit, and greedy tokens. Prints
one table; ends with 0 only if all of it holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tests.engines.sglang.engine import environment as sglang_environment
from tests.engines.vllm.running import environment as vllm_environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1500.0
CASES: dict[str, dict[str, Any]] = {
    "dense": {
        "engine": "vllm",
        "family": "qwen3",
        "cut": {"tp": 2, "pp": 2},
        "tp": 2,
        "dtype": "float32",
        "trainer": "Megatron TP2 x PP2",
        "reader": "vLLM TP2",
    },
    "experts": {
        "engine": "sglang",
        "family": "qwen3_moe",
        "cut": {"ep": 2, "dp": 2},
        "tp": 1,
        "dtype": "bfloat16",
        "trainer": "Megatron EP2",
        "reader": "SGLang TP1",
    },
}


class Play:
    """One case in its own directory."""

    def __init__(self, name: str, out: Path) -> None:
        self.name, self.case = name, CASES[name]
        self.out = out / name
        self.run = self.out / "run"
        self.run.mkdir(parents=True)
        self.seen: dict[str, Any] = {}

    @property
    def versions(self) -> list[str]:
        return [str(self.out / f"{self.name}-{version}") for version in range(3)]

    def play(self) -> None:
        """Run the trainers and the engine side by side, then fresh engines."""
        trainers = {
            "name": self.name,
            "play": "publish",
            "outside": True,
            "family": self.case["family"],
            "cut": self.case["cut"],
            "dtype": self.case["dtype"],
            "instance": "engine",
            "patience": 600.0,
            "seconds": SECONDS,
        }
        cases = self.out / "cases.json"
        cases.write_text(json.dumps([trainers]))
        with contextlib.ExitStack() as stack:
            command = [sys.executable, "-P", "-m", "tests.megatron.scene", str(cases), str(self.out)]
            environ = os.environ | {"SYNCLINE_RUN_DIR": str(self.run), "PYTHONHASHSEED": "0"}
            training = stack.enter_context(self._process("trainers", command, environ))
            self._engine("updated", training)
        if self.case["engine"] == "sglang":
            for version in self.versions[1:]:
                self._engine(f"fresh-{version[-1]}", None, version=version)

    def _engine(self, part: str, training: subprocess.Popen[bytes] | None, **more: Any) -> None:
        kind, out = self.case["engine"], self.out / f"{part}.json"
        case = {
            "out": str(out), "job": self.name, "instance": "engine", "tp": self.case["tp"],
            "dtype": self.case["dtype"], "versions": self.versions, "dumps": str(self.out), **more,
        }  # fmt: skip
        arguments = [json.dumps(case)] if kind == "vllm" else [part.partition("-")[0], json.dumps(case)]
        environ = {"vllm": vllm_environment, "sglang": sglang_environment}[kind](self.case["tp"], self.run)
        environ |= {"NUMBA_CACHE_DIR": str(ROOT / f".venv-{kind}" / "numba")}
        python = str(ROOT / f".venv-{kind}" / "bin" / "python")
        command = [python, "-P", "-W", "ignore", "-m", f"tests.megatron.into_{kind}", *arguments]
        with self._process(part, command, environ) as process:
            limit = time.monotonic() + SECONDS
            while not out.is_file() and process.poll() is None and time.monotonic() < limit:
                if training is not None and training.poll() is not None and list(self.out.glob("*.error")):
                    break
                time.sleep(0.2)
        if not out.is_file():
            raise RuntimeError(self._told(part))
        self.seen[part] = json.loads(out.read_text())

    def _told(self, part: str) -> str:
        found = [f"{self.name}: {part} did not end well"]
        for path in (*sorted(self.out.glob("*.error")), *sorted(self.out.glob("*.log"))):
            found += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-25:]]
        return "\n".join(found)

    @contextlib.contextmanager
    def _process(
        self, name: str, command: Sequence[str], environ: dict[str, str]
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command; nothing that it started outlives the block."""
        environ = environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), str(ROOT)]))
        }
        with (self.out / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    process.wait(10.0)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    # ------------------------------------------------------------------------------------------ comparing

    def rows(self) -> list[dict[str, Any]]:
        """Return one row a version: what was compared with a fresh engine, and how much of it was equal."""
        updated = self.seen["updated"]["updated"]
        fresh = (
            self.seen["updated"]["fresh"]
            if self.case["engine"] == "vllm"
            else [self.seen[f"fresh-{version[-1]}"] for version in self.versions[1:]]
        )
        found = []
        before = self.seen["updated"]["old"]
        for number, (expected, got) in enumerate(zip(fresh, updated, strict=True), 1):
            tensors, equal = self._tensors(number, expected, got)
            pairs = list(zip(_tokens(expected["answers"]), _tokens(got["answers"]), strict=True))
            found.append(
                {
                    "version": got["key"],
                    "tensors": tensors,
                    "equal": equal,
                    "tokens": len(pairs),
                    "same": sum(a == b for a, b in pairs),
                    "moved": _tokens(before) != _tokens(got["answers"]),
                }
            )
            before = got["answers"]
        return found

    def _tensors(self, number: int, expected: dict[str, Any], got: dict[str, Any]) -> tuple[int, int]:
        if self.case["engine"] == "vllm":
            pairs = [
                (fresh.get(name), live.get(name))
                for fresh, live in zip(expected["digests"], got["digests"], strict=True)
                for name in {*fresh, *live}
            ]
            return len(pairs), sum(a == b for a, b in pairs)
        import torch  # noqa: PLC0415 (heavy)
        from safetensors.torch import load_file  # noqa: PLC0415 (only here)

        count = equal = 0
        for path in sorted((self.out / f"fresh-{number}").glob("*.safetensors")):
            fresh, live = load_file(path), load_file(self.out / f"updated-{number}" / path.name)
            for name in {*fresh, *live}:
                count += 1
                both = name in fresh and name in live and fresh[name].dtype == live[name].dtype
                equal += both and torch.equal(
                    fresh[name].view(torch.uint8) if fresh[name].ndim else fresh[name],
                    live[name].view(torch.uint8) if live[name].ndim else live[name],
                )
        return count, equal


def _tokens(answers: list[dict[str, Any]]) -> list[int]:
    return [token for answer in answers for token in answer["tokens"]]


def main(arguments: list[str] | None = None) -> int:
    """Play the cases and print the table."""
    parser = argparse.ArgumentParser(description="Megatron trainers into real engines of other environments")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all if left out")
    parser.add_argument("--keep", type=Path, help="a directory for everything that was made")
    chosen = parser.parse_args(arguments)
    if unknown := sorted(set(chosen.cases) - set(CASES)):
        parser.error(f"no such case: {', '.join(unknown)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing that was started is left
    console = Console(width=120)
    table = Table(title="Megatron-Core into engines, each against a fresh engine", title_justify="left")
    for name in ("trainer", "model", "reader", "version"):
        table.add_column(name)
    for name in ("tensors bit-equal", "tokens equal"):
        table.add_column(name, justify="right")
    table.add_column("")
    out = chosen.keep or Path(tempfile.mkdtemp(prefix="syncline-megatron-"))
    good = True
    try:
        for name in chosen.cases or list(CASES):
            play = Play(name, out)
            try:
                play.play()
                rows = play.rows()
            except RuntimeError as error:
                console.print(str(error), markup=False, highlight=False)
                good = False
                continue
            for row in rows:
                fine = (
                    row["equal"] == row["tensors"] > 0 and row["same"] == row["tokens"] > 0 and row["moved"]
                )
                good &= fine
                table.add_row(
                    play.case["trainer"], play.case["family"], play.case["reader"], row["version"],
                    f"{row['equal']}/{row['tensors']}", f"{row['same']}/{row['tokens']}",
                    "ok" if fine else "FAILED",
                )  # fmt: skip
    finally:
        if not chosen.keep:
            shutil.rmtree(out, ignore_errors=True)
    console.print(table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
