"""What other packages add to syncline by entry points: adapters, transports and transforms.

A package declares, in its own ``pyproject.toml``::

    [project.entry-points."syncline.adapters"]
    mine = "my_package.engine:MyAdapter"      # what makes an adapter: factory(rank, world)
    [project.entry-points."syncline.transports"]
    rdma = "my_package.rdma:RdmaTransport"    # what makes a transport
    [project.entry-points."syncline.transforms"]
    mine = "my_package.transforms:TRANSFORM"  # a Transform, several, or a callable that returns or registers

Nothing is imported before it is asked for, and nothing twice. One broken plug-in is named where it is needed,
and hinders no other.
"""

from __future__ import annotations

import logging
import threading
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from syncline.errors import SynclineError

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoint

logger = logging.getLogger(__name__)

ADAPTERS = "syncline.adapters"
TRANSPORTS = "syncline.transports"
TRANSFORMS = "syncline.transforms"
GROUPS = (ADAPTERS, TRANSPORTS, TRANSFORMS)


class Extensions:
    """The plug-ins that are installed, by group and name; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._listed: dict[str, dict[str, list[EntryPoint]]] = {}
        self._loaded: dict[tuple[str, str], Any] = {}
        self._broken: dict[tuple[str, str], SynclineError] = {}
        self._taken: set[str] = set()
        self._taking: set[str] = set()

    def names(self, group: str) -> list[str]:
        """Return the names on offer in a group, sorted; nothing is imported.

        Raises:
            SynclineError: syncline has no such group.
        """
        return sorted(self._points(group))

    def load(self, group: str, name: str) -> Any:
        """Return what an entry point names, imported when it is first asked for.

        Raises:
            SynclineError: nobody offers it, two packages do, or it cannot be imported; the package is named.
        """
        with self._lock:
            key = group, name
            if key in self._broken:
                raise self._broken[key]
            if key not in self._loaded:
                try:
                    self._loaded[key] = _imported(group, name, self._points(group))
                except SynclineError as error:
                    self._broken[key] = error
                    raise
            return self._loaded[key]

    def once(self, group: str, take: Callable[[Any], object]) -> None:
        """Import a whole group and give each object to ``take``, at the first call for the group only.

        A plug-in that cannot be imported, or that ``take`` refuses, is named in a warning and left out.
        """
        if group in self._taken:
            return
        with self._lock:
            if group in self._taken or group in self._taking:
                return  # what a plug-in asks for while it is taken must not ask for it again
            self._taking.add(group)
            try:
                for name in self.names(group):
                    self._take(group, name, take)
            finally:
                self._taking.discard(group)
            self._taken.add(group)

    def broken(self, group: str) -> list[str]:
        """Return the names of the plug-ins that were found to be broken so far, sorted."""
        return sorted(name for kind, name in self._broken if kind == group)

    def _take(self, group: str, name: str, take: Callable[[Any], object]) -> None:
        try:
            offer = self.load(group, name)
            take(offer)
        except Exception as error:  # a plug-in may raise anything
            if not isinstance(error, SynclineError) or (group, name) not in self._broken:
                text = f"the plug-in {name!r} of the group {group} failed"
                self._broken[group, name] = SynclineError(text, found=f"{type(error).__name__}: {error}")
            logger.warning("a plug-in is left out: %s", self._broken[group, name])

    def forget(self) -> None:
        """Look again when next asked: for packages that were installed while this process runs."""
        with self._lock:
            for known in (self._listed, self._loaded, self._broken, self._taken):
                known.clear()

    def _points(self, group: str) -> dict[str, list[EntryPoint]]:
        if group not in GROUPS:
            raise SynclineError("no such group of plug-ins", expected=f"one of {GROUPS}", found=group)
        with self._lock:
            if group not in self._listed:
                listed: dict[str, list[EntryPoint]] = {}
                for point in entry_points(group=group):
                    same = listed.setdefault(point.name, [])
                    if all(point.value != other.value for other in same):
                        same.append(point)  # one package that is found twice on the path counts once
                self._listed[group] = listed
            return self._listed[group]


def _imported(group: str, name: str, points: dict[str, list[EntryPoint]]) -> Any:
    offers = points.get(name, [])
    if not offers:
        raise SynclineError(
            f"no plug-in {name!r} in the group {group}",
            expected=f"one of {', '.join(sorted(points)) or 'none, since no package offers any'}",
            found=name,
            hint=f'install the package that declares it under [project.entry-points."{group}"]',
        )
    if len(offers) > 1:
        raise SynclineError(
            f"two packages offer the plug-in {name!r} of the group {group}",
            expected="one package for each name",
            found=", ".join(map(_described, offers)),
            hint="uninstall one of them",
        )
    try:
        return offers[0].load()
    except Exception as error:  # a plug-in's import may raise anything
        raise SynclineError(
            f"the plug-in {name!r} of the group {group} cannot be imported",
            expected=_described(offers[0]),
            found=f"{type(error).__name__}: {error}",
            hint="repair or uninstall that package; everything else works without it",
        ) from error


def _described(point: EntryPoint) -> str:
    package = point.dist.name if point.dist is not None else "an unknown package"
    return f"{point.value} of {package}"


installed = Extensions()
"""The plug-ins of this process."""


def adapter(name: str) -> Any:
    """Return what an entry point of ``syncline.adapters`` names: an adapter's class or factory.

    Raises:
        SynclineError: as `Extensions.load`.
    """
    return installed.load(ADAPTERS, name)
