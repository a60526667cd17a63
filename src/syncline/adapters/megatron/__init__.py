"""Megatron-Core: shard-level maps without a gather and without tables."""

from __future__ import annotations

from syncline.adapters.megatron.quantise import BlockFP8
from syncline.adapters.megatron.trainer import MegatronTrainer
from syncline.adapters.megatron.whole import Exporter

__all__ = ["BlockFP8", "Exporter", "MegatronTrainer"]
