"""One rank's GPU faked on CPU; imported before processes are forked, which then have kernels compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from syncline.adapters import module, trainer
from syncline.kernels import host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncline.transport.nccl_device import Device

LOADED = (module, trainer)
"""What the fake device imports and takes longest."""

host.load()


class FakeGpu:
    """The fake device of the transport tests, in this process from now on; memory is the host's.

    Two of them are one GPU if they have one number.
    """

    bucket = 4096

    def __init__(self, gpu: int) -> None:
        from tests.transport_gpu import fake  # noqa: PLC0415 - it starts a thread, which no fork would keep

        self.index, self.device, self._gpu, self._fake = 0, torch.device("cpu"), gpu, fake
        self._driver = fake.install(pytest.MonkeyPatch())

    def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return uint8 storages, each a block of its own."""
        return [self._driver.allocate(max(n, 1))[:n] for n in sizes]

    def nccl(self) -> Device:
        """Return a device that others know by the GPU's number."""
        return self._fake.FakeDevice(f"fake-{self._gpu}")

    def idle(self) -> None:
        """Do nothing: whoever starts work on a fake stream waits for it."""

    def empty(self) -> None:
        """Do nothing: the process ends soon."""
