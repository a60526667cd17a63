"""Who sends what to whom: pure, deterministic, vectorised functions of layouts, hosts and rules."""

from __future__ import annotations

from syncline.plan.hops import DigestRows, Hops
from syncline.plan.lower import Runs, Stream, lower
from syncline.plan.pieces import Pieces
from syncline.plan.plan import PLANNER_VERSION, Plan, plan, plan_id

__all__ = [
    "PLANNER_VERSION",
    "DigestRows",
    "Hops",
    "Pieces",
    "Plan",
    "Runs",
    "Stream",
    "lower",
    "plan",
    "plan_id",
]
