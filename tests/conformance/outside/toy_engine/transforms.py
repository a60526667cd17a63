"""A transform of the toy package's own."""

from __future__ import annotations

import numpy as np

from syncline.layout import Transform

calls = []


def offer():
    calls.append("offered")
    return [Transform("toy:flip", "float32", "float32", True, lambda raw: raw ^ np.uint32(1 << 31))]
