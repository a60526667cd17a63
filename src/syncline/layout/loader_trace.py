"""The bookkeeping of a loader trace: every operation of a loader, followed through weightless tensors.

Views need no following: torch computes their offsets and strides on weightless tensors as on real ones.
What is followed is memory: each storage has a `Content`, copies move pieces between contents, and any other
operation becomes a `Node` whose results are pieces of their own. Nothing here knows a model or a loader.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves

from syncline.errors import LayoutError
from syncline.layout.content import UNWRITTEN, Content, Origin, Piece, require_nested
from syncline.layout.export import dtype_name
from syncline.layout.lattice import Map
from syncline.layout.loader_modes import watching
from syncline.layout.loader_ops import OVERWRITES, PLAIN, Copies, Kind, copy_handler, kind_of, needs_values
from syncline.layout.recorded import Before, Constant, Node, Result, Scalar, Stranger, Value, Weight
from syncline.layout.scalar import TracedScalar, number_of
from syncline.layout.view import row_major

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from syncline.layout.loader import Spec

__all__ = ["Tracer", "storage_key", "tensors_in", "watching", "weights_behind"]


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of the storage behind a tensor and its views."""
    return tensor.untyped_storage()._cdata  # noqa: SLF001 (no public identity exists)


def tensors_in(tree: object) -> list[torch.Tensor]:
    """Return the tensors of nested arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@dataclass(slots=True)
class _Held:
    """A storage and what it holds; ``tensor`` keeps it alive, so that its key stays its own."""

    tensor: torch.Tensor
    content: Content


class Tracer:
    """What one trace knows of storages, shared by all threads of a loader.

    Args:
        live: the weightless model's tensors by name; real ones may be read, never written.
    """

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        self.lock = threading.RLock()
        self.closed = False
        self.current: str | None = None
        self.refusal: LayoutError | None = None
        self.read: set[str] = set()
        self.replaced: dict[str, str | None] = {}
        self._held: dict[int, _Held] = {}
        self._real: dict[int, str] = {}
        self._live_keys: set[int] = set()
        self._scalars: list[Value] = []
        self._copies = Copies(self)
        for name, tensor in live.items():
            key = storage_key(tensor)
            if not tensor.is_meta:
                self._real.setdefault(key, name)
            elif key not in self._held:
                self.hold(tensor, Before(name))
                self._live_keys.add(key)

    # ------------------------------------------------------------------------------------ storages

    def hold(self, tensor: torch.Tensor, base: Origin = UNWRITTEN) -> Content:
        """Begin to follow a storage by one of its tensors and return its content."""
        numel = tensor.untyped_storage().nbytes() // tensor.element_size()
        content = Content(tensor.element_size(), numel, base)
        self._held[storage_key(tensor)] = _Held(tensor, content)
        return content

    def content(self, tensor: torch.Tensor) -> Content:
        """Return the content of a weightless tensor's storage; one never seen begins as a stranger."""
        held = self._held.get(storage_key(tensor))
        if held is None:
            what = f"a weightless {dtype_name(tensor.dtype)} tensor {tuple(tensor.shape)} of unknown contents"
            return self.hold(tensor, Stranger(what))
        if held.content.itemsize != tensor.element_size():
            raise self.refuse("a loader reinterprets a storage by elements of another size", tensor.dtype)
        return held.content

    def weights(self, checkpoint: Mapping[str, Spec]) -> Iterator[tuple[str, torch.Tensor]]:
        """Return an iterator over the checkpoint, weightless; made before tracing, so that it is fast."""
        made: list[tuple[str, torch.Tensor]] = []
        for name, spec in checkpoint.items():
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
            self.hold(tensor, Weight(name, tuple(spec.shape), spec.dtype))
            made.append((name, tensor))
        return self._given(made)

    def _given(self, made: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in made:
            self.current = name
            yield name, tensor

    def pieces(self, tensor: torch.Tensor, stride: tuple[int, ...], offset: int = 0) -> list[Piece]:
        """Return what a tensor holds, its elements numbered by ``offset`` and ``stride``."""
        if not tensor.is_meta:
            kept = Constant(tensor.detach().clone(memory_format=torch.contiguous_format))
            flat = zip(tensor.shape, row_major(tensor.shape), stride, strict=True)
            axes = [(n, to, at) for n, at, to in flat if to]
            return [Piece(kept, Map.of(offset, 0, axes))] if tensor.numel() else []
        numel, own = tensor.numel(), tensor.stride()
        if numel == 0:
            return []
        content, start = self.content(tensor), int(tensor.storage_offset())
        if own == stride and tensor.is_contiguous():
            view, end = Map.run(offset, start, numel), start + numel
        else:
            flat = zip(tensor.shape, stride, own, strict=True)
            view = Map.of(offset, start, [axis for axis in flat if axis[1]])
            end = view.b_end
        if end > content.numel:
            raise self.refuse("a loader resizes a tensor", tuple(tensor.shape))
        found = content.read(view)
        for piece in found:
            if isinstance(piece.origin, Weight):
                self.read.add(piece.origin.name)
        return found

    def write(self, tensor: torch.Tensor, pieces: list[Piece]) -> None:
        """Lay pieces, numbered by storage element, over a weightless tensor."""
        numel = tensor.numel()
        if numel == 0:
            return
        content = self.content(tensor)
        if tensor.is_contiguous():
            region = Map.run(int(tensor.storage_offset()), 0, numel)
        else:
            stride = tensor.stride()
            region = Map.of(int(tensor.storage_offset()), 0, zip(tensor.shape, stride, stride, strict=True))
            require_nested(region, self.current)
        old = content.write(region, pieces)
        if old and storage_key(tensor) in self._live_keys:
            for piece in old:
                if isinstance(piece.origin, Weight):
                    self.replaced[piece.origin.name] = self.current

    def value(self, tensor: torch.Tensor) -> Value:
        """Return a tensor as the argument of a node."""
        pieces = tuple(self.pieces(tensor, tensor.stride()))
        return Value(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, pieces)

    # ------------------------------------------------------------------------------------ operations

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation of the loader on weightless tensors and follow what it does to memory."""
        kind = kind_of(func)
        if kind is Kind.VIEW or self.closed:
            return func(*args, **kwargs)
        if kind is Kind.BITS:
            return self._reinterpret(func, args, kwargs)
        with self.lock:
            if kind is Kind.COPY:
                done = copy_handler(func)(self._copies, func, args, kwargs)
                if done is not NotImplemented:
                    return done
            return self._compute(func, args, kwargs)

    def copied(self, into: torch.Tensor, source: Any) -> bool:
        """Follow ``into.copy_(source)`` of two plain weightless tensors of one shape; False if it is not."""
        if type(source) not in PLAIN or not (into.is_meta and source.is_meta and into.shape == source.shape):
            return False
        with self.lock:
            return self._copies.copied(into, source)

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        changed = self._changed(func, args, kwargs, leaves)
        for index in changed:
            self._refuse_real(func, leaves[index])
        weightless = any(isinstance(x, torch.Tensor) and x.is_meta for x in leaves)
        weightless |= any(isinstance(x, float) and number_of(x) is not None for x in leaves)
        if not weightless:
            out = func(*args, **kwargs)
            if not any(x.is_meta for x in tensors_in(out)):
                return out
            return self._record(func, leaves, spec, changed, out)
        if any(not leaves[i].is_meta for i in changed):
            raise self.refuse("a loader copies weights into memory of its own", func)
        args, kwargs = spec.unflatten(_on_meta(func, leaves))
        try:
            out = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if kind_of(func) is Kind.ASK or not needs_values(func, error):
                raise
            raise self._by_value(func, leaves) from error
        if not tensors_in(out) and not changed:
            return self._answer(func, out, leaves)
        return self._record(func, leaves, spec, changed, out)

    def _reinterpret(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow a view as another dtype: a view where elements keep their size, else computed.

        Into a live tensor it stays a view, so that a write through it is refused instead of lost.
        """
        out = func(*args, **kwargs)
        source: torch.Tensor = args[0]
        same = out.element_size() == source.element_size()
        if same or not source.is_meta or storage_key(source) in self._live_keys:
            return out
        with self.lock:
            apart = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta")
            leaves, spec = tree_flatten((args, kwargs))
            return self._record(func, leaves, spec, (), apart)

    def _record(self, func: Any, leaves: list[Any], spec: Any, changed: tuple[int, ...], out: Any) -> Any:
        """Make an operation a node and its results pieces."""
        known = {storage_key(x) for x in leaves if isinstance(x, torch.Tensor)}
        returned = tensors_in(out)
        fresh = [(i, x) for i, x in enumerate(returned) if storage_key(x) not in known]
        if not fresh and not changed:
            return out  # a view after all
        kind = kind_of(func)
        if kind is Kind.ALLOCATE:
            for _, tensor in fresh:
                self.hold(tensor)
            return out
        node = Node(
            func,
            [self._leaf(x, blank=kind is Kind.SHAPE or (kind in OVERWRITES and i in changed))
             for i, x in enumerate(leaves)],
            spec,
            changed,
            torch.Tag.nondeterministic_seeded in func.tags,
            self.current,
        )  # fmt: skip
        for index, tensor in fresh:
            self.hold(tensor)
            self._lay(node, index, tensor)
        for place, leaf in enumerate(changed):
            tensor = leaves[leaf]
            held = self._held.get(storage_key(tensor))
            nbytes = tensor.untyped_storage().nbytes()
            if held is None or held.content.numel * held.content.itemsize != nbytes:
                self.hold(tensor)  # the operation allocated its output anew
            self._lay(node, len(returned) + place, tensor)
        return out

    def _lay(self, node: Node, index: int, tensor: torch.Tensor) -> None:
        rows = row_major(tensor.shape)
        region = Map.between(tensor.shape, (int(tensor.storage_offset()), tensor.stride()), (0, rows))
        self.write(tensor, [Piece(Result(node, index, tensor.dtype), region)])

    def _leaf(self, leaf: Any, *, blank: bool) -> Any:
        if isinstance(leaf, torch.Tensor):
            if blank:
                return Value(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, ())
            return self.value(leaf)
        if isinstance(leaf, float) and (number := number_of(leaf)) is not None:
            return Scalar(self._scalars[number])
        return leaf

    def _changed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
    ) -> tuple[int, ...]:
        """Return the leaves that an operation writes."""
        if not func._schema.is_mutable:  # noqa: SLF001 (an operator's schema has no public accessor)
            return ()
        written: set[int] = set()
        for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001 (as above)
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                written.update(id(x) for x in tensors_in(given))
        return tuple(i for i, x in enumerate(leaves) if id(x) in written)

    def _answer(self, func: Any, out: Any, leaves: list[Any]) -> Any:
        """Return an answer that is no tensor, unless it depends on values."""
        if kind_of(func) is Kind.ASK:
            return out
        raise self._by_value(func, leaves)

    def _by_value(self, func: Any, leaves: list[Any]) -> LayoutError:
        read = [self.value(x) for x in leaves if isinstance(x, torch.Tensor)]
        names = weights_behind(piece for value in read for piece in value.pieces)
        return self.refuse("a loader decides by the values of a weight", func, names[0] if names else None)

    def item(self, tensor: torch.Tensor) -> Any:
        """Return the number that stands for the value of a weightless one-element tensor."""
        with self.lock:
            value = self.value(tensor)
            names = weights_behind(value.pieces)
            self._scalars.append(value)
            what = ", ".join(names) or "a computed tensor"
            return TracedScalar.make(len(self._scalars) - 1, what, self.refuse)

    def _refuse_real(self, func: Any, tensor: torch.Tensor) -> None:
        if (name := self._real.get(storage_key(tensor))) is not None:
            raise self.refuse("a loader writes a live tensor that has memory", func, name)

    def refuse(self, what: str, found: object, tensor: str | None = None) -> LayoutError:
        """Return the error, remembered in case that the loader swallows it."""
        error = LayoutError(
            what,
            expected="views, copies and repeatable operations on weightless tensors",
            found=f"{found}, while loading {self.current!r}",
            tensor=tensor or self.current,
            hint="a loader that looks at values, or leaves the model's device, cannot be traced",
        )
        self.refusal = self.refusal or error
        return error


def weights_behind(pieces: Iterable[Piece]) -> list[str]:
    """Return the checkpoint names that pieces were copied or computed from, sorted."""
    names: set[str] = set()
    seen: set[int] = set()
    stack = list(pieces)
    while stack:
        origin = stack.pop().origin
        if isinstance(origin, Weight):
            names.add(origin.name)
        elif isinstance(origin, Result) and id(origin.node) not in seen:
            seen.add(id(origin.node))
            stack += (piece for value in origin.node.values for piece in value.pieces)
    return sorted(names)


def _on_meta(func: Any, leaves: list[Any]) -> list[Any]:
    """Return arguments for a run without weights: everything on the meta device, but indices as they are."""
    keep = kind_of(func) is Kind.INDEX
    moved: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.device):
            moved.append(torch.device("meta"))
        elif isinstance(leaf, torch.Tensor) and not leaf.is_meta and not (keep or leaf.ndim == 0):
            moved.append(torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta"))
        else:
            moved.append(leaf)
    return moved
