"""Operations that a loader trace understands: which only view, which copy, and how copies move pieces."""

from __future__ import annotations

import itertools
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from syncline.layout.content import Piece
from syncline.layout.dtype import BY_NAME, widens
from syncline.layout.export import dtype_name
from syncline.layout.recorded import Result, Weight
from syncline.layout.transform import has_cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from syncline.layout.loader_trace import Tracer

_aten = torch.ops.aten

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Classes of tensors that do nothing of their own when torch works on them."""


class Kind(Enum):
    """What an operation does, as far as memory is concerned."""

    VIEW = "no element is read or written"
    COPY = "elements are moved, perhaps cast"
    BITS = "a view of the same bits as another dtype"
    ALLOCATE = "memory without contents"
    SHAPE = "reads nothing of its tensor arguments but their shapes"
    FILL = "writes its argument without reading it"
    INDEX = "needs the values of its index arguments"
    ASK = "answers a question that does not depend on values"
    COMPUTE = "anything else"


OVERWRITES = frozenset({Kind.FILL, Kind.COPY})
"""Kinds whose changed arguments are not read."""

_ALLOCATES = frozenset({
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"
})  # fmt: skip
_FILLS = frozenset({"fill_", "zero_", "normal_", "uniform_", "random_", "exponential_", "bernoulli_"})
_ASKS = frozenset(
    {"is_pinned", "is_same_size", "_has_compatible_shallow_copy_type", "_debug_has_internal_overlap"}
)
_INDEXES = frozenset({"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"})


_known: dict[int, Kind] = {}  # by identity: an operator lives for ever, and is slow to hash


def kind_of(func: Any) -> Kind:
    """Return the kind of an operator."""
    kind = _known.get(id(func))
    if kind is None:
        kind = _known[id(func)] = _classify(func)
    return kind


def _classify(func: Any) -> Kind:
    schema = func._schema  # noqa: SLF001 (an operator's schema has no public accessor)
    name = schema.name.split("::")[-1]
    if func in COPIES:
        return Kind.COPY
    if torch.Tag.inplace_view in func.tags:
        return Kind.COMPUTE if name.startswith("resize") else Kind.VIEW
    if not schema.is_mutable and schema.returns and all(r.alias_info is not None for r in schema.returns):
        return Kind.BITS if func is _aten.view.dtype else Kind.VIEW
    if name in _ALLOCATES:
        return Kind.ALLOCATE
    if name.startswith("new_") or name.endswith("_like"):
        return Kind.SHAPE
    if name in _FILLS or schema.overload_name == "out" or schema.overload_name.endswith("_out"):
        return Kind.FILL
    if name in _ASKS or name.startswith("sym_"):
        return Kind.ASK
    return Kind.INDEX if name in _INDEXES else Kind.COMPUTE


def needs_values(func: Any, error: Exception) -> bool:
    """Return whether an operation failed on weightless tensors because its answer depends on values."""
    tensors = [r for r in func._schema.returns if isinstance(r.type, torch.TensorType)]  # noqa: SLF001 (as above)
    dynamic = torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
    return not tensors or dynamic or isinstance(error, NotImplementedError)


def converted(pieces: Iterable[Piece], src: torch.dtype, dst: torch.dtype) -> list[Piece] | None:
    """Return pieces read as ``src`` as they are stored as ``dst``; None where no single cast says it."""
    if src == dst:
        return list(pieces)
    found: list[Piece] = []
    for piece in pieces:
        cast = _one_cast(piece, dtype_name(src), dtype_name(dst))
        if cast is None:
            return None
        found.append(cast)
    return found


def _one_cast(piece: Piece, src: str, dst: str) -> Piece | None:
    origin = piece.origin
    if isinstance(origin, Result):
        first = dtype_name(origin.dtype)
    elif isinstance(origin, Weight):
        first = origin.dtype
    else:
        return None
    if piece.cast is None:
        return Piece(origin, piece.map, dst) if first == src else None
    if piece.cast != src or not {first, src} <= BY_NAME.keys() or not widens(first, src):
        return None
    if first == dst:  # widened and narrowed back: the same bits, NaN payloads aside
        return Piece(origin, piece.map)
    return Piece(origin, piece.map, dst) if has_cast(first, dst) else None


class Copies:
    """Moves pieces for operations that only copy; a handler returns NotImplemented to have it computed."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def clone(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow ``clone`` and ``_to_copy``: same or another dtype, and never another device than meta."""
        source: torch.Tensor = args[0]
        to_meta = str(kwargs.get("device") or "") == "meta"
        if source.device.type != "meta" and not to_meta:
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype") or source.dtype
        keep = {k: v for k, v in kwargs.items() if k in {"dtype", "memory_format"}}
        out = func(*args, **keep, **({"device": "meta"} if to_meta else {}))
        if (moved := self._moved(source, out, dtype)) is None:
            return NotImplemented
        self._tracer.hold(out)
        self._tracer.write(out, moved)
        return out

    def pin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow a copy to pinned memory, which weightless tensors do not have."""
        if args[0].device.type != "meta":
            return func(*args, **kwargs)
        return self.clone(_aten.clone.default, args[:1], {})

    def copy_(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow ``copy_``, broadcasting and casting."""
        into, source = args[0], args[1]
        if not into.is_meta:
            return NotImplemented
        if into.shape != source.shape:
            func(into, torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta"))
            source = source.expand(into.shape)
        return into if self.copied(into, source) else NotImplemented

    def copied(self, into: torch.Tensor, source: torch.Tensor) -> bool:
        """Follow a copy between tensors of one shape; False where it has to be computed."""
        moved = self._moved(source, into, into.dtype)
        if moved is None:
            return False
        self._tracer.write(into, moved)
        return True

    def cat(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow ``cat`` and ``stack`` of tensors of one dtype."""
        parts: Sequence[torch.Tensor] = args[0]
        weightless = any(part.device.type == "meta" for part in parts)
        if not weightless or len({part.dtype for part in parts}) != 1:
            return NotImplemented
        if any(part.device.type != "meta" for part in parts):
            return NotImplemented
        out = func(*args, **kwargs)
        stacked = func is _aten.stack.default
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
        self._tracer.hold(out)
        start = 0
        for part in parts:
            if part.shape == (0,) and out.ndim != 1:
                continue  # torch lets empty vectors join anything
            n = 1 if stacked else part.shape[dim]
            view = out.narrow(dim, start, n)
            start += n
            into = view.squeeze(dim) if stacked else view
            moved = self._tracer.pieces(part, into.stride(), int(into.storage_offset()))
            self._tracer.write(into, moved)
        return out

    def repeat(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow ``repeat``: the same elements in several places."""
        source: torch.Tensor = args[0]
        if source.device.type != "meta":
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        self._tracer.hold(out)
        wide = source
        for _ in range(out.ndim - source.ndim):
            wide = wide.unsqueeze(0)
        shape = tuple(wide.shape)
        both = list(itertools.chain.from_iterable(
            (n // max(m, 1), m) for n, m in zip(out.shape, shape, strict=True)
        ))  # fmt: skip
        for d in range(out.ndim):
            wide = wide.unsqueeze(2 * d)
        into = out.view(both)
        moved = self._tracer.pieces(wide.expand(both), into.stride(), int(into.storage_offset()))
        self._tracer.write(out, moved)
        return out

    def pad(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow padding with a constant: the constant first, the source over it."""
        source, sides = args[0], list(args[1])
        if source.device.type != "meta" or any(n < 0 for n in sides):
            return NotImplemented
        fill = args[2] if len(args) > 2 else kwargs.get("value", 0)
        shape = list(source.shape)
        low = [0] * len(shape)
        for i in range(0, len(sides), 2):
            d = len(shape) - 1 - i // 2
            low[d], shape[d] = sides[i], shape[d] + sides[i] + sides[i + 1]
        out = self._tracer.dispatch(
            _aten.full.default, (shape, fill), {"dtype": source.dtype, "device": torch.device("meta")}
        )
        into = out
        for d, (start, n) in enumerate(zip(low, source.shape, strict=True)):
            into = into.narrow(d, start, n)
        self._tracer.write(into, self._tracer.pieces(source, into.stride(), int(into.storage_offset())))
        return out

    def _moved(self, source: torch.Tensor, into: torch.Tensor, dtype: torch.dtype) -> list[Piece] | None:
        """Return what ``into`` holds after a copy from ``source``, by its storage elements."""
        pieces = self._tracer.pieces(source, into.stride(), int(into.storage_offset()))
        return converted(pieces, source.dtype, dtype)


COPIES: dict[Any, Callable[..., Any]] = {
    _aten.clone.default: Copies.clone,
    _aten._to_copy.default: Copies.clone,  # noqa: SLF001 (an operator, named so)
    _aten._pin_memory.default: Copies.pin,  # noqa: SLF001 (an operator, named so)
    _aten.copy_.default: Copies.copy_,
    _aten.cat.default: Copies.cat,
    _aten.stack.default: Copies.cat,
    _aten.repeat.default: Copies.repeat,
    _aten.constant_pad_nd.default: Copies.pad,
}
_handlers = {id(func): handler for func, handler in COPIES.items()}


def copy_handler(func: Any) -> Callable[..., Any]:
    """Return the method of `Copies` that follows an operator of kind COPY."""
    return _handlers[id(func)]
