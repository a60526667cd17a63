"""Where every element lives: boxes, views, shards, manifests, transforms, and their wire form.

Importing this package needs numpy only. How layouts are learned from torch lives in
`syncline.layout.dtensor` and `syncline.layout.export`, which import torch and are imported where used.
"""

from __future__ import annotations

from syncline.layout.box import Box
from syncline.layout.layout_rule import LayoutRule, register_layout_rule
from syncline.layout.manifest import Layout, Manifest
from syncline.layout.segments import Segments
from syncline.layout.shard import Shard
from syncline.layout.transform import Rules, Transform, register_transform
from syncline.layout.view import View

__all__ = [
    "Box",
    "Layout",
    "LayoutRule",
    "Manifest",
    "Rules",
    "Segments",
    "Shard",
    "Transform",
    "View",
    "register_layout_rule",
    "register_transform",
]
