"""Ranks that go on training, collectives and all, while a reader has not even begun to pull."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tests.megatron import models

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.megatron.scene import Rank

PASSES = 4
_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")


@contextmanager
def recorded(order: list[str]) -> Iterator[None]:
    """Note every collective that this process begins, with its sizes."""

    def wrapped(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            shapes = [tuple(one.shape) for one in args if hasattr(one, "shape")]
            order.append(f"{name} {shapes}")
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in _COLLECTIVES:
            original = getattr(dist, name)
            setattr(dist, name, wrapped(name, original))
            stack.callback(setattr, dist, name, original)
        yield


def versions(rank: Rank, writer: Any, save: Any) -> dict[str, Any]:
    """Publish two versions; after each, run forward and backward passes, then step: the reader has pulled."""
    idle = SimpleNamespace(zero_grad=lambda: None, step=lambda: None)
    seen: dict[str, Any] = {"orders": [], "passed": [], "stepped": []}
    rank.step()
    for version in (1, 2):
        save(str(version), rank.exported())
        order: list[str] = []
        with recorded(order):
            writer.publish(version, wait="pulled")
            for _ in range(PASSES):
                models.step(rank.model, rank.cut, idle)
            seen["passed"].append(time.monotonic())
            rank.step()
        seen["stepped"].append(time.monotonic())
        seen["orders"].append(order)
    return seen
