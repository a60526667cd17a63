"""What a run of the suite found, check by check."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from syncline.errors import SynclineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Outcome(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """It could not be made: the adapter does not offer what it needs, or an earlier check failed."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: dotted; stable from release to release.
        outcome: how it ended.
        expected: of a failed check, what would have been right.
        found: what came instead; of a skipped one, why.
        seconds: it took.
    """

    name: str
    outcome: Outcome
    expected: str = ""
    found: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class Report:
    """All checks of one adapter.

    Attributes:
        subject: what was checked.
        kind: ``"engine"`` or ``"trainer"``.
        checks: in the order in which they ran.
    """

    subject: str
    kind: str
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """Names of the failed checks."""
        return [check.name for check in self.checks if check.outcome is Outcome.FAILED]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def run(self, name: str, make: Callable[[], object], needs: Iterable[str] = ()) -> bool:
        """Make one check and note how it ended; any exception is a failure of that check alone.

        Args:
            name: of the check.
            make: raises `NonconformityError`, or `UnobservableError` where there is nothing to see.
            needs: names of checks that must have passed before.

        Returns:
            Whether it passed.
        """
        passed = {check.name for check in self.checks if check.outcome is Outcome.PASSED}
        missing = [other for other in needs if other not in passed]
        if missing:
            self.checks.append(Check(name, Outcome.SKIPPED, found=f"{missing[0]} did not pass"))
            return False
        began = time.monotonic()
        outcome, expected, found = Outcome.PASSED, "", ""
        try:
            make()
        except UnobservableError as error:
            outcome, found = Outcome.SKIPPED, error.what
        except NonconformityError as error:
            outcome, expected, found = Outcome.FAILED, error.expected or "", _found(error)
        except Exception as error:  # somebody's adapter may raise anything
            kind = type(error).__name__
            outcome, expected, found = Outcome.FAILED, "no error", f"{kind}: {error}"
        self.checks.append(Check(name, outcome, expected, found, time.monotonic() - began))
        return outcome is Outcome.PASSED


def _found(error: NonconformityError) -> str:
    where = "".join(f", {part}" for part in (error.tensor, error.rank) if part)
    return f"{error.what}{where}" + (f": {error.found}" if error.found else "")


class NonconformityError(SynclineError):
    """An adapter did not do what its contract says."""


class UnobservableError(SynclineError):
    """A check that cannot be made on this adapter, and why."""
