"""Gathers of bytes over the trainers' own process group, when an adapter is made; never later."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import torch.distributed as dist

from syncline.errors import AdapterError, SynclineError, from_wire, to_wire

MAX_BYTES = 256 << 20


def exchange(mine: bytes, group: Any = None) -> list[bytes]:
    """Return every process's bytes, in the order of ranks; collective.

    Args:
        mine: at most `MAX_BYTES`.
        group: the processes; all if left out. Without torch.distributed there is only this one.

    Raises:
        AdapterError: more than `MAX_BYTES` from one process.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [mine]
    cpu = "gloo" in str(dist.get_backend(group))
    device = torch.device("cpu") if cpu else torch.device(torch.accelerator.current_accelerator() or "cpu")
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(mine)], dtype=torch.int64, device=device), group=group)
    lengths = [int(size) for size in sizes]
    if max(lengths) > MAX_BYTES:
        raise AdapterError(
            "a trainer rank's layout is larger than any sensible one", expected=MAX_BYTES, found=max(lengths)
        )
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    parts = [torch.zeros_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return [bytes(part[:n].cpu().numpy()) for part, n in zip(parts, lengths, strict=True)]


def agree(problem: SynclineError | None, group: Any = None) -> None:
    """Raise one process's error on all of them; collective.

    Args:
        problem: of this process, if it has one.
        group: the processes; all if left out.

    Raises:
        SynclineError: this process's own, else the first that another one has.
    """
    told = exchange(msgspec.msgpack.encode(None if problem is None else to_wire(problem)), group)
    if problem is not None:
        raise problem
    for data in told:
        error = msgspec.msgpack.decode(data, type=dict[str, str | None] | None)
        if error is not None:
            raise from_wire(error)
