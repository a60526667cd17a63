"""Real vLLM on real GPUs: kept at the trainer's versions by syncline, and by vLLM's own backends beside it.

python -m benchmarks.gpu.vllm_live --layout colocated --out benchmarks/results/gpu-vllm-DATE

A trainer process (FSDP2) and engine processes, on one GPU (``colocated``) or on two (``split``). After each
version, what the updated engine says must be what a fresh engine says that was started on the trainer's own
checkpoint (small models), and its live tensors must be those of an engine that vLLM's own backend updated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import vllm_models as models
from benchmarks.gpu import vllm_report as reports
from benchmarks.gpu.vllm_case import PLACES


def main() -> None:
    """Run the cases, print a table, write the results; exit 1 if anything differs or failed."""
    options = _options()
    began = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="sl-", dir=options.work) as work:
        small = [name for name in options.cases if models.CASES[name].fresh]
        large = [name for name in options.cases if name not in small]
        for names in (small, *([name] for name in large)):  # engines start slowly; what is timed runs alone
            results |= _together(names, options, Path(work))
    found = reports.summary(results, options.layout, time.monotonic() - began)
    text = reports.table(found)
    print(text)
    if options.out:
        reports.write(found, text, Path(options.out))
    raise SystemExit(0 if found["all_equal"] else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layout", choices=sorted(PLACES), default="colocated")
    parser.add_argument("--cases", nargs="*", default=reports.DEFAULT, choices=sorted(models.CASES))
    parser.add_argument("--versions", type=int, default=3, help="of the small models")
    parser.add_argument("--timed", type=int, default=7, help="versions of the large models")
    parser.add_argument("--out", help="where to write, without .md and .json")
    parser.add_argument("--logs", help="folder that keeps the processes' output")
    parser.add_argument("--work", help="folder for checkpoints and sockets; a short path")
    return parser.parse_args()


def _together(names: list[str], options: argparse.Namespace, work: Path) -> dict[str, dict[str, Any]]:
    """Run cases at the same time; return what each saw."""
    running = {}
    for name in names:
        versions = options.versions if models.CASES[name].fresh else options.timed
        logs = work / name / "logs" if options.logs is None else Path(options.logs) / name
        out = work / f"{name}.json"
        given = map(str, (name, options.layout, versions, work / name, logs, out))
        command = [sys.executable, "-m", "benchmarks.gpu.vllm_case", *given]
        running[name] = subprocess.Popen(command), out
    found = {}
    for name, (process, out) in running.items():
        code = process.wait()
        nothing = {"case": name, "versions": [], "error": f"the case ended with {code}"}
        found[name] = json.loads(out.read_text()) if out.is_file() else nothing
    return found


if __name__ == "__main__":
    main()
