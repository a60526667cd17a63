"""What knows a trainer or an inference engine. Importing one imports its framework."""

from __future__ import annotations
