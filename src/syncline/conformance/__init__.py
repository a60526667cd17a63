"""The conformance suite: real updates through somebody's adapter, and what each of them must leave behind.

``syncline conformance package.module:factory`` runs it from the command line, `check` from a program. The
factory is called as ``factory(rank, world)`` and returns a new engine or trainer adapter each time.
"""

from __future__ import annotations

from syncline.conformance.report import Check, Outcome, Report
from syncline.conformance.suite import check, factory_of

__all__ = ["Check", "Outcome", "Report", "check", "factory_of"]
