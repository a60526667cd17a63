"""One box in several places of a rank: a manifest holds it, and a plan feeds each place."""

from __future__ import annotations

import torch

from syncline.layout.box import Box
from syncline.layout.loader import Spec, trace_loader
from syncline.layout.manifest import Layout, Manifest
from syncline.layout.shard import Shard
from syncline.layout.view import View
from syncline.plan import plan


def test_a_plan_feeds_every_place_of_a_repeated_box():
    live = {"scale": torch.empty(3, device="meta"), "w": torch.empty(8, 4, device="meta")}
    specs = {"s": Spec((1,), "float32"), "w": Spec((4, 4), "float32")}

    def load(weights):
        w = dict(weights)
        live["scale"].copy_(w["s"])
        live["w"].copy_(w["w"].repeat(2, 1))

    shards = trace_loader(live, load, specs).shards({"scale": (0, 0), "w": (1, 0)})
    assert [(s.name, s.view.offset) for s in shards] == [("s", 0), ("s", 1), ("s", 2), ("w", 0), ("w", 16)]
    reader = Manifest.from_shards(shards, [12, 128])
    writer = Manifest.from_shards(
        [
            Shard(name, spec.shape, "float32", Box.whole(spec.shape), View.contiguous(i, 0, spec.shape))
            for i, (name, spec) in enumerate(specs.items())
        ],
        [4, 64],
    )
    made = plan(Layout((writer,)), {"a": Layout((reader,))})
    assert int(made.reader("a", 0).size.prod(axis=1).sum()) == 3 + 32
