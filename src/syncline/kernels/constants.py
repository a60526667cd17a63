"""Constants of the digest, part of the wire format: see `syncline.kernels.reference`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_WORDS = 4096
KEY_SEED = 0x53594E434C494E45  # "SYNCLINE"


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return splitmix64's output for each state in ``x``.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _block_keys() -> NDArray[np.uint32]:
    keys = np.zeros(BLOCK_WORDS + 16, np.uint32)
    skip = -keys.ctypes.data % 64 // 4  # on a cache line, for the kernel's loads
    keys = keys[skip : skip + BLOCK_WORDS]
    keys[:] = (
        mix(np.arange(BLOCK_WORDS, dtype=np.uint64) ^ np.uint64(KEY_SEED)) >> np.uint64(32)
    ) | np.uint64(1)
    keys.setflags(write=False)
    return keys


BLOCK_KEYS = _block_keys()
"""uint32[4096], odd and pairwise distinct: the weights of a block's words."""
