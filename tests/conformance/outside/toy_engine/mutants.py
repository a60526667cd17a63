"""Toy engines that each break one promise."""

from __future__ import annotations

from dataclasses import replace

import torch

from syncline.layout import Box
from syncline.memory import Binding
from syncline.store.adapter import Stage, Status
from toy_engine import ToyAdapter


class ForgetsToPause(ToyAdapter):
    def pause(self, mode, deadline):
        pass


class PausesInPassing(ToyAdapter):
    """Returns from pause while a pass runs."""

    def pause(self, mode, deadline):
        self.open.clear()


class StaysPaused(ToyAdapter):
    """Forgets to open again after a pause that failed."""

    def pause(self, mode, deadline):
        try:
            super().pause(mode, deadline)
        finally:
            self.open.clear()


class MovesATensor(ToyAdapter):
    """And does not notice."""

    def pointers(self):
        return []

    def after_update(self, key, received=None):
        super().after_update(key, received)
        self.tensors["packed"] = self.tensors["packed"].clone()


class DerivesTwice(ToyAdapter):
    """Its hook adds, and does not know which version it has seen."""

    def end_stage(self, index):
        super().end_stage(index)
        self.tensors["norms"].zero_()

    def after_update(self, key, received=None):
        self.tensors["norms"].add_(self.tensors["fused"].view(torch.int16).sum(1))


class ForgetsToDerive(ToyAdapter):
    def after_update(self, key, received=None):
        pass


class IgnoresAStage(ToyAdapter):
    def end_stage(self, index):
        if index != 2:
            super().end_stage(index)


class LosesAStorage(ToyAdapter):
    def __init__(self, rank, world):
        super().__init__(rank, world)
        self.stages = (Stage("direct", (0, 1)), Stage("scales", (2,)))


class CallsSyncedLocal(ToyAdapter):
    """Says that it keeps a tensor for itself that updates write."""

    def live_status(self):
        found = super().live_status()
        found["norms"] = replace(found["norms"], status=Status.LOCAL)
        return found


class SwapsNames(ToyAdapter):
    def live_status(self):
        found = super().live_status()
        for one, other in (("embed", "packed"), ("packed", "embed")):
            found[one] = replace(found[one], names=super().live_status()[other].names)
        return found


class HidesATensor(ToyAdapter):
    def live_status(self):
        found = super().live_status()
        del found["positions"]
        return found


class WrongCut(ToyAdapter):
    """Takes the rows of the gate where those of up belong, and the other way round."""

    def cut(self, shards):
        other = {"gate": "up", "up": "gate"}
        return [replace(shard, name=other.get(shard.name, shard.name)) for shard in shards]


class WrongColumns(ToyAdapter):
    """Takes another rank's columns."""

    def cut(self, shards):
        def moved(shard):
            if shard.name != "down":
                return shard
            start = (shard.box.offset[1] + self.model.rows) % 8
            return replace(shard, box=Box((0, start), shard.box.size))

        return [moved(shard) for shard in shards]


class LaysTwice(ToyAdapter):
    """Two checkpoint tensors in one place."""

    def cut(self, shards):
        view = next(shard.view for shard in shards if shard.name == "gate")
        return [replace(shard, view=view) if shard.name == "up" else shard for shard in shards]


class BindsAnother(ToyAdapter):
    def binding(self):
        found = super().binding()
        return Binding.private(bytes(16), found.addresses())


class KeepsItsCache(ToyAdapter):
    def flush_caches(self):
        pass


class HidesItsVersion(ToyAdapter):
    def report_version(self, key):
        self.version = self.version or key


class LoadsNothing(ToyAdapter):
    def load_fresh(self, directory):
        return super().load_fresh(directory) if directory.is_dir() else {}


class TakesAnyStage(ToyAdapter):
    def begin_stage(self, index):
        pass


class LacksAMember(ToyAdapter):
    @property
    def flush_caches(self):
        raise AttributeError("flush_caches")
