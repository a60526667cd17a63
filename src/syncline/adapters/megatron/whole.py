"""An exporter of the caller's own: a function from whole Megatron tensors to checkpoint tensors.

Megatron's ``sharded_state_dict`` says which box of which whole tensor each live tensor is, under the names
that the model would have without any parallelism. The exporter is watched on whole weightless tensors, so it
needs to know nothing of ranks; what it makes of them is then cut down to this rank's boxes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from syncline.adapters.megatron.quiet import Quiet, quiet
from syncline.adapters.megatron.trace import Exported, Held, trace
from syncline.errors import AdapterError
from syncline.layout.box import Box
from syncline.layout.export import dtype_name
from syncline.layout.lattice import Map, split
from syncline.layout.pieces import boxes
from syncline.layout.view import row_major
from syncline.layout.written import Spec, Write

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from syncline.adapters.megatron.trace import ExportTracer

Exporter = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Gets whole Megatron tensors by the names they have without parallelism; returns checkpoint tensors."""

_METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": True}


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a whole Megatron tensor, and where its elements lie in a live tensor of this rank.

    Attributes:
        name: the whole tensor's name.
        spec: its shape and dtype.
        box: the elements.
        live: the live tensor.
        offset: element of the live tensor of the box's first one.
        stride: in elements of the live tensor, one a dimension of the box.
    """

    name: str
    spec: Spec
    box: Box
    live: str
    offset: int
    stride: tuple[int, ...]

    @property
    def map(self) -> Map:
        """Elements of the whole tensor, row-major, and of the live tensor."""
        rows = row_major(self.spec.shape)
        start = sum(o * s for o, s in zip(self.box.offset, rows, strict=True))
        return Map.of(start, self.offset, zip(self.box.size, rows, self.stride, strict=True))


def parts(chunks: Sequence[nn.Module], tensors: Mapping[str, torch.Tensor]) -> list[Part]:
    """Return which parts of whole tensors this rank's live tensors are, by Megatron's own account.

    Args:
        chunks: the model chunks, without wrappers.
        tensors: live tensors by name.

    Raises:
        AdapterError: a shard that lies in no live tensor, or that does not fit its whole tensor.
    """
    where = _Memory(tensors)
    found: list[Part] = []
    with quiet(Quiet(_no_peers)):
        for chunk in chunks:
            described: Any = chunk.sharded_state_dict(metadata=dict(_METADATA))  # pyright: ignore[reportCallIssue]
            found += (part for one in _tensors(described) if (part := _part(one, where)) is not None)
    return found


def _tensors(tree: Any) -> Iterator[Any]:
    """Yield the sharded tensors of a nested description; factories are built."""
    if hasattr(tree, "build_fn"):
        yield from _tensors(tree.build())
    elif isinstance(tree, Mapping):
        for one in tree.values():
            yield from _tensors(one)
    elif isinstance(tree, list | tuple):
        for one in tree:
            yield from _tensors(one)
    elif isinstance(getattr(tree, "data", None), torch.Tensor) and hasattr(tree, "global_offset"):
        yield tree


def _part(one: Any, where: _Memory) -> Part | None:
    data: torch.Tensor = one.data
    live = where.find(data)
    if live is None:
        return None  # state that is no parameter and no persistent buffer
    name, offset = live
    more = len(one.global_shape) - data.ndim
    size, stride = (1,) * more + tuple(data.shape), (1,) * more + data.stride()
    box, shape = Box(tuple(one.global_offset), size), tuple(one.global_shape)
    if any(end > n for end, n in zip(box.end, shape, strict=True)):
        raise AdapterError(
            "Megatron describes a shard outside of its tensor", expected=shape, found=box, tensor=one.key
        )
    return Part(one.key, Spec(shape, dtype_name(data.dtype)), box, name, offset, stride)


class _Memory:
    """Live tensors by address."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        known = sorted((t.data_ptr(), t.nbytes, name) for name, t in tensors.items() if t.numel())
        self._starts = [start for start, _, _ in known]
        self._known = known

    def find(self, data: torch.Tensor) -> tuple[str, int] | None:
        """Return the live tensor that a view lies in, and the element where it begins."""
        at = bisect_right(self._starts, data.data_ptr()) - 1
        if at < 0 or not data.numel():
            return None
        start, nbytes, name = self._known[at]
        inside = data.data_ptr() - start
        return (name, inside // data.element_size()) if inside < nbytes else None


def export_whole(
    exporter: Exporter, whole: Mapping[str, Spec], mine: Iterable[Part]
) -> tuple[Exported, set[str]]:
    """Watch an exporter on whole tensors and cut what it makes down to this rank's parts.

    Args:
        exporter: the caller's.
        whole: every tensor of the model by name.
        mine: this rank's parts.

    Returns:
        What this rank holds, and the whole tensors of which something reaches the checkpoint.

    Raises:
        LayoutError: the exporter cannot be watched.
        AdapterError: it computes with tensors of which this rank has only a part.
    """
    answers = Quiet(_no_peers)

    def export(weights: Mapping[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
        return exporter(weights).items()

    def watched(_tracer: ExportTracer) -> AbstractContextManager[object]:
        return quiet(answers)

    exported = trace(whole, export, watched)
    if exported.replays:
        raise AdapterError(
            "an exporter computes a checkpoint tensor",
            expected="cutting, joining, permuting and casting",
            found=", ".join(exported.replays[0].ops),
            tensor=next(iter(exported.computed)),
            hint="compute on the reader, or export through Megatron-Bridge, whose mappings may compute",
        )
    by_name: dict[str, list[Part]] = {}
    for part in mine:
        by_name.setdefault(part.name, []).append(part)
    held = [cut for one in exported.held for part in by_name.get(one.live, ()) for cut in _cut(one, part)]
    return Exported(tuple(held), exported.shapes, {}, (), exported.casts), exported.used


def _cut(one: Held, part: Part) -> Iterator[Held]:
    whole = Write(one.name, one.shape, one.box, one.view, one.dtype, one.dtype).map
    for hit in split(whole, part.map)[0]:
        for box, view in boxes(hit.flipped(), one.shape):
            yield Held(one.name, one.shape, one.dtype, box, part.live, view)


def _no_peers(tensor: torch.Tensor, peer: str) -> torch.Tensor:
    raise AdapterError(
        "an exporter of whole tensors communicates", expected="whole tensors need no peer", found=peer
    )
