"""An engine that syncline does not know: installed by the tests as a package of its own.

It keeps two tensors as they come, one padded and one fused; one it packs into a form of its own, layer by
layer; and one its loader takes only after looking at its values, so that a layout rule has to explain it.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

import torch
from safetensors.torch import load_file

import syncline
from syncline.errors import AdapterError, DeadlineError
from syncline.layout import Manifest
from syncline.layout.loader_rules import trace_with_rules
from syncline.layout.written import Spec
from syncline.memory import Binding
from syncline.store.adapter import LiveStatus, Stage, Status

CHECKPOINT = {
    "tok": Spec((10, 4), "float32"),
    "gate": Spec((8, 4), "bfloat16"),
    "up": Spec((8, 4), "bfloat16"),
    "scale": Spec((6,), "float32"),
    "down": Spec((4, 8), "float32"),
}
HELD = {"embed": ("tok",), "fused": ("gate", "up"), "scale": ("scale",), "packed": ("down",)}


def scales(weights, live):
    """Do what `ToyModel.load` does with the scale, without looking."""
    live["scale"].copy_(weights["scale"].abs())


syncline.register_layout_rule("scale", scales, model="ToyModel", name="toy scale")


class ToyModel:
    """The engine: its tensors as a load leaves them, then finished for its kernels."""

    def __init__(self, rank, world, device="cpu"):
        self.rank, self.rows = rank, 8 // world
        self.tensors = {
            "embed": torch.zeros(16, 4, device=device),
            "fused": torch.zeros(2 * self.rows, 4, dtype=torch.bfloat16, device=device),
            "scale": torch.zeros(6, device=device),
            "down": torch.zeros(4, self.rows, device=device),
        }

    def load(self, weights):
        own = slice(self.rank * self.rows, (self.rank + 1) * self.rows)
        for name, tensor in weights:
            if name == "tok":
                self.tensors["embed"][: tensor.shape[0]].copy_(tensor)
            elif name in ("gate", "up"):
                start = self.rows * (name == "up")
                self.tensors["fused"][start : start + self.rows].copy_(tensor[own])
            elif name == "scale":
                self.tensors["scale"].copy_(-tensor if bool((tensor < 0).all()) else tensor.abs())
            else:
                self.tensors["down"].copy_(tensor[:, own])

    def finish(self):
        self.tensors["packed"] = self.tensors.pop("down").t().contiguous()
        self.tensors["norms"] = torch.zeros(2 * self.rows, dtype=torch.int64)
        self.tensors["positions"] = torch.arange(16)
        self.derive()

    def derive(self):
        self.tensors["norms"].copy_(self.tensors["fused"].view(torch.int16).sum(1))


class ToyAdapter:
    """What syncline sees of one rank."""

    def __init__(self, rank, world):
        self.rank, self.world, self.version = rank, world, None
        self.aliases = {}
        self.model = ToyModel(rank, world)
        self.model.finish()
        twin = ToyModel(rank, world, "meta")
        trace = trace_with_rules(twin.tensors, twin.load, CHECKPOINT, model="ToyModel")
        (self.scaling,) = trace.replays
        where = {"embed": (0, 0), "fused": (1, 0), "down": (3, 0)}
        shards = [*trace.shards(where), *self.scaling.input_shards({"scale": (2, 0)})]
        sizes = [16 * 4 * 4, 2 * self.model.rows * 4 * 2, 6 * 4, 4 * self.model.rows * 4]
        self.arena = torch.zeros(max(sizes[2:]) // 4)
        self.manifest = Manifest.from_shards(self.cut(shards), sizes)
        self.stages = (Stage("direct", (0, 1)), Stage("scales", (2,)), Stage("down", (3,)))
        self.tensors = self.model.tensors
        self.pins = self.pointers()
        self.turn, self.open = threading.Lock(), threading.Event()
        self.open.set()
        self.cache = None

    def cut(self, shards):
        return shards

    def pointers(self):
        return [tensor.data_ptr() for tensor in self.tensors.values()]

    def binding(self):
        if self.pointers() != self.pins:
            raise AdapterError("a live tensor moved", rank=self.rank)
        arena = self.arena.data_ptr()
        direct = [self.tensors[name].data_ptr() for name in ("embed", "fused")]
        return Binding.private(self.manifest.fingerprint, [*direct, arena, arena])

    @contextmanager
    def forward(self):
        if not self.open.wait(60.0):
            raise DeadlineError("paused for a minute")
        with self.turn:
            yield

    def run(self):
        with self.forward():
            if self.cache is None:  # as a prefix cache: made once, from the weights
                self.cache = self.tensors["embed"].view(torch.int32).sum()
            sums = [self.tensors[name].view(torch.int32).sum() for name in ("scale", "packed")]
            return torch.stack([self.cache, *sums, self.tensors["norms"].sum()])

    def pause(self, mode, deadline):
        self.open.clear()
        if not self.turn.acquire(timeout=deadline):
            self.open.set()
            raise DeadlineError("a forward pass still runs")
        self.turn.release()

    def resume(self, key):
        self.open.set()

    def begin_stage(self, index):
        if not 0 <= index < len(self.stages):
            raise AdapterError("no such stage", found=index)

    def end_stage(self, index):
        self.begin_stage(index)
        if index == 1:
            self.scaling.run({"scale": self.arena[:6]}, self.tensors)
        elif index == 2:
            down = self.arena[: 4 * self.model.rows].view(4, self.model.rows)
            self.tensors["packed"].copy_(down.t())

    def after_update(self, key, received=None):
        if key != self.version:
            self.model.derive()

    def flush_caches(self):
        self.cache = None

    def report_version(self, key):
        self.version = key
        if self.rank:  # rank 0's caches are flushed by the instance's controller
            self.cache = None

    def live_tensors(self):
        return dict(self.tensors)

    def live_status(self):
        kinds = {"norms": Status.DERIVED, "positions": Status.LOCAL}
        return {
            name: LiveStatus(
                kinds.get(name, Status.SYNCED),
                HELD.get(name, ()),
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
            )
            for name, tensor in self.tensors.items()
        }

    def load_fresh(self, directory):
        fresh = ToyModel(self.rank, self.world)
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(directory)
        for file in files:
            fresh.load(load_file(file).items())
        fresh.finish()
        return fresh.tensors
