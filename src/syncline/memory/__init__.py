"""Everything with an address: regions, bindings, the arena of live parameters, mapped segments, budgets."""

from __future__ import annotations

from syncline.memory.binding import Binding
from syncline.memory.region import Kind, Region

__all__ = ["Binding", "Kind", "Region"]
