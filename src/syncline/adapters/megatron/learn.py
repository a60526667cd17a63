"""Learning what one Megatron rank holds: by Megatron-Bridge's conversions, or by the caller's exporter."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from syncline.adapters.megatron.exchange import exchange
from syncline.adapters.megatron.quiet import Quiet, quiet
from syncline.adapters.megatron.trace import Exported, ExportTracer, Held, trace
from syncline.adapters.megatron.whole import Exporter, Part, export_whole, parts
from syncline.errors import AdapterError, LayoutError, SynclineError
from syncline.layout.box import Box
from syncline.layout.export import dtype_name
from syncline.layout.view import View, row_major
from syncline.layout.written import Spec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from syncline.adapters.megatron.bridge import BridgeExport
    from syncline.adapters.megatron.quantise import Quantised
    from syncline.layout.replay import Replay

PREFIX = "computed:"
"""What the live names of tensors begin with that are computed at the source before every version."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What one rank holds of its model's checkpoint.

    Attributes:
        held: boxes of checkpoint tensors in live tensors; those under `PREFIX` in ``made``.
        made: memory of what is computed at the source, by checkpoint name.
        replays: write ``made`` from live tensors.
        aliases: second names of tied tensors -> first names.
        casts: by checkpoint name, the dtype that the exporter converts to, where the live tensor has another.
        used: live tensors of which something reaches the checkpoint.
        names: every checkpoint name that this rank's exporter makes, of its own elements or of its peers'.
        shared: checkpoint names that are a copy of what another pipeline stage holds.
        dropped: by live name, rows beyond the checkpoint's vocabulary.
        quantised: held boxes that are quantised at the source.
    """

    held: tuple[Held, ...]
    made: dict[str, torch.Tensor]
    replays: tuple[Replay, ...]
    aliases: dict[str, str]
    casts: dict[str, str]
    used: frozenset[str]
    names: tuple[str, ...] = ()
    shared: frozenset[str] = frozenset()
    dropped: dict[str, int] = field(default_factory=dict)
    quantised: tuple[Quantised, ...] = ()


def by_bridge(export: BridgeExport, tensors: Mapping[str, torch.Tensor], vocabulary: int | None) -> Learned:
    """Learn what a rank holds from Megatron-Bridge's own conversions.

    Args:
        export: of this rank's chunks.
        tensors: live tensors by name.
        vocabulary: rows of the checkpoint's embedding; what Megatron pads it by is not in the checkpoint.

    Raises:
        LayoutError: a conversion that cannot be followed.
        AdapterError: a conversion failed, or communicates; named.
    """
    live = specs(tensors, lambda name: not export.unmapped(name))
    made = watch(live, export)
    shared = {one.name for one in made.held if one.live in export.replicas}
    return _learned(made, tensors, vocabulary, {**export.aliases, **same_elements(made.held)}, shared)


def watch(live: Mapping[str, Spec], export: Any) -> Exported:
    """Run a bridge's export on weightless tensors, without communication."""
    current: list[Quiet] = []

    @contextmanager
    def watched(tracer: ExportTracer) -> Iterator[None]:
        current.append(Quiet(tracer.stand_in))
        with quiet(current[0]):
            yield

    def run(weights: Mapping[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
        return export.export(weights, current[0])

    try:
        return trace(live, run, watched)
    except LayoutError as error:
        if current and error.tensor is None:
            raise LayoutError(
                error.what, expected=error.expected, found=error.found, tensor=current[0].current,
                hint=error.hint,
            ) from error  # fmt: skip
        raise


def by_exporter(
    exporter: Exporter, chunks: Sequence[nn.Module], tensors: Mapping[str, torch.Tensor],
    vocabulary: int | None, group: Any = None,
) -> Learned:  # fmt: skip
    """Learn what a rank holds from ``sharded_state_dict`` and an exporter of whole tensors; collective.

    Raises:
        LayoutError: the exporter cannot be watched.
        AdapterError: it communicates, or computes.
    """
    mine: list[Part] = []
    problem: SynclineError | None = None
    try:
        mine = parts(chunks, tensors)
    except SynclineError as error:  # the others wait for this rank's parts, and then for its claims
        problem = error
    except Exception as error:
        problem = AdapterError(
            "Megatron's description of this rank's shards failed", found=f"{type(error).__name__}: {error}"
        )
        problem.__cause__ = error
    whole: dict[str, Spec] = {}
    listed = [(part.name, part.spec.shape, part.spec.dtype) for part in mine]
    for data in exchange(msgspec.msgpack.encode(listed), group):
        for name, shape, kind in msgspec.msgpack.decode(data, type=list[tuple[str, tuple[int, ...], str]]):
            whole.setdefault(name, Spec(shape, kind))
    if problem is not None:
        raise problem
    made, reached = export_whole(exporter, whole, mine)
    used = {part.live for part in mine if part.name in reached}
    found = _learned(made, tensors, vocabulary, same_elements(made.held), set())
    return replace(found, used=frozenset(used) | found.used)


def _learned(
    made: Exported,
    tensors: Mapping[str, torch.Tensor],
    vocabulary: int | None,
    aliases: dict[str, str],
    shared: set[str],
) -> Learned:
    held, dropped = list[Held](), dict[str, int]()
    for one in made.held:
        rows = vocabulary if _is_vocabulary(tensors[one.live]) else None
        kept = one if rows is None else cropped(one, rows)
        if kept is not None and one.name not in aliases:
            held.append(kept)
        if lost := one.box.size[0] - (kept.box.size[0] if kept else 0):
            dropped[one.live] = dropped.get(one.live, 0) + lost
    memory: dict[str, torch.Tensor] = {}
    for name, found in made.computed.items():
        output = next(o for replay in made.replays for o in replay.outputs if o.live == name)
        shape = made.shapes[name]
        memory[name] = torch.zeros(shape, dtype=output.dtype, device=_device(tensors))
        held += (_in(name, shape, box, dtype_name(output.dtype)) for box in found)
    return Learned(
        held=tuple(held),
        made=memory,
        replays=made.replays,
        aliases=aliases,
        casts=made.casts,
        used=frozenset(made.used),
        names=tuple(made.shapes),
        shared=frozenset(shared),
        dropped=dropped,
    )


def _is_vocabulary(tensor: torch.Tensor) -> bool:
    """Return whether Megatron itself marks a parameter as an embedding of the vocabulary, or its output."""
    return bool(getattr(tensor, "is_embedding_or_output_parameter", False))


def cropped(one: Held, rows: int) -> Held | None:
    """Return what is left of a held box within the first rows of its tensor; None if nothing is."""
    if one.shape[0] <= rows:
        return one
    shape = (rows, *one.shape[1:])
    n = min(one.box.offset[0] + one.box.size[0], rows) - one.box.offset[0]
    if n <= 0:
        return None
    if n == one.box.size[0]:
        return replace(one, shape=shape)
    size = (n, *one.box.size[1:])
    view = one.view.restrict((0,) * len(size), size)
    if view is None:
        raise AdapterError(
            "the rows of a vocabulary are interleaved", expected="plain rows", found=one.view, tensor=one.name
        )
    return replace(one, shape=shape, box=Box(one.box.offset, size), view=view)


def same_elements(held: Sequence[Held]) -> dict[str, str]:
    """Return alias -> first name of checkpoint tensors that are the same elements of live tensors."""
    by_name: dict[str, list[object]] = {}
    for one in held:
        by_name.setdefault(one.name, []).append((one.shape, one.box, one.live, one.view))
    first: dict[object, str] = {}
    found: dict[str, str] = {}
    for name, geometry in by_name.items():
        key = tuple(geometry)
        if first.setdefault(key, name) != name:
            found[name] = first[key]
    return found


def _in(name: str, shape: tuple[int, ...], box: Box, kind: str) -> Held:
    rows = row_major(shape)
    start = sum(o * s for o, s in zip(box.offset, rows, strict=True))
    return Held(name, shape, kind, box, PREFIX + name, View.simple(0, start, box.size, rows))


def values_of(one: Held, live: torch.Tensor) -> torch.Tensor:
    """Return the elements of a held box, in the box's shape."""
    axes = list(one.view.axes())
    flat = live.detach().view(-1)
    return flat.as_strided(
        [n for n, _ in axes], [s for _, s in axes], flat.storage_offset() + one.view.offset
    ).reshape(one.box.size)


def _device(tensors: Mapping[str, torch.Tensor]) -> torch.device:
    return next((tensor.device for tensor in tensors.values()), torch.device("cpu"))


def specs(tensors: Mapping[str, torch.Tensor], wanted: Any = None) -> dict[str, Spec]:
    """Return shapes and dtypes of live tensors.

    Raises:
        AdapterError: a tensor that is not contiguous; named.
    """
    found: dict[str, Spec] = {}
    for name, tensor in tensors.items():
        if wanted is not None and not wanted(name):
            continue
        if not tensor.is_contiguous():
            raise AdapterError(
                "a live tensor is not contiguous", expected="row-major", found=tensor.stride(), tensor=name
            )
        found[name] = Spec(tuple(tensor.shape), dtype_name(tensor.dtype))
    return found
