"""The README's example runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    environment = os.environ | {"SYNCLINE_RUN_DIR": str(tmp_path / "run")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["1.1", "1.2", "1.3"]
    assert all("132352 bytes delivered" in line for line in lines)


def test_the_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test", "mutants"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make demo" in (ROOT / "README.md").read_text()
