"""What the server that the chaos tests' processes are forked from has loaded: imports only, no thread."""

from __future__ import annotations

import torch._dynamo  # torch's optimizers import it, for more than a second
import torch.distributed.fsdp
from torch.distributed.tensor import DTensor

from syncline.kernels import host
from syncline.transport import gloo
from tests.chaos import roles
from tests.transport import preload as transport

host.load()
__all__ = ["DTensor", "gloo", "roles", "torch", "transport"]
