"""syncline: weight sync at line rate for reinforcement learning.

Trainer ranks publish their live parameters; inference ranks that cut the model in another way pull them in
place, prove them, and commit, all ranks of an instance or none::

    writer = syncline.WeightWriter(FSDPTrainer(model, optimizer), job="rl")
    writer.publish(step)

    reader = syncline.WeightReader(HuggingFaceEngine.load(path), instance="a", job="rl")
    reader.update()

Names below are imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from syncline.errors import SynclineError
    from syncline.layout import LayoutRule, Rules, Transform, register_layout_rule, register_transform
    from syncline.options import Options
    from syncline.store.keys import ShardedKey
    from syncline.store.reader import WeightReader
    from syncline.store.report import UpdateReport
    from syncline.store.table import TensorTable
    from syncline.store.worker import WorkerWeightsReader
    from syncline.store.writer import WeightWriter

__version__ = "0.1.0"

_HOMES = {
    "SynclineError": "syncline.errors",
    "LayoutRule": "syncline.layout",
    "Rules": "syncline.layout",
    "Transform": "syncline.layout",
    "register_layout_rule": "syncline.layout",
    "register_transform": "syncline.layout",
    "Options": "syncline.options",
    "ShardedKey": "syncline.store.keys",
    "WeightReader": "syncline.store.reader",
    "UpdateReport": "syncline.store.report",
    "TensorTable": "syncline.store.table",
    "WorkerWeightsReader": "syncline.store.worker",
    "WeightWriter": "syncline.store.writer",
}

__all__ = [
    "LayoutRule",
    "Options",
    "Rules",
    "ShardedKey",
    "SynclineError",
    "TensorTable",
    "Transform",
    "UpdateReport",
    "WeightReader",
    "WeightWriter",
    "WorkerWeightsReader",
    "register_layout_rule",
    "register_transform",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'syncline' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
