"""Links and programs: how bytes move from one process's memory into another's, behind one contract (`base`).

Backends are imported where they are used; `registry` knows them by name.
"""

from __future__ import annotations
