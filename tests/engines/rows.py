"""What each case of an engine suite found, as one JSON file a case: the rows of `tests.engines.table`.

A run names its directory in ``SYNCLINE_ENGINE_ROWS``; without it nothing is recorded. A case that was
collected leaves ``<case>.planned.json``, one that ended ``<case>.json``: one that never ended is seen to be
missing.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "SYNCLINE_ENGINE_ROWS"


@dataclass(frozen=True, slots=True)
class Case:
    """One engine on one family of checkpoints.

    Attributes:
        engine: its name.
        model: name in `tests.engines.checkpoints.FAMILIES`.
        ranks: tensor-parallel ranks.
        dtype: in which the engine computes.
    """

    engine: str
    model: str
    ranks: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.engine}-{self.model}-{self.ranks}-{self.dtype}"


@dataclass(frozen=True, slots=True)
class Row:
    """What a case found; tensors are counted over all ranks.

    Attributes:
        case: it.
        tensors: live tensors.
        traced: filled with copies of checkpoint elements, as the loader's trace says.
        replayed: of which the loader computes elements.
        probed: of those two, confirmed by the coordinate probe through the engine's own loader.
        derived: recomputed by the engine's hooks.
        local: the engine's own.
        equal: bit-equal to a fresh engine's after each update.
        tokens: generated after the updates.
        same: of those, equal to a fresh engine's, log-probabilities included.
        experts: as "met/all", where a router chooses.
        problem: why there is no more to say.
    """

    case: Case
    tensors: int = 0
    traced: int = 0
    replayed: int = 0
    probed: int = 0
    derived: int = 0
    local: int = 0
    equal: int = 0
    tokens: int = 0
    same: int = 0
    experts: str = ""
    problem: str = ""

    def faults(self) -> list[str]:
        """Return what does not hold; nothing if all is well."""
        met, _, wanted = self.experts.partition("/")
        checks = {
            "no live tensor": self.tensors > 0,
            "tensors that are neither traced, replayed, derived nor local": self.tensors
            == self.traced + self.replayed + self.derived + self.local,
            "the probe does not confirm the trace": self.probed == self.traced + self.replayed > 0,
            "not bit-equal": self.equal == self.tensors,
            "other tokens or log-probabilities": self.same == self.tokens > 0,
            "an expert that no prompt reaches": met == wanted,
        }
        return [self.problem] if self.problem else [text for text, holds in checks.items() if not holds]


@dataclass
class Notes:
    """What a case has found so far."""

    row: Row

    def add(self, **found: int | str) -> None:
        """Note values of the row's fields."""
        self.row = replace(self.row, **found)  # pyright: ignore[reportArgumentType] (names of fields)


def plan(case: Case) -> None:
    """Note that a case is going to run."""
    _write(f"{case}.planned.json", Row(case))


@contextmanager
def recorded(case: Case) -> Iterator[Notes]:
    """Record a case, whether it ends well or not."""
    notes = Notes(Row(case))
    try:
        yield notes
    except BaseException as error:
        notes.add(problem=f"{type(error).__name__}: {error}".splitlines()[0][:200])
        raise
    finally:
        _write(f"{case}.json", notes.row)


def read(directory: Path) -> list[Row]:
    """Return the rows of a run; a case that did not end has one that says so."""
    ended = {path.name: _read(path) for path in directory.glob("*.json") if ".planned." not in path.name}
    missing = [
        replace(_read(path), problem="missing: the case did not run to its end")
        for path in directory.glob("*.planned.json")
        if path.name.replace(".planned", "") not in ended
    ]
    rows = [*ended.values(), *missing]
    return sorted(rows, key=lambda row: (row.case.engine, row.case.model, row.case.ranks, row.case.dtype))


def _write(name: str, row: Row) -> None:
    if directory := os.environ.get(VARIABLE):
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / name).write_text(json.dumps(asdict(row)))


def _read(path: Path) -> Row:
    fields = json.loads(path.read_text())
    return Row(**(fields | {"case": Case(**fields["case"])}))
