"""Checks of an engine adapter at rest: what it says of itself must fit together."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from syncline.conformance import memory
from syncline.conformance.report import NonconformityError, UnobservableError
from syncline.layout.export import dtype_name
from syncline.layout.manifest import Manifest
from syncline.store.adapter import EngineAdapter, LiveStatus, StagedEngine, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncline.memory.binding import Binding


def contract(adapter: Any, protocol: type, rank: int, world: int) -> None:
    """Check that an adapter has every member of its protocol, and is the rank that was asked for."""
    members = [name for name in vars(protocol) if not name.startswith("_")]
    missing = sorted(name for name in members if not hasattr(adapter, name))
    if missing:
        raise NonconformityError(
            "members are missing", expected=f"every member of {protocol.__name__}", found=missing
        )
    if (adapter.rank, adapter.world) != (rank, world):
        raise NonconformityError(
            "another rank than the factory was asked for",
            expected=f"rank {rank} of {world}",
            found=f"rank {adapter.rank} of {adapter.world}",
        )


def manifest(adapter: Any) -> None:
    """Check that the manifest is one, always the same, survives the wire, and lays nothing twice."""
    found = adapter.manifest
    if not isinstance(found, Manifest):
        raise NonconformityError("no manifest", expected="a syncline Manifest", found=type(found).__name__)
    if not found.rows:
        raise NonconformityError("the manifest is empty", expected="at least one shard")
    if adapter.manifest != found or Manifest.decode(found.encode()) != found:
        raise NonconformityError("the manifest changes", expected="one fingerprint at every access")
    twice = memory.overlap(found)
    if twice is not None:
        raise NonconformityError(
            "a shard lies over another one, or over itself",
            expected="each byte of a storage in one shard at most",
            tensor=twice,
        )
    stray = sorted(set(adapter.aliases) & set(adapter.aliases.values()))
    if stray:
        raise NonconformityError("an alias of an alias", expected="canonical names", found=stray)


def binding(adapter: Any) -> None:
    """Check that the binding is the manifest's, complete, and the same when asked twice."""
    found: Binding = adapter.binding()
    held: Manifest = adapter.manifest
    if found.fingerprint != held.fingerprint or len(found) != len(held.storage_nbytes):
        raise NonconformityError(
            "the binding of another manifest",
            expected=f"{held.fingerprint.hex()} with {len(held.storage_nbytes)} storages",
            found=f"{found.fingerprint.hex()} with {len(found)}",
        )
    addresses = found.addresses()
    absent = np.flatnonzero((addresses == 0) & (held.storage_nbytes > 0))
    if len(absent):
        raise NonconformityError("a storage without memory", found=f"storage {int(absent[0])}")
    if not found.same_places(adapter.binding()):
        raise NonconformityError("the binding changes", expected="the same places, since nothing moved")
    for group in _groups(adapter, len(addresses)):
        _check_apart(group, addresses, held.storage_nbytes)


def _groups(adapter: Any, count: int) -> list[list[int]]:
    listed = stages_of(adapter)
    if not listed:
        return [list(range(count))]
    return [[n for n in stage.storages if 0 <= n < count] for stage in listed]


def _check_apart(group: Sequence[int], addresses: Any, sizes: Any) -> None:
    ranges = sorted((int(addresses[n]), int(addresses[n] + sizes[n]), n) for n in group if sizes[n])
    for (_, end, first), (start, _, second) in itertools.pairwise(ranges):
        if start < end:
            raise NonconformityError(
                "two storages that are received together overlap",
                expected="memory of its own for each",
                found=f"storages {first} and {second}",
            )


def stages_of(adapter: Any) -> tuple[Any, ...]:
    """Return an adapter's stages; none for one that takes everything in one go."""
    return tuple(adapter.stages) if isinstance(adapter, StagedEngine) else ()


def stages(adapter: Any) -> None:
    """Check that the stages partition the storages."""
    listed = stages_of(adapter)
    if not listed:
        raise UnobservableError("the adapter has no stages")
    count = len(adapter.manifest.storage_nbytes)
    seen: dict[int, str] = {}
    for stage in listed:
        for storage in stage.storages:
            if storage in seen or not 0 <= storage < count:
                why = f"also in {seen[storage]}" if storage in seen else "which the manifest does not have"
                raise NonconformityError(
                    "the stages are no partition",
                    expected="each storage of the manifest in one stage",
                    found=f"storage {storage} of stage {stage.name}, {why}",
                )
            seen[storage] = stage.name
    if len(seen) != count:
        left = min(set(range(count)) - seen.keys())
        raise NonconformityError(
            "the stages are no partition",
            expected="each storage of the manifest in one stage",
            found=f"storage {left} in none",
        )


def live_status(adapter: EngineAdapter) -> None:
    """Check that every live tensor is listed, as it is, and every checkpoint name is in some."""
    tensors, listed = adapter.live_tensors(), adapter.live_status()
    if tensors.keys() != listed.keys():
        raise NonconformityError(
            "live tensors and their status differ",
            expected="a status for each live tensor",
            found=f"without: {sorted(tensors.keys() - listed.keys())}; "
            f"unknown: {sorted(listed.keys() - tensors.keys())}",
        )
    known = set(adapter.manifest.names) | adapter.aliases.keys() | set(adapter.aliases.values())
    for name, tensor in tensors.items():
        _check_status(name, listed[name], (dtype_name(tensor.dtype), tuple(tensor.shape)), known)
    held = {adapter.aliases.get(one, one) for status in listed.values() for one in status.names}
    unheld = {adapter.aliases.get(one, one) for one in adapter.manifest.names} - held
    if unheld:
        raise NonconformityError(
            "a checkpoint tensor that no live tensor holds",
            expected="every name of the manifest in the status of a synced tensor",
            found=sorted(unheld)[:5],
        )


def _check_status(name: str, status: LiveStatus, form: tuple[str, tuple[int, ...]], known: set[str]) -> None:
    if (status.dtype, tuple(status.shape)) != form:
        raise NonconformityError(
            "a status of another dtype or shape", expected=form, found=status, tensor=name
        )
    if bool(status.names) != (status.status is Status.SYNCED):
        raise NonconformityError(
            "a status whose names do not fit it",
            expected="checkpoint names if synced, none otherwise",
            found=f"{status.status} with {list(status.names)}",
            tensor=name,
        )
    stray = [one for one in status.names if one not in known]
    if stray:
        raise NonconformityError(
            "a status that names a tensor outside of the manifest", found=stray[:5], tensor=name
        )
