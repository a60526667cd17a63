"""Learning an exporter's layout: which live elements make up each checkpoint tensor.

An exporter (such as Transformers' reverse weight conversion) maps live tensors to checkpoint tensors. It is
run once on weightless contiguous tensors whose views carry their provenance in storage, offset and strides;
copies are answered by the source itself. What comes out is either a strided view of live tensors, which is
recorded, or it was computed, which is refused by name. Nothing here knows a model.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from syncline.errors import LayoutError
from syncline.layout.box import Box
from syncline.layout.compose import Part, Source, compose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["Part", "Source", "compose", "dtype_name", "trace_export"]

_aten = torch.ops.aten
_COPIES = frozenset({_aten.clone.default, _aten.contiguous.default, _aten.detach.default})
_CASTS = frozenset({_aten._to_copy.default})  # noqa: SLF001 (an operator, named so)
_RESHAPES = frozenset({_aten.view.default, _aten._unsafe_view.default})  # noqa: SLF001 (an operator, named so)


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the module: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def trace_export(
    live: Mapping[str, torch.Tensor],
    export: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
) -> dict[str, Source]:
    """Run ``export`` on weightless tensors and return the source of every checkpoint tensor, by name.

    Args:
        live: full live tensors on the meta device, contiguous from the start of their storages. Two names of
            one tensor count as the first.
        export: the exporter; gets a new dict of the same tensors.

    Raises:
        LayoutError: a checkpoint tensor is not made of views of live tensors, a live tensor was written or
            rebound, or the exporter cannot run without weights. The tensor is named.
    """
    trace = _Trace(live)
    try:
        with trace:
            exported = export(dict(live))
    except LayoutError:
        raise
    except Exception as error:
        raise LayoutError(
            "the exporter cannot be traced on weightless tensors",
            expected="an exporter that only renames, splits, joins and permutes",
            found=f"{type(error).__name__}: {error}",
        ) from error
    trace.check_live()
    return {name: trace.source(name, tensor) for name, tensor in exported.items()}


@dataclass(slots=True)
class _Made:
    """A storage that came into being while tracing; ``tensor`` keeps it alive and its key its own."""

    op: str
    tensor: torch.Tensor
    pieces: list[tuple[tuple[int, ...], torch.Tensor]] = field(default_factory=list)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # noqa: SLF001 (identity of the storage behind views)


class _Trace(TorchDispatchMode):
    """Answers copies by their source and remembers who made, joined or wrote each storage."""

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._live = dict(live)
        self._keys = {name: _key(tensor) for name, tensor in live.items()}
        self._owner: dict[int, str] = {}
        self._made: dict[int, _Made] = {}
        self._written: dict[str, str] = {}
        for name, tensor in live.items():
            if tensor.device.type != "meta" or not tensor.is_contiguous() or tensor.storage_offset():
                raise LayoutError(
                    "tracing takes weightless tensors only: live memory is never touched",
                    expected="a contiguous tensor on the meta device, at the start of its storage",
                    found=f"{tensor.device}, strides {tensor.stride()}, offset {tensor.storage_offset()}",
                    tensor=name,
                )
            self._owner.setdefault(_key(tensor), name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._note_writes(func, args, kwargs)
        same = func in _COPIES or (func in _CASTS and kwargs.get("dtype") in (None, args[0].dtype))
        if same:
            return _aten.alias.default(args[0])
        try:
            out = func(*args, **kwargs)
        except RuntimeError:
            if func not in _RESHAPES:
                raise
            # a view that only a real copy would have allowed: the elements are no longer one strided view
            size = _infer(args[1], args[0].numel())
            out = torch.empty(size, dtype=args[0].dtype, device="meta")
        self._note_results(func, args, kwargs, out)
        return out

    def _note_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not func._schema.is_mutable:  # noqa: SLF001 (the operator's schema has no public accessor)
            return
        for argument, value in zip(func._schema.arguments, args, strict=False):  # noqa: SLF001
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._note_write(func, value)
        if (out := kwargs.get("out")) is not None:
            self._note_write(func, out)

    def _note_write(self, func: Any, value: Any) -> None:
        for tensor in (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)):
            if (name := self._owner.get(_key(tensor))) is not None:
                self._written.setdefault(name, str(func))
            elif (made := self._made.get(_key(tensor))) is not None:
                made.op, made.pieces = str(func), []

    def _note_results(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = {_key(tensor) for tensor in inputs}
        for tensor in (leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)):
            if _key(tensor) not in known:
                self._made[_key(tensor)] = _Made(str(func), tensor, _joined(func, args, kwargs))

    def check_live(self) -> None:
        """Refuse an exporter that wrote into a live tensor, or rebound one."""
        for name, op in self._written.items():
            raise LayoutError(
                "the exporter writes into a tensor after copying it",
                expected="views and copies only",
                found=op,
                tensor=name,
                hint="declare the change as a transform; a layout cannot express it",
            )
        for name, tensor in self._live.items():
            if self._keys[name] != _key(tensor):
                raise LayoutError(
                    "the exporter rebinds a live tensor", expected="its own storage", tensor=name
                )

    def source(self, name: str, tensor: object) -> Source:
        """Return where the elements of one exported tensor live."""
        if not isinstance(tensor, torch.Tensor):
            raise LayoutError("the exporter returned no tensor", found=type(tensor).__name__, tensor=name)
        shape = tuple(tensor.shape)
        parts = tuple(self._parts(name, tensor, (0,) * len(shape)))
        return Source(name, shape, dtype_name(tensor.dtype), parts)

    def _parts(self, name: str, tensor: torch.Tensor, at: tuple[int, ...]) -> Iterator[Part]:
        if (owner := self._owner.get(_key(tensor))) is not None:
            if tensor.dtype != self._live[owner].dtype:
                raise _materialised(name, "a reinterpretation of bits", owner)
            box = Box(at, tuple(tensor.shape))
            yield Part(owner, int(tensor.storage_offset()), box, tuple(tensor.stride()))
            return
        made = self._made.get(_key(tensor))
        whole = made is not None and (tensor.shape, tensor.stride()) == (
            made.tensor.shape,
            made.tensor.stride(),
        )
        if made is None or not made.pieces or not whole:
            raise _materialised(name, "unknown" if made is None else made.op)
        for offset, piece in made.pieces:
            if piece.numel():
                yield from self._parts(name, piece, tuple(map(sum, zip(at, offset, strict=True))))


def _materialised(name: str, op: str, owner: str | None = None) -> LayoutError:
    return LayoutError(
        "the exporter computes a checkpoint tensor",
        expected="a strided view of live tensors",
        found=op if owner is None else f"{op} of {owner}",
        tensor=name,
        hint="what is not a view must be a declared transform",
    )


def _infer(size: Sequence[int], numel: int) -> list[int]:
    rest = math.prod(n for n in size if n != -1)
    return [numel // rest if n == -1 else n for n in size]


def _joined(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Return (offset, piece) of a concatenation or a stack, in coordinates of its result; else nothing."""
    if func not in {_aten.cat.default, _aten.stack.default}:
        return []
    pieces: list[torch.Tensor] = list(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if len({piece.dtype for piece in pieces}) != 1:
        return []
    if func is _aten.stack.default:
        dim %= pieces[0].ndim + 1
        # the views carry the offsets of their storages; their key is the live tensor's still
        pieces = [_aten.unsqueeze.default(piece, dim) for piece in pieces]
    ndim = pieces[0].ndim
    if any(piece.ndim != ndim for piece in pieces):
        return []
    starts = itertools.accumulate((piece.shape[dim % ndim] for piece in pieces), initial=0)
    return [
        (tuple(start if d == dim % ndim else 0 for d in range(ndim)), piece)
        for start, piece in zip(starts, pieces, strict=False)
    ]
