"""The whole path on real GPUs: trainers and engines in processes of their own, and what must be refused."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

from syncline import faults
from syncline.cli.demo import gpu
from syncline.errors import MemoryBudgetError, SynclineError, TransportError

if TYPE_CHECKING:
    from pathlib import Path

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="needs a CUDA device"),
    pytest.mark.timeout(240),
]
two = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")

if GPUS:
    from benchmarks.gpu import messages

    from syncline.transport.nccl_device import CudaDevice


@pytest.mark.parametrize("kind", ["cuda:0", "cuda"])
def test_a_trainer_and_two_instances(tmp_path: Path, kind: str) -> None:
    result = gpu.run(tmp_path, 2, kind, print)
    assert result.versions == 2
    assert result.coverage == 1.0
    assert len(result.effective) == 3


@two
def test_the_same_over_messages(tmp_path: Path) -> None:
    result = gpu.run(tmp_path, 2, "cuda", print, "nccl")
    assert result.versions == 2
    assert len(result.effective) == 3


@two
def test_messages_arrive_bit_for_bit() -> None:
    wrong = messages.exact(3, 0, GPUS - 1)
    assert wrong == [""] * 6


@two
def test_a_peer_that_dies_in_the_midst_is_named_and_nothing_hangs() -> None:
    """Killed while the reader's kernels wait for its bytes: they are aborted, and the device goes on."""
    made = messages.Messages(0, GPUS - 1, messages.Staging(bucket=64 << 20))
    made.made(("qwen", 1, 2, "bfloat16", "bfloat16"))
    assert made.wrong() == ""
    alive = [made._child]

    def kill() -> None:
        if alive:
            alive.pop().kill()
            time.sleep(0.2)

    began = time.monotonic()
    with (
        faults.arm("nccl.before_bucket", kill),
        pytest.raises(TransportError, match="writer"),
    ):
        made.transfer()
    assert not alive
    assert time.monotonic() - began < 25
    assert float(torch.ones(4, device=f"cuda:{GPUS - 1}").sum()) == 4
    made.transport.close(5.0)


def test_two_ranks_on_one_gpu_are_refused() -> None:
    made = messages.Messages(0, 0)
    with pytest.raises(TransportError, match="share one GPU"):
        made.made(("world", 411))
    made.close()


def test_no_room_for_buckets() -> None:
    with pytest.raises(MemoryBudgetError, match="no room for 2 buckets"):
        CudaDevice(0).memory(1 << 42, 2)


def test_no_such_device_is_said(tmp_path: Path) -> None:
    with pytest.raises(SynclineError, match="no such kind of device"):
        gpu.run(tmp_path, 1, "tpu", print)
