"""The device kernels run on a GPU where there is one, else in Triton's interpreter, else not at all."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

HAVE_TRITON = importlib.util.find_spec("triton") is not None


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    if not HAVE_TRITON:
        pytest.skip("Triton is not installed: the device kernels can neither be compiled nor interpreted")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
