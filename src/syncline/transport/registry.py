"""Transports by name: those of this package, and those that other packages offer by entry point.

An entry point of the group ``syncline.transports`` names a callable with the keyword arguments of the
transport it makes; it is imported at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from syncline import extensions
from syncline.errors import SynclineError, TransportError
from syncline.transport.base import Caps, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from syncline.transport.base import Endpoint, Transport

GROUP = extensions.TRANSPORTS
_OWN = {
    "shm": ("syncline.transport.shm", "ShmTransport"),
    "gloo": ("syncline.transport.gloo", "GlooTransport"),
    "cuda_ipc": ("syncline.transport.cuda_ipc", "CudaIpcTransport"),
    "nccl": ("syncline.transport.nccl", "NcclTransport"),
}
_added: dict[str, Callable[..., Transport]] = {}


def add(name: str, factory: Callable[..., Transport]) -> None:
    """Offer a transport under a name that nobody has yet."""
    if name in names():
        raise TransportError("a transport of that name exists", found=name)
    _added[name] = factory


def names() -> list[str]:
    """Return the names of all transports on offer, sorted."""
    return sorted({*_OWN, *_added, *extensions.installed.names(GROUP)})


def factory(name: str) -> Callable[..., Transport]:
    """Return what makes the transport of that name, importing it now.

    Raises:
        TransportError: nobody offers it, or it cannot be imported.
    """
    if name in _OWN:
        module, attribute = _OWN[name]
        return getattr(import_module(module), attribute)
    if name in _added:
        return _added[name]
    if name not in extensions.installed.names(GROUP):
        raise TransportError("no such transport", expected=f"one of {', '.join(names())}", found=name)
    try:
        return extensions.installed.load(GROUP, name)
    except SynclineError as error:
        raise TransportError(
            f"the transport {name!r} cannot be imported",
            expected=error.expected,
            found=error.found,
            hint=error.hint,
        ) from error


def make(name: str, **arguments: Any) -> Transport:
    """Make a transport."""
    return factory(name)(**arguments)


def choose(transports: Iterable[Transport], a: Endpoint, b: Endpoint) -> tuple[Transport, Caps]:
    """Return the first of ``transports``, in order of preference, that serves source a and destination b.

    Raises:
        TransportError: none does; says why, one by one.
    """
    refusals: list[Refusal] = []
    for transport in transports:
        found = transport.caps(a, b)
        if isinstance(found, Caps):
            return transport, found
        refusals.append(found)
    raise TransportError(
        f"no transport from {a} to {b}",
        expected="one that serves both",
        found="; ".join(f"{r.transport}: {r.reason}" for r in refusals) or "none configured",
    )
