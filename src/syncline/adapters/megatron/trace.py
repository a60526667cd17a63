"""Watching an exporter on weightless tensors: which live elements make up each checkpoint tensor.

The live tensors are one rank's, and the exporter is whatever turns a trainer's tensors into a checkpoint's:
it cuts, joins, permutes, picks rows, and gathers from peers. What comes out is, box by box, a view of a live
tensor of this rank, a peer's part, or something computed, which is recorded so that it can be computed again.
Only memory is followed; nothing here knows a model, and nothing has weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from syncline import faults
from syncline.errors import LayoutError, SynclineError
from syncline.layout.content import UNWRITTEN, Piece, merged
from syncline.layout.lattice import Map
from syncline.layout.loader_trace import Tracer, watching
from syncline.layout.pieces import boxes
from syncline.layout.recorded import Result, Stranger, Weight
from syncline.layout.recording import record
from syncline.layout.replay import Output, Replay
from syncline.layout.view import View, row_major

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from syncline.layout.box import Box
    from syncline.layout.written import Spec

    Export = Callable[[Mapping[str, torch.Tensor]], Iterable[tuple[str, torch.Tensor]]]

_aten = torch.ops.aten
_INDEX = frozenset({_aten.index.Tensor, _aten.index_select.default})


@dataclass(frozen=True, slots=True)
class Held:
    """A box of a checkpoint tensor that this rank holds.

    Attributes:
        name: the checkpoint name.
        shape: shape of the whole checkpoint tensor.
        dtype: torch's name of the dtype in which it is held.
        box: the elements held.
        live: the live tensor that holds them.
        view: where in it: storage 0, offset from the live tensor's first element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    live: str
    view: View


@dataclass(frozen=True, eq=False)
class Exported:
    """What an exporter makes of one rank's live tensors.

    Attributes:
        held: views of live tensors.
        shapes: by checkpoint name, the shape of everything that the exporter returned.
        computed: by checkpoint name, the boxes that have to be computed; `replays` writes them.
        replays: recorded operations from live tensors to checkpoint tensors.
        casts: by checkpoint name, the dtype that the exporter converts it to.
    """

    held: tuple[Held, ...]
    shapes: dict[str, tuple[int, ...]]
    computed: dict[str, tuple[Box, ...]]
    replays: tuple[Replay, ...]
    casts: dict[str, str]

    @property
    def used(self) -> set[str]:
        """The live tensors of which something reaches the checkpoint."""
        return {one.live for one in self.held} | {name for replay in self.replays for name in replay.inputs}


class ExportTracer(Tracer):
    """A tracer that also follows rows picked by known numbers, and peers' parts."""

    def __init__(self) -> None:
        super().__init__({})
        self._peers: dict[tuple[Any, ...], torch.Tensor] = {}

    def stand_in(self, tensor: torch.Tensor, peer: str) -> torch.Tensor:
        """Return a weightless tensor of the same shape whose elements are a peer's.

        Experts gather from every peer again and again: as long as nobody wrote into it, one serves them all.
        """
        key = (tuple(tensor.shape), tensor.dtype, peer)
        made = self._peers.get(key)
        if made is None or self.content(made).written:
            made = self._peers[key] = torch.empty(key[0], dtype=tensor.dtype, device="meta")
            self.hold(made, Stranger(f"elements of {peer}"))
        return made

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow an operation; picking by an index that is known is cutting and joining."""
        if func is _aten.empty_like.default and args[0].is_meta and "device" not in kwargs:
            out = func(*args, **kwargs)  # what a gather would have filled: many, and hardly ever looked at
            self.hold(out)
            return out
        if func in _INDEX and not self.closed:
            picked = _picked(func, args)
            if picked is not None:
                return self._pick(func, args, kwargs, *picked)
        return super().dispatch(func, args, kwargs)

    def _pick(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int, numbers: list[int]
    ) -> torch.Tensor:
        source: torch.Tensor = args[0]
        out = func(*args, **kwargs) if func is _aten.index.Tensor else _aten.index_select.default(
            source, dim, torch.empty(len(numbers), dtype=torch.int64, device="meta")
        )  # fmt: skip
        self.hold(out)
        at = 0
        for start, n, step in _runs(numbers):
            part = _aten.slice.Tensor(source, dim, start, start + (n - 1) * step + 1, step)
            into = out.narrow(dim, at, n)
            at += n
            self.write(into, self.pieces(part, into.stride(), int(into.storage_offset())))
        return out


def _picked(func: Any, args: tuple[Any, ...]) -> tuple[int, list[int]] | None:
    """Return (dimension, numbers) where a weightless tensor is indexed by one known vector."""
    source: torch.Tensor = args[0]
    if func is _aten.index_select.default:
        dim, index = args[1] % max(source.ndim, 1), args[2]
    else:
        given = [d for d, one in enumerate(args[1]) if one is not None]
        if len(given) != 1:
            return None
        dim, index = given[0], args[1][given[0]]
    known = index.device.type != "meta" and index.ndim == 1 and index.dtype in (torch.int32, torch.int64)
    if source.device.type != "meta" or not known or not len(index):
        return None
    rows = source.shape[dim]
    return dim, [number % rows for number in index.tolist()]


def _runs(numbers: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first, count, step) of runs of equal, positive distances."""
    start = 0
    while start < len(numbers):
        end, step = start + 1, 1
        if end < len(numbers) and numbers[end] > numbers[start]:
            step = numbers[end] - numbers[start]
            while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
                end += 1
        yield numbers[start], end - start, step
        start = end


