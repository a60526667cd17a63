"""Host kernels over tables of strided runs: copy, digest, cast and compare, on raw addresses.

`syncline.kernels.host` is the face (numba is imported on the first call), `syncline.kernels.reference`
defines what it must compute, bit for bit, and `syncline.kernels.engine` runs a table in slices from several
threads.
"""

from __future__ import annotations
