"""Any rank of any mesh in one process: torch's fake process group moves nothing, and layouts need nothing."""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_rank(rank, world):
    # torch caches sharding decisions with the mesh of the rank that made them
    debug._clear_sharding_prop_cache()
    torch._C._clear_DTensor_sharding_propagator_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
