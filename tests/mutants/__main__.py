"""Plant every mutant in a copy of the package and run the protocol's suite against it, two at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
SUITE = [
    *(f"tests/protocol/test_{name}.py" for name in ("messages", "versions", "window", "update", "members")),
    *(f"tests/protocol/test_{name}.py" for name in ("restart", "steps", "machine")),
    "tests/protocol/test_explore.py::test_three_versions_without_faults",
]
EXAMPLES = "25"
LIMIT = 150.0
WIDTH = max(len(mutant.name) for mutant in MUTANTS)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one run: whether the suite failed, which test said so first, and how long it took."""

    killed: bool
    by: str
    seconds: float


def plant(mutant: Mutant | None, where: Path) -> None:
    """Copy the package below ``where`` and patch the copy; the patch must fit exactly once."""
    shutil.copytree(
        ROOT / "src" / "syncline", where / "syncline", ignore=shutil.ignore_patterns("__pycache__")
    )
    if mutant is None:
        return
    path = where / "syncline" / "protocol" / mutant.file
    text = path.read_text()
    count = text.count(mutant.old)
    if count != 1:
        raise SystemExit(f"mutant {mutant.name}: its patch fits {count} times in {mutant.file}, not once")
    path.write_text(text.replace(mutant.old, mutant.new))


def environment(where: Path) -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": str(where), "SYNCLINE_TEST_EXAMPLES": EXAMPLES}
    return {**found, "PYTHONDONTWRITEBYTECODE": "1"}


def check_shadow(where: Path) -> None:
    """Make sure that the copy, not the installed package, is what a test imports."""
    code = "import syncline.protocol.job as job; print(job.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(where),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    if not Path(found.stdout.strip()).is_relative_to(where):
        raise SystemExit(f"the copy in {where} does not shadow {found.stdout.strip()}")


def run(mutant: Mutant | None) -> Outcome:
    """Run the suite against one mutant, or against the unpatched copy."""
    command = [sys.executable, "-m", "pytest", *SUITE, "-x", "-q", "--noconftest"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no"]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="syncline-mutant-") as folder:
        where = Path(folder).resolve()
        plant(mutant, where)
        check_shadow(where)
        try:
            done = subprocess.run(
                command,
                env=environment(where),
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(False, f"no verdict in {LIMIT:g} s", time.monotonic() - start)
    lines = done.stdout.splitlines()
    failed = [line.split(" ")[1] for line in lines if line.startswith("FAILED")]
    if done.returncode not in (0, 1) or (done.returncode == 1 and not failed):
        text = done.stdout[-2000:] + done.stderr[-2000:]
        raise SystemExit(f"the suite did not run (exit {done.returncode}):\n{text}")
    by = failed[0].removeprefix("tests/protocol/") if failed else "-"
    return Outcome(done.returncode == 1, by, time.monotonic() - start)


def main() -> int:
    """Print a table; return 1 if a mutant survived or the unpatched copy fails."""
    for mutant in MUTANTS:
        text = (ROOT / "src" / "syncline" / "protocol" / mutant.file).read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(f"mutant {mutant.name}: its patch does not fit exactly once in {mutant.file}")
    sound = run(None)
    if sound.killed:
        print(f"the unpatched copy fails: {sound.by}")
        return 1
    print(f"{'(unpatched)':{WIDTH}}  passes    {sound.seconds:5.1f} s")
    killed = 0
    with ThreadPoolExecutor(2) as pool:
        for mutant, outcome in zip(MUTANTS, pool.map(run, MUTANTS), strict=True):
            killed += outcome.killed
            verdict = "killed  " if outcome.killed else "SURVIVED"
            print(f"{mutant.name:{WIDTH}}  {verdict}  {outcome.seconds:5.1f} s  {outcome.by}", flush=True)
            if not outcome.killed:
                print(f"{'':{WIDTH}}  breaks: {mutant.breaks}")
    print(f"mutants: {killed} of {len(MUTANTS)} killed")
    return 0 if killed == len(MUTANTS) else 1


if __name__ == "__main__":
    sys.exit(main())
