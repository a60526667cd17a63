"""How a trace sees a loader's operations: a dispatch mode for all, shortcuts for those that loaders repeat.

A loader of a hundred thousand tensors is a few views and a copy for each. Sent through torch's dispatcher to
Python they would take most of a trace's time, so the methods of `torch.Tensor` that make views or copy are
replaced while any trace runs. In a traced thread they do for plain tensors what the mode would do; everywhere
else, and for everything unusual, they call what they replaced.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from syncline.layout.loader_ops import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from syncline.layout.loader_trace import Tracer

_VIEWS = (
    *("narrow", "select", "__getitem__", "unsqueeze", "squeeze", "t", "transpose", "permute", "expand"),
    *("chunk", "unbind", "detach"),
)
_INDICES = frozenset({int, slice, type(None), type(...)})
_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001 (has no public name)
_WithoutDispatch = torch._C._DisableTorchDispatch  # noqa: SLF001 (as above)


@contextmanager
def watching(tracer: Tracer) -> Iterator[None]:
    """Trace the operations of the current thread."""
    before = _local.tracer, _local.depth
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_shortcuts())
        stack.enter_context(_Dispatch(tracer))
        _local.tracer, _local.depth = tracer, _modes()
        try:
            yield
        finally:
            _local.tracer, _local.depth = before


class _Dispatch(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave the handler as it is: wrapped, it would import the compiler, and cost time at every call."""
        return False

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._tracer.dispatch(func, args, kwargs or {})


class _Local(threading.local):
    tracer: Tracer | None = None
    depth: int = -1
    """Number of dispatch modes while no mode of the loader's own is on top, which has to see everything."""


_local = _Local()
_guard = threading.Lock()
_active = 0
_replaced: dict[str, Any] = {}
"""What the class itself had by a name before; None where it inherited it."""


@contextmanager
def _shortcuts() -> Iterator[None]:
    """Replace methods of `torch.Tensor`, for as long as any thread is traced."""
    global _active  # noqa: PLW0603 (a class of the process, guarded by one lock)
    with _guard:
        if _active == 0:
            _install()
        _active += 1
    try:
        yield
    finally:
        with _guard:
            _active -= 1
            if _active == 0:
                _remove()


def _install() -> None:
    made: dict[str, Any] = {name: _view(name, getattr(torch.Tensor, name)) for name in _VIEWS}
    made["copy_"] = _copy(torch.Tensor.copy_)
    made["item"] = _item(torch.Tensor.item)
    made["data"] = _data(torch.Tensor.data)
    for name, method in made.items():
        _replaced[name] = vars(torch.Tensor).get(name)
        setattr(torch.Tensor, name, method)


def _remove() -> None:
    for name, method in _replaced.items():
        if method is None:
            delattr(torch.Tensor, name)
        else:
            setattr(torch.Tensor, name, method)
    _replaced.clear()


def _view(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    sure = {"narrow": _sure_narrow, "__getitem__": _sure_index}.get(name, _sure)

    def view(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _local.depth == _modes() and type(self) in PLAIN and not kwargs and sure(args):
            with _WithoutDispatch():
                return original(self, *args)
        return original(self, *args, **kwargs)

    return view


def _copy(original: Callable[..., Any]) -> Callable[..., Any]:
    def copy_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tracer = _local.tracer
        if tracer is not None and _local.depth == _modes() and len(args) == 1 and not kwargs:  # noqa: SIM102
            if type(self) in PLAIN and not tracer.closed and tracer.copied(self, args[0]):
                return self
        return original(self, *args, **kwargs)

    return copy_


def _item(original: Callable[..., Any]) -> Callable[..., Any]:
    """``item``'s answer has to survive in Python as something that can be recognised."""

    def item(self: torch.Tensor) -> Any:
        tracer = _local.tracer
        if tracer is not None and not tracer.closed:  # noqa: SIM102 (the second line asks torch)
            if self.is_meta and self.numel() == 1 and self.dtype != torch.bool:
                return tracer.item(self)
        return original(self)

    return item


def _data(original: Any) -> property:
    def data(self: torch.Tensor) -> torch.Tensor:
        if _local.depth == _modes() and type(self) in PLAIN:
            with _WithoutDispatch():
                return original.__get__(self)
        return original.__get__(self)

    return property(data, original.__set__, original.__delete__)


def _sure(_args: tuple[Any, ...]) -> bool:
    return True


def _sure_narrow(args: tuple[Any, ...]) -> bool:
    """Return whether the start is no tensor, whose value would be asked for."""
    return len(args) == 3 and type(args[1]) is int


def _sure_index(args: tuple[Any, ...]) -> bool:
    """Return whether an index makes a view: none of its parts is a tensor or a list."""
    index = args[0]
    if type(index) is tuple:
        return all(type(part) in _INDICES for part in index)
    return type(index) in _INDICES
