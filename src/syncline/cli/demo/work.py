"""What the demo asks of one rank of an inference instance, whatever engine it is of."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import save_file

from syncline.verify.effective import compare

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from syncline.store.adapter import LiveStatus

_COPY_BYTES = 64 << 20


class Looked(Protocol):
    """The part of an engine's adapter that looks at live tensors; see `syncline.store.adapter`."""

    def live_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return every live tensor by name."""
        ...

    def live_status(self) -> Mapping[str, LiveStatus]:
        """Say of each whose business it is."""
        ...

    def load_fresh(self, directory: Path) -> Mapping[str, torch.Tensor]:
        """Load a checkpoint by the engine's own loader; by the same names."""
        ...


def memcpy(nbytes: int, at: float) -> dict[str, Any]:
    """Copy as many bytes as an update moves here, between two warm private buffers.

    Args:
        nbytes: how many.
        at: of `time.time`; all ranks begin at once, as they pull.
    """
    left = nbytes
    source, target = (torch.zeros(min(left, _COPY_BYTES), dtype=torch.uint8) for _ in range(2))
    target.copy_(source)
    time.sleep(max(0.0, at - time.time()))
    began = time.perf_counter()
    while left > 0:
        part = min(left, source.numel())
        target[:part].copy_(source[:part])
        left -= part
    return {"seconds": time.perf_counter() - began, "nbytes": nbytes}


def effective(engine: Looked, checkpoint: Path) -> dict[str, Any]:
    """Compare every live tensor with a fresh load of a checkpoint."""
    report = compare(engine.live_tensors(), engine.load_fresh(checkpoint))
    return {"tensors": report.tensors, "diffs": [str(diff) for diff in report.diffs]}


def dump_name(instance: str, rank: int) -> str:
    """Return the name of a rank's dump."""
    return f"instance-{instance}-rank-{rank}.safetensors"


def dump(engine: Looked, path: Path) -> None:
    """Write the live tensors as they are, under their own names, as safetensors."""
    taken: set[int] = set()
    save_file({name: _alone(tensor, taken) for name, tensor in engine.live_tensors().items()}, str(path))


def _alone(tensor: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """Return a tensor that safetensors stores as it is: contiguous, alone in its storage, and that once."""
    storage = tensor.untyped_storage()
    alone = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes and storage.data_ptr() not in taken
    taken.add(storage.data_ptr())
    return tensor if alone else tensor.contiguous().clone()
