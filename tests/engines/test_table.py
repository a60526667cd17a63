"""The table of the engine suites says what failed and what is missing, and its exit status does too."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from tests.engines import rows, table

if TYPE_CHECKING:
    from pathlib import Path

GOOD = rows.Row(
    rows.Case("vllm", "qwen3", 1, "float32"),
    tensors=10,
    traced=6,
    replayed=1,
    probed=7,
    derived=1,
    local=2,
    equal=10,
    tokens=144,
    same=144,
)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(rows.VARIABLE, str(tmp_path))
    return tmp_path


def show(directory: Path, *engines: str) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=table.WIDTH)
    status = table.main([str(directory), *engines], console)
    assert isinstance(console.file, io.StringIO)
    return status, console.file.getvalue()


def record(row: rows.Row) -> None:
    rows.plan(row.case)
    with rows.recorded(row.case) as notes:
        notes.row = row


def test_a_case_in_which_all_holds(directory: Path) -> None:
    record(GOOD)
    status, text = show(directory, "vllm")
    assert status == 0
    assert "144/144" in text
    assert "1 of 1 cases hold; vllm: 1 model families" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"equal": 9}, "not bit-equal"),
        ({"same": 143}, "other tokens"),
        ({"tokens": 0, "same": 0}, "other tokens"),
        ({"probed": 6}, "the probe does not confirm"),
        ({"local": 1}, "neither traced"),
        ({"experts": "3/4"}, "an expert"),
        ({"tensors": 0, "equal": 0}, "no live tensor"),
    ],
)
def test_what_does_not_hold_is_said(directory: Path, change: dict[str, int | str], said: str) -> None:
    record(replace(GOOD, **change))  # pyright: ignore[reportArgumentType] (fields by name)
    status, text = show(directory, "vllm")
    assert status == 1
    assert said in " ".join(text.split())
    assert "0 of 1 cases hold" in text


def test_a_case_that_fails_says_why(directory: Path) -> None:
    with pytest.raises(ValueError, match="torn"), rows.recorded(GOOD.case):
        raise ValueError("torn\nin two")
    status, text = show(directory, "vllm")
    assert status == 1
    assert "ValueError: torn" in text


def test_a_case_that_was_planned_and_did_not_run_is_missing(directory: Path) -> None:
    record(GOOD)
    rows.plan(replace(GOOD.case, ranks=2))
    status, text = show(directory, "vllm")
    assert status == 1
    assert "missing" in text
    assert "1 of 2 cases hold" in text


def test_an_engine_none_of_whose_cases_ran_is_missing(directory: Path) -> None:
    record(GOOD)
    status, text = show(directory, "vllm", "sglang")
    assert status == 1
    assert "no case of sglang ran" in text


def test_without_a_directory_nothing_is_recorded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(rows.VARIABLE)
    record(GOOD)
    assert list(directory.iterdir()) == []
    assert show(directory, "vllm")[0] == 1
