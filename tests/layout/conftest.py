"""Settings of this room's tests: machines are shared, so an example has no wall-clock deadline of its own."""

from __future__ import annotations

import torch
from hypothesis import settings

settings.register_profile("syncline", deadline=None)
settings.load_profile("syncline")
torch.set_num_threads(1)
