"""Checks of an engine adapter in real updates: what stands in memory, and what the engine knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncline.conformance import memory, static
from syncline.conformance.report import NonconformityError, UnobservableError
from syncline.conformance.session import together
from syncline.errors import EffectiveMismatchError, SynclineError
from syncline.store.adapter import Status
from syncline.verify.effective import compare

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from syncline.conformance.session import Session
    from syncline.protocol.ids import VersionKey

_ROUNDS = 6
_SOON = 5.0


class Updates:
    """The checks that need a session; made in the order in which they stand here.

    Args:
        session: whose ranks are checked.
        scratch: an empty directory.
        make: returns the adapters of another, fresh engine.
    """

    def __init__(self, session: Session, scratch: Path, make: Callable[[], list[Any]]) -> None:
        self._session, self._scratch, self._make = session, scratch, make
        self._adapters: list[Any] = session.adapters
        self._places: list[Any] = []
        self._key: VersionKey | None = None

    def join(self) -> None:
        """Check that the ranks can join a job whose trainer holds what they want."""
        self._places = self._where()
        self._session.join(self._adapters, "checked")

    def update(self) -> None:
        """Check that an update over poisoned memory leaves every byte of the version there."""
        for adapter in self._adapters:
            if _on_host(adapter):
                memory.poison(adapter.manifest, adapter.binding())
        self._session.publish()
        report = self._session.update("checked")
        self._key = report.key
        for adapter in self._adapters:
            if static.stages_of(adapter) or not _on_host(adapter):
                continue  # staging memory serves one stage after the other; each was proved as it stood
            tensors = self._session.trainer.tensors
            named = {**tensors, **{a: tensors[b] for a, b in adapter.aliases.items() if b in tensors}}
            wrong = memory.first_difference(adapter.manifest, adapter.binding(), named)
            if wrong is not None:
                raise NonconformityError(
                    "live memory changed between the proof and the end of the update",
                    expected="the bytes of the version",
                    found=wrong,
                    rank=f"rank {adapter.rank}",
                )

    def effective(self) -> None:
        """Check that every live tensor equals a fresh load of the version by the engine's own loader."""
        loaded = self._session.fresh(self._scratch / f"version-{self._session.number}")
        for adapter, fresh in zip(self._adapters, loaded, strict=True):
            try:
                compare(adapter.live_tensors(), fresh).raise_on_difference(f"rank {adapter.rank}")
            except EffectiveMismatchError as error:
                raise NonconformityError(
                    error.what,
                    expected=error.expected,
                    found=error.found,
                    rank=f"rank {adapter.rank}",
                    tensor=error.tensor,
                ) from error

    def addresses(self) -> None:
        """Check that no live tensor and no storage moved."""
        for before, after in zip(self._places, self._where(), strict=True):
            moved = sorted(
                name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
            )
            if moved:
                raise NonconformityError(
                    "an update moved live tensors",
                    expected="the addresses, dtypes and shapes of before",
                    found=moved[:5],
                )

    def version(self) -> None:
        """Check that the engine says which version it serves."""
        for adapter in self._adapters:
            if not hasattr(adapter, "version"):
                raise UnobservableError("the adapter has no attribute `version`")
            if adapter.version != self._key:
                raise NonconformityError(
                    "the engine reports another version",
                    expected=self._key,
                    found=adapter.version,
                    rank=f"rank {adapter.rank}",
                )

    def names(self) -> None:
        """Check the statuses by what changes: in each round, a part of the checkpoint tensors."""
        names = list(self._session.trainer.tensors)
        for bit in range(min(_ROUNDS, max(1, (len(names) - 1).bit_length()))):
            chosen = {name for number, name in enumerate(names) if number >> bit & 1} or set(names)
            before = [memory.digests(adapter.live_tensors()) for adapter in self._adapters]
            self._session.publish(chosen)
            self._key = self._session.update("checked").key
            for adapter, old in zip(self._adapters, before, strict=True):
                self._explain(adapter, old, memory.digests(adapter.live_tensors()), chosen)

    def _explain(
        self, adapter: Any, old: Mapping[str, bytes], new: Mapping[str, bytes], chosen: Collection[str]
    ) -> None:
        for name, status in adapter.live_status().items():
            if status.status is Status.DERIVED:
                continue  # whether it is right, a fresh load says
            sources = {adapter.aliases.get(one, one) for one in status.names}
            moved = old.get(name) != new.get(name)
            if moved and not sources & set(chosen):
                raise NonconformityError(
                    "a live tensor changed that depends on nothing that was sent",
                    expected=f"{status.status} by {sorted(sources) or 'nothing'}",
                    found=f"it changed with {sorted(chosen)[:5]}",
                    tensor=name,
                )
            if not moved and sources and sources <= set(chosen) and 0 not in status.shape:
                raise NonconformityError(
                    "a live tensor did not change with what it is synced from",
                    expected=f"other contents for other {sorted(sources)[:5]}",
                    found="the same bits",
                    tensor=name,
                )

    def once(self) -> None:
        """Check that a second ``after_update`` of the same version changes nothing."""
        before = [memory.digests(adapter.live_tensors()) for adapter in self._adapters]
        self._adapters[0].pause("wait", _SOON)
        try:
            together([lambda a=adapter: a.after_update(self._key) for adapter in self._adapters])
        finally:
            self._adapters[0].resume(self._key)
        for adapter, old in zip(self._adapters, before, strict=True):
            new = memory.digests(adapter.live_tensors())
            changed = sorted(name for name in new if new[name] != old.get(name))
            if changed:
                raise NonconformityError(
                    "after_update ran twice for one version",
                    expected="once for each version: a second call does nothing",
                    found=f"it changed {changed[:5]}",
                    rank=f"rank {adapter.rank}",
                )

    def caches(self) -> None:
        """Check that outputs after an update are those of a fresh engine, which never had a cache."""
        if not all(callable(getattr(adapter, "run", None)) for adapter in self._adapters):
            raise UnobservableError("the adapter has no run(): outputs cannot be compared")
        before = self._outputs(self._adapters)
        self._session.publish()
        self._key = self._session.update("checked").key
        after = self._outputs(self._adapters)
        others = self._make()
        self._session.join(others, "fresh")
        self._session.update("fresh")
        wanted = self._outputs(others)
        if after != wanted:
            stale = " (they are those of the version before)" if after == before else ""
            raise NonconformityError(
                "outputs after an update are not a fresh engine's",
                expected="equal bits: caches are flushed after the commit",
                found=f"other bits{stale}",
            )
        if wanted == before:
            raise UnobservableError("run() gives the same for all weights")

    def checkpoint(self) -> None:
        """Check that loading a directory that is not there is an error."""
        nowhere = self._scratch / "nowhere"
        for adapter in self._adapters:
            try:
                adapter.load_fresh(nowhere)
            except (SynclineError, OSError):
                continue
            raise NonconformityError(
                "load_fresh of a missing directory returned", expected="a SynclineError or an OSError"
            )

    def stage(self) -> None:
        """Check that a stage that does not exist is refused by name."""
        for adapter in self._adapters:
            listed = static.stages_of(adapter)
            if not listed:
                raise UnobservableError("the adapter has no stages")
            for call in (adapter.begin_stage, adapter.end_stage):
                try:
                    call(len(listed))
                except SynclineError:
                    continue
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"
                else:
                    found = "it returned"
                raise NonconformityError(
                    f"{call.__name__}({len(listed)}) of {len(listed)} stages",
                    expected="a SynclineError",
                    found=found,
                )

    def _outputs(self, adapters: list[Any]) -> list[bytes]:
        together([adapter.run for adapter in adapters])  # fills caches
        return [memory.digest(out) for out in together([adapter.run for adapter in adapters])]

    def _where(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for adapter in self._adapters:
            places: dict[str, object] = {
                name: (t.data_ptr(), t.dtype, tuple(t.shape), t.stride())
                for name, t in adapter.live_tensors().items()
            }
            places["(storages)"] = tuple(adapter.binding().addresses().tolist())
            found.append(places)
        return found


def _on_host(adapter: Any) -> bool:
    """Return whether memory can be read by address; a device's is proved by fresh loads alone."""
    return all(tensor.device.type == "cpu" for tensor in adapter.live_tensors().values())
