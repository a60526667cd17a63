"""The page on extending: its code runs, passes the suite, and names what there is."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import syncline
from syncline.conformance import Outcome, check
from syncline.layout.layout_rule import registered_rules
from syncline.options import Options

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
OPTIONS = Options(connect_timeout=15.0, update_timeout=15.0, heartbeat=0.5, lease=8.0, stall=4.0)


@pytest.mark.parametrize("world", [1, 2])
def test_the_adapter_conforms(world: int, run_dir: Path) -> None:
    space: dict[str, object] = {}
    exec(compile(BLOCKS[0], "extending.md", "exec"), space)  # noqa: S102 (our own page)
    report = check(space["Adapter"], world=world, options=OPTIONS)  # type: ignore[arg-type]
    assert report.failed == []
    skipped = {one.name for one in report.checks if one.outcome is Outcome.SKIPPED}
    assert skipped == {"stages", "caches", "misuse.stage"}
    assert {one.name for one in report.checks} == set(_listed())


def test_the_rule_registers() -> None:
    before = registered_rules()
    exec(compile(BLOCKS[1], "extending.md", "exec"), {})  # noqa: S102 (our own page)
    (made,) = set(registered_rules()) - set(before)
    made.remove()
    assert made.matches("layers.0.scale")
    assert made.holds_for("MyModelForX")


def test_what_the_page_names_exists() -> None:
    for name in re.findall(r"`(syncline(?:\.\w+)+)`", PAGE):
        home, _, last = name.rpartition(".")
        if name in ("syncline.adapters", "syncline.transports", "syncline.transforms"):
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            owner = syncline if home == "syncline" else importlib.import_module(home)
            assert hasattr(owner, last), name


def _listed() -> list[str]:
    rows = re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([\w.]+)`", row)]
