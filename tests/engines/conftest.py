"""The engine suites note which cases they are going to run, so that one that does not end is missed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.engines import rows

if TYPE_CHECKING:
    import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """Plan the cases of all items that were selected."""
    found: dict[rows.Case, None] = {}
    for item in session.items:
        call: Any = getattr(item, "callspec", None)
        values = call.params.values() if call is not None else ()
        found |= {value: None for value in values if isinstance(value, rows.Case)}
    for case in found:
        rows.plan(case)