def trace(
    live: Mapping[str, Spec],
    export: Export,
    watched: Callable[[ExportTracer], Any],
) -> Exported:
    """Run an exporter on weightless tensors and return what it makes of them.

    Args:
        live: this rank's live tensors by name; contiguous.
        export: gets the weightless live tensors by name, yields checkpoint tensors by name.
        watched: a context in which the exporter runs, such as one without communication.

    Raises:
        LayoutError: the exporter looks at values, leaves elements unwritten, returns a name twice, or
            computes with a peer's elements; the checkpoint tensor is named.
    """
    faults.point("adapters.trace_export")
    tracer = ExportTracer()
    weights = dict(tracer.weights(live))
    reader = _Reader(tracer)
    try:
        with watched(tracer), watching(tracer):
            for name, tensor in export(weights):
                reader.take(name, tensor)
    except SynclineError:
        raise
    except Exception as error:
        raise LayoutError(
            "an exporter cannot be watched on weightless tensors",
            expected="one that cuts, joins, permutes, gathers, and computes without looking at values",
            found=f"{type(error).__name__}: {error}",
        ) from error
    finally:
        tracer.closed = True
    if tracer.refusal is not None:
        raise tracer.refusal
    return reader.done()


class _Reader:
    """Reads off what each exported tensor is made of."""

    def __init__(self, tracer: ExportTracer) -> None:
        self._tracer = tracer
        self._held: list[Held] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._computed: dict[str, list[Box]] = {}
        self._outputs: list[Output] = []
        self._casts: dict[str, str] = {}

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Read one exported tensor."""
        shape = tuple(tensor.shape)
        if name in self._shapes:
            raise LayoutError("an exporter returns one name twice", tensor=name)
        if tensor.device.type != "meta":
            raise LayoutError(
                "an exporter returns a tensor with memory",
                expected="views of, and operations on, the tensors that it got",
                found=f"{tensor.device}, {shape}",
                tensor=name,
            )
        self._shapes[name] = shape
        pieces = self._tracer.pieces(tensor, row_major(shape)) if tensor.numel() else []
        for piece in merged(pieces):
            self._piece(name, tensor, piece)

    def _piece(self, name: str, tensor: torch.Tensor, piece: Piece) -> None:
        origin, shape = piece.origin, tuple(tensor.shape)
        if isinstance(origin, Stranger):
            return
        if origin is UNWRITTEN:
            raise LayoutError(
                "an exporter leaves elements of a checkpoint tensor unwritten",
                expected="every element from a live tensor",
                tensor=name,
            )
        if isinstance(origin, Weight):
            if piece.cast is not None:
                self._casts[name] = piece.cast
            for box, view in boxes(piece.map.flipped(), shape):
                self._held.append(Held(name, shape, origin.dtype, box, origin.name, view))
            return
        if isinstance(origin, Result) and _strange(origin):
            return
        self._outputs.append(Output(name, tensor.dtype, piece))
        here = Map.of(piece.map.a, piece.map.a, [(n, a, a) for n, a, _ in piece.map.axes])
        self._computed.setdefault(name, []).extend(box for box, _ in boxes(here, shape))

    def done(self) -> Exported:
        """Return everything that was read."""
        return Exported(
            tuple(self._held),
            self._shapes,
            {name: tuple(found) for name, found in self._computed.items()},
            tuple(record(self._outputs)),
            self._casts,
        )


def _strange(origin: Result) -> bool:
    """Return whether a result was computed from peers' elements alone: then it is a peer's."""
    seen: set[int] = set()
    stack = [origin.node]
    peers = False
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        for piece in (piece for value in node.values for piece in value.pieces):
            if isinstance(piece.origin, Weight):
                return False
            peers |= isinstance(piece.origin, Stranger)
            if isinstance(piece.origin, Result):
                stack.append(piece.origin.node)
    return peers
