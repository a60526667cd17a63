"""Replays: what a loader computes, run again on real tensors.

A replay runs recorded operations in private memory and only then writes the live views, so that a failure
leaves the live tensors as they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from syncline.errors import LayoutError
from syncline.layout.lattice import Map, split
from syncline.layout.pieces import lattice
from syncline.layout.recorded import Constant, Node, Result, Value, Weight
from syncline.layout.shard import Shard
from syncline.layout.view import View, row_major

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from syncline.layout.box import Box
    from syncline.layout.content import Piece


@dataclass(frozen=True, slots=True)
class Output:
    """Elements of a live tensor that a replay writes.

    Attributes:
        live: name of the live tensor.
        dtype: its dtype.
        piece: by element from the live tensor's first one; the origin is a result, a constant or a weight.
    """

    live: str
    dtype: torch.dtype
    piece: Piece

    @property
    def view(self) -> View:
        """The elements written, a box dimension an axis; storage 0, offset from the tensor's first one."""
        axes = self.piece.map.axes
        return View.simple(0, self.piece.map.a, [x.n for x in axes], [x.a for x in axes])


@dataclass(frozen=True, eq=False, repr=False)
class Replay:
    """Recorded operations from checkpoint tensors to views of live tensors.

    Attributes:
        nodes: in an order in which they can run.
        outputs: what is written; disjoint.
        inputs: the checkpoint names that are read; none where a loader writes constants.
        boxes: by input name, the smallest box of the checkpoint tensor that holds all elements read.
        shapes: by input name, the whole checkpoint tensor's shape.
        dtypes: by input name, torch's name of its dtype.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    inputs: tuple[str, ...]
    boxes: Mapping[str, Box]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    @property
    def live(self) -> tuple[str, ...]:
        """Names of the live tensors that are written."""
        return tuple(dict.fromkeys(output.live for output in self.outputs))

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of the recorded operations, in order."""
        return tuple(map(str, self.nodes))

    def __repr__(self) -> str:
        return f"Replay({', '.join(self.inputs)} -> {', '.join(self.ops)} -> {', '.join(self.live)})"

    def input_shards(self, where: Mapping[str, tuple[int, int]]) -> list[Shard]:
        """Return the shards that bring the inputs into staging memory, each a contiguous box.

        Args:
            where: by input name, (storage, element offset) of the first element of its box.
        """
        return [
            Shard(
                name,
                self.shapes[name],
                self.dtypes[name],
                self.boxes[name],
                View.contiguous(*where[name], self.boxes[name].size),
            )
            for name in self.inputs
        ]

    @torch.no_grad()
    def run(self, inputs: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]) -> None:
        """Compute from ``inputs`` and write the outputs; nothing is written if an operation fails.

        Args:
            inputs: at least `inputs`, each whole or only its box, in the checkpoint's dtype.
            live: at least the tensors of `live`, laid out as the traced ones.

        Raises:
            LayoutError: an input or live tensor is missing, or of another shape or dtype.
        """
        targets = [(output, _target(output, live)) for output in self.outputs]
        device = targets[0][1].device if targets else torch.device("cpu")
        work = _Run(self, inputs, device)
        values = [(target, output.piece, *work.source(output.piece)) for output, target in targets]
        for target, piece, flat, maps in values:
            for m in maps:
                _install(target, int(target.storage_offset()), piece, flat, m)


def _target(output: Output, live: Mapping[str, torch.Tensor]) -> torch.Tensor:
    tensor = live.get(output.live)
    if tensor is None or tensor.dtype != output.dtype:
        raise LayoutError(
            "a replay cannot write a live tensor",
            expected=output.dtype,
            found="no such tensor" if tensor is None else tensor.dtype,
            tensor=output.live,
        )
    return tensor.detach()


class _Run:
    """One run: nodes are computed when they are first asked for, and dropped after their last use."""

    def __init__(self, replay: Replay, inputs: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self.replay, self.inputs, self.device = replay, inputs, device
        self._results: dict[int, list[torch.Tensor]] = {}
        self._uses: dict[int, int] = {}
        for piece in pieces_of(replay):
            if isinstance(piece.origin, Result):
                key = id(piece.origin.node)
                self._uses[key] = self._uses.get(key, 0) + 1
        for node in replay.nodes:
            self._results[id(node)] = [x.contiguous().view(-1) for x in node.run(self.build, device)]

    def build(self, value: Value) -> torch.Tensor:
        """Return an argument in private memory."""
        flat = torch.empty(value.span, dtype=value.dtype, device=self.device)
        for piece in value.pieces:
            source, maps = self.source(piece)
            for m in maps:
                _install(flat, 0, piece, source, m)
        return flat.as_strided(value.size, value.stride)

    def source(self, piece: Piece) -> tuple[torch.Tensor, list[Map]]:
        """Return the flat elements of a piece's origin, and the maps to them."""
        origin = piece.origin
        if isinstance(origin, Result):
            found = self._results[id(origin.node)][origin.index]
            self._uses[id(origin.node)] -= 1
            if not self._uses[id(origin.node)]:
                del self._results[id(origin.node)]
            return found, [piece.map]
        if isinstance(origin, Constant):
            return origin.tensor.to(self.device).view(-1), [piece.map]
        if not isinstance(origin, Weight):
            raise LayoutError("a replay that needs what it cannot have", found=type(origin).__name__)
        return self._weight(origin, piece.map)

    def _weight(self, origin: Weight, m: Map) -> tuple[torch.Tensor, list[Map]]:
        tensor = self.inputs.get(origin.name)
        box = self.replay.boxes[origin.name]
        shape = None if tensor is None else tuple(tensor.shape)
        kind = getattr(torch, origin.dtype)
        if tensor is None or tensor.dtype != kind or shape not in (origin.shape, box.size):
            raise LayoutError(
                "a replay needs another input",
                expected=f"{origin.dtype} {origin.shape}, or the box {box}",
                found="no such tensor" if tensor is None else f"{tensor.dtype} {shape}",
                tensor=origin.name,
            )
        flat = tensor.detach().to(self.device).contiguous().view(-1)
        if shape == origin.shape:
            return flat, [m]
        corner = sum(o * s for o, s in zip(box.offset, row_major(origin.shape), strict=True))
        inside = lattice(box.size, corner, row_major(origin.shape))
        return flat, split(m.flipped(), inside)[0]


def pieces_of(replay: Replay) -> Iterator[Piece]:
    """Yield every piece that a replay reads, once for each time that it is read."""
    for node in replay.nodes:
        for value in node.values:
            yield from value.pieces
    for output in replay.outputs:
        yield output.piece


def _install(target: torch.Tensor, offset: int, piece: Piece, flat: torch.Tensor, m: Map) -> None:
    """Copy elements of ``flat`` into ``target``, converted to the piece's dtype; bits are kept otherwise."""
    kind = flat.dtype if piece.cast is None else getattr(torch, piece.cast)
    into = target if target.dtype == kind else target.view(kind)
    size = [axis.n for axis in m.axes]
    into.as_strided(size, [x.a for x in m.axes], offset + m.a).copy_(
        flat.as_strided(size, [x.b for x in m.axes], flat.storage_offset() + m.b)
    )
