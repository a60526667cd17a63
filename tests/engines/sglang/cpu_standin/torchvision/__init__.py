"""A stand-in for torchvision, which SGLang imports for images that no test sends."""

from __future__ import annotations

from absent import stand_in

__getattr__ = stand_in(__name__)
