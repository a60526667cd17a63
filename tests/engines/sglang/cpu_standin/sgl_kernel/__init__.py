"""A stand-in for the kernels of SGLang, which cannot run on a CPU without the instructions they need."""

from __future__ import annotations

from absent import stand_in

__getattr__ = stand_in(__name__)
