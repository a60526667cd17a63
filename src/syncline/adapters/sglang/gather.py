"""Texts of all ranks, over the gloo group that SGLang keeps between its schedulers: bytes, no pickle."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def gather(group: Any, data: bytes) -> list[bytes]:
    """Return what every rank of a group gave, by rank; all of them call it together.

    Args:
        group: a gloo group.
        data: this rank's own.
    """
    world = dist.get_world_size(group)
    mine = torch.tensor([len(data)], dtype=torch.int64)
    sizes = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(sizes, mine, group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.frombuffer(bytearray(data.ljust(max(1, longest), b"\0")), dtype=torch.uint8)
    parts = [torch.zeros_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    return [bytes(part[: int(size)].tolist()) for part, size in zip(parts, sizes, strict=True)]
