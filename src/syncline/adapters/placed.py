"""Where live tensors lie, and when a device has finished with them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from syncline.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Sequence


def device_of(parts: Sequence[torch.Tensor], names: Sequence[str], rank: object) -> torch.device:
    """Return the one device that live tensors lie on; host memory if there are none.

    Raises:
        AdapterError: they lie on several.
    """
    found = list(dict.fromkeys(part.device for part in parts))
    if len(found) > 1:
        stray = next(i for i, part in enumerate(parts) if part.device == found[1])
        raise AdapterError(
            "the live tensors lie on several devices",
            expected=str(found[0]),
            found=", ".join(map(str, found)),
            rank=rank,
            tensor=names[stray],
            hint="one process publishes, or serves, from one device: move the model, or use more processes",
        )
    return found[0] if found else torch.device("cpu")


class Forwards:
    """Knows when a device has finished the forward passes of this process, on whatever streams they ran.

    Args:
        device: of the engine's live tensors; in host memory nothing outlives its call.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mutex = threading.Lock()
        self._ends: dict[int, torch.cuda.Event] = {}

    def ended(self) -> None:
        """Remember what is on the current stream: called by the thread that queued a forward pass."""
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        with self._mutex:
            self._ends.setdefault(stream.cuda_stream, torch.cuda.Event()).record(stream)

    def finish(self) -> None:
        """Wait, on the host, for the forward passes, and for what this thread queued itself."""
        if self._device.type != "cuda":
            return
        with self._mutex:
            ends = list(self._ends.values())
        for end in ends:
            end.synchronize()
        torch.cuda.current_stream(self._device).synchronize()
