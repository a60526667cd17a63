"""What a loader does, as data: the outcome of a trace or of a probe, in checkpoint and live names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncline.layout.lattice import Map
from syncline.layout.shard import Shard
from syncline.layout.view import View, row_major

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncline.layout.box import Box
    from syncline.layout.replay import Replay


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor without contents: its shape, and torch's name of its dtype without ``torch.``."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class LiveSpec:
    """How a live tensor of the twin is laid out after loading; a real one must be laid out alike.

    Attributes:
        shape: its shape.
        stride: its strides, in elements.
        dtype: torch's name of its dtype.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Write:
    """A box of a checkpoint tensor that stands in a live tensor.

    Attributes:
        name: the checkpoint name.
        shape: shape of the whole checkpoint tensor.
        box: which elements.
        view: where they stand: storage 0, offset in elements from the live tensor's first one.
        src_dtype: torch's name of the checkpoint tensor's dtype.
        dst_dtype: the dtype that they are stored as: the live tensor's if they are cast, ``src_dtype`` if
        their
            bits are kept (also where the live tensor calls the same bits by another dtype of that size).
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    view: View
    src_dtype: str
    dst_dtype: str

    @property
    def map(self) -> Map:
        """Live elements, from the live tensor's first one, and the checkpoint tensor's, row-major."""
        start, axes = 0, []
        dims = zip(row_major(self.shape), self.box.offset, self.view.shape, self.view.stride, strict=True)
        for stride, low, extents, steps in dims:
            start += low * stride
            for n, step in zip(reversed(extents), reversed(steps), strict=True):
                axes.append((n, step, stride))
                stride *= n  # noqa: PLW2901 (of the next axis out)
        return Map.of(self.view.offset, start, axes)

    def shard(self, storage: int, offset: int) -> Shard:
        """Return the shard; ``offset`` is where the live tensor's first element lies in ``storage``."""
        view = View(storage, offset + self.view.offset, self.view.shape, self.view.stride)
        return Shard(self.name, self.shape, self.dst_dtype, self.box, view)


@dataclass(frozen=True, eq=False)
class LoaderTrace:
    """How a loader fills live tensors from checkpoint tensors.

    Attributes:
        writes: by live name, what is copied (and perhaps cast); disjoint, in the order of live elements.
        replays: what is computed, and constants that the loader writes.
        unused: checkpoint names of which nothing reaches a live tensor.
        reasons: for each of `unused`, what became of it.
        holes: by live name, the boxes that the loader leaves as they were; names without a hole are absent.
        live: every live tensor of its own storage elements, by name; two names of one view count once.
        ties: second names: name -> the name under which `live` has the same elements.
        rebound: live names that the loader gave another storage.
    """

    writes: Mapping[str, tuple[Write, ...]]
    replays: tuple[Replay, ...]
    unused: tuple[str, ...]
    reasons: Mapping[str, str]
    holes: Mapping[str, tuple[Box, ...]]
    live: Mapping[str, LiveSpec]
    ties: Mapping[str, str]
    rebound: tuple[str, ...]

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """By live name, the checkpoint names of which it holds elements, copied or computed."""
        found: dict[str, dict[str, None]] = {name: {} for name in self.live}
        for live, writes in self.writes.items():
            found[live].update((write.name, None) for write in writes)
        for replay in self.replays:
            for live in replay.live:
                found[live].update(dict.fromkeys(replay.inputs))
        return {live: tuple(names) for live, names in found.items()}

    def shards(self, where: Mapping[str, tuple[int, int]]) -> list[Shard]:
        """Return the copied part as shards, ready for `Manifest.from_shards`.

        Args:
            where: by live name, (storage, element offset of the tensor's first element in it). Live tensors
                that are not named are left out: they are received elsewhere, or in another stage.
        """
        return [
            write.shard(*where[live])
            for live, writes in self.writes.items()
            if live in where
            for write in writes
        ]
