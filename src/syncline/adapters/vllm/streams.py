"""Order between the thread that owns a model and the thread of an update, on a device's streams.

Each thread queues on a stream of its own: what one queued is done before what the other queues next, without
either of them waiting on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class Ordered:
    """Runs tasks in another thread, in order with what the caller queued before and queues afterwards.

    Args:
        run: runs a task in the other thread, and returns when it is done.
        device: on which both queue; in host memory nothing outlives its call.
    """

    def __init__(self, run: Callable[[Callable[[], None]], None], device: torch.device) -> None:
        self._run, self._device = run, device

    def run(self, task: Callable[[], None]) -> None:
        """Run a task: after the work on the caller's stream, and before what is put there next."""
        if self._device.type != "cuda":
            self._run(task)
            return
        before, after = self._event(), torch.cuda.Event()

        def in_order() -> None:
            with torch.cuda.device(self._device):
                stream = torch.cuda.current_stream()
                stream.wait_event(before)
                task()
                after.record(stream)

        self._run(in_order)
        torch.cuda.current_stream(self._device).wait_event(after)

    def finish(self) -> None:
        """Wait, on the host, for what the other thread queued."""
        if self._device.type == "cuda":
            self._run(lambda: torch.cuda.current_stream(self._device).synchronize())

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event
