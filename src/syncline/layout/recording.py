"""From what stands in live tensors after a trace to replays: grouping, order, and what must be refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.errors import LayoutError
from syncline.layout.box import Box
from syncline.layout.content import UNWRITTEN
from syncline.layout.lattice import split
from syncline.layout.pieces import lattice
from syncline.layout.recorded import Before, Constant, Result, Stranger, Weight
from syncline.layout.replay import Replay, pieces_of
from syncline.layout.view import row_major

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncline.layout.content import Piece
    from syncline.layout.lattice import Map
    from syncline.layout.recorded import Node
    from syncline.layout.replay import Output


def record(outputs: Iterable[Output]) -> list[Replay]:
    """Group outputs into replays: those that share an operation on checkpoint tensors run together.

    Raises:
        LayoutError: a live tensor's new contents depend on what is not in the checkpoint: on its contents
            before the load, on memory that nothing had written, on random numbers, or on a tensor of unknown
            contents. The live tensor is named.
    """
    listed = list(outputs)
    order: dict[int, tuple[Node, Output]] = {}
    for output in listed:
        _check(output.piece, output)
        _collect(output.piece, output, order)
    groups = _Groups()
    reads: dict[int, frozenset[str]] = {}
    for key, (node, _) in order.items():
        names: set[str] = set()
        for piece in (piece for value in node.values for piece in value.pieces):
            if isinstance(piece.origin, Weight):
                names.add(piece.origin.name)
            elif isinstance(piece.origin, Result) and reads[id(piece.origin.node)]:
                names |= reads[id(piece.origin.node)]
                groups.join(id(piece.origin.node), key)
        reads[key] = frozenset(names)
    by_group: dict[object, list[Output]] = {}
    for output in listed:
        origin = output.piece.origin
        shared = isinstance(origin, Result) and reads[id(origin.node)]
        key = groups.find(id(origin.node)) if isinstance(origin, Result) and shared else output.live
        by_group.setdefault(key, []).append(output)
    return [_replay(group) for group in by_group.values()]


class _Groups:
    """Disjoint sets of node ids."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def find(self, key: int) -> int:
        while (parent := self._parent.get(key, key)) != key:
            self._parent[key] = self._parent.get(parent, parent)
            key = parent
        return key

    def join(self, one: int, other: int) -> None:
        self._parent[self.find(other)] = self.find(one)


def _collect(piece: Piece, output: Output, order: dict[int, tuple[Node, Output]]) -> None:
    """Add the nodes behind a piece, inputs first; without recursion, since chains may be long."""
    if not isinstance(piece.origin, Result):
        return
    stack: list[tuple[Node, bool]] = [(piece.origin.node, False)]
    while stack:
        node, ready = stack.pop()
        if id(node) in order:
            continue
        if ready:
            order[id(node)] = (node, output)
            continue
        if node.random:
            raise _refused(output, f"{node} draws random numbers", node.during)
        stack.append((node, True))
        for inner in (p for value in node.values for p in value.pieces):
            _check(inner, output, node)
            if isinstance(inner.origin, Result):
                stack.append((inner.origin.node, False))


def _check(piece: Piece, output: Output, node: Node | None = None) -> None:
    origin = piece.origin
    what = "the loader" if node is None else str(node)
    during = None if node is None else node.during
    if origin is UNWRITTEN:
        raise _refused(output, f"{what} reads memory that nothing had written", during)
    if isinstance(origin, Before):
        raise _refused(output, f"{what} reads what {origin.name} held before the load", during)
    if isinstance(origin, Stranger):
        raise _refused(output, f"{what} reads {origin.what}", during)
    if isinstance(origin, Constant) and origin.tensor.is_floating_point() and origin.tensor.isnan().any():
        raise _refused(output, f"{what} uses a constant that is not a number", during)


def _refused(output: Output, found: str, during: str | None) -> LayoutError:
    return LayoutError(
        f"the live tensor {output.live!r} cannot be computed from the checkpoint alone",
        expected="copies of, and repeatable operations on, checkpoint tensors",
        found=found if during is None else f"{found}, while loading {during!r}",
        tensor=output.live,
        hint="declare it local, or derive it by the engine's own hook after each update",
    )


def _replay(outputs: list[Output]) -> Replay:
    order: dict[int, tuple[Node, Output]] = {}
    for output in outputs:
        _collect(output.piece, output, order)
    nodes = tuple(node for node, _ in order.values())
    whole = Replay(nodes, tuple(outputs), (), {}, {}, {})
    boxes: dict[str, Box] = {}
    weights: dict[str, Weight] = {}
    for piece in pieces_of(whole):
        if isinstance(piece.origin, Weight):
            weights[piece.origin.name] = piece.origin
            box = _bounding(piece.map, piece.origin.shape)
            boxes[piece.origin.name] = _union(boxes.get(piece.origin.name, box), box)
    return Replay(
        nodes,
        tuple(outputs),
        tuple(weights),
        boxes,
        {name: weight.shape for name, weight in weights.items()},
        {name: weight.dtype for name, weight in weights.items()},
    )


def _bounding(m: Map, shape: tuple[int, ...]) -> Box:
    """Return the smallest box, of a row-major tensor, that holds all elements of side b."""
    low, high = list(shape), [0] * len(shape)
    for part in split(m.flipped(), lattice(shape, 0, row_major(shape)), merge=False)[0]:
        rest, last = part.b, part.b_end - 1
        for d, stride in enumerate(row_major(shape)):
            first, rest = divmod(rest, stride)
            end, last = divmod(last, stride)
            low[d], high[d] = min(low[d], first), max(high[d], end + 1)
    return Box(tuple(low), tuple(h - lo for lo, h in zip(low, high, strict=True)))


def _union(one: Box, other: Box) -> Box:
    low = tuple(map(min, one.offset, other.offset))
    return Box(low, tuple(h - lo for lo, h in zip(low, map(max, one.end, other.end), strict=True)))
