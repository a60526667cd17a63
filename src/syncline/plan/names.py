"""Matching of names: whose tensor is whose. This is the one place where aliases are applied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from syncline.errors import NameMismatchError
from syncline.layout.names import current
from syncline.plan.tables import Numbered

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncline.layout import Manifest, Rules
    from syncline.plan.columns import I32, Bools

_SAMPLES = 5


class Names:
    """Names of both sides by number, and the numbers of the synced ones in the plan.

    Attributes:
        synced: canonical names, sorted.
    """

    def __init__(self, rules: Rules, everybody: Sequence[Manifest]) -> None:
        self._rules = rules
        self._pool = current()
        listed = [*rules.aliases, *rules.aliases.values()]
        numbers = self._pool.numbers(listed)
        self._alias = (numbers[: len(rules.aliases)], numbers[len(rules.aliases) :])
        for manifest in everybody:
            manifest.name_numbers(self._pool)
        self._end = self._pool.end
        self.synced: tuple[str, ...] = ()
        self._numbers: dict[int, Numbered] = {}
        self._kept: list[I32] = []

    def match(self, sources: Iterable[Manifest], instances: Mapping[str, Sequence[Manifest]]) -> None:
        """Find the synced names.

        Raises:
            NameMismatchError: names on one side only that no rule declares.
        """
        writers = list(sources)
        sent = self._named(writers)
        wanted = np.zeros(self._end, np.bool_)
        checked: set[bytes] = set()
        for instance, held in instances.items():
            own = self._named(held)
            if (seen := own.tobytes()) in checked:
                continue
            checked.add(seen)
            if (own != sent).any():
                self._check(instance, writers, held, sent, own)
            wanted |= own
        both = sent & wanted
        readers = [manifest for held in instances.values() for manifest in held]
        self.synced, numbers = self._sorted(readers, both)
        place = np.full(self._end, -1, np.int32)
        place[numbers] = np.arange(len(numbers), dtype=np.int32)
        self._number([*writers, *readers], place)

    def of(self, manifest: Manifest) -> Numbered:
        """Return the plan's numbers of a manifest's names; the same object for the same table of names."""
        return self._numbers[id(manifest.name_numbers(self._pool))]

    def _number(self, manifests: Iterable[Manifest], place: I32) -> None:
        """Find the plan's numbers of all tables of names at once: there may be one a rank."""
        tables = {id(n): n for m in manifests for n in [m.name_numbers(self._pool)]}
        self._kept = list(tables.values())  # so that their ids stay theirs
        number = place[self._canonical(np.concatenate(self._kept))]
        counts = np.array([len(n) for n in self._kept], np.int64)
        ends = np.cumsum(counts)
        falls = np.zeros(len(number), np.int64)
        falls[1:] = number[1:] <= number[:-1]
        falls[(ends - counts)[counts > 0]] = 0  # where a table begins
        faults = np.append(0, np.cumsum(falls + (number < 0)))
        for key, n, end in zip(tables, self._kept, ends.tolist(), strict=True):
            begin = end - len(n)
            mine = number[begin:end]
            rising = bool(faults[end] == faults[begin])
            same = rising and len(n) > 0 and int(mine[-1]) == len(n) - 1
            self._numbers[key] = Numbered(mine, rising, same)

    def _canonical(self, pooled: I32) -> I32:
        if not len(self._alias[0]):
            return pooled
        table = np.arange(self._end, dtype=np.int32)
        table[self._alias[0]] = self._alias[1]
        return table[pooled]

    def _named(self, manifests: Iterable[Manifest]) -> Bools:
        """Return bool[pool]: which canonical names some manifest has."""
        found = np.zeros(self._end, np.bool_)
        for pooled in {id(n): n for m in manifests for n in [m.name_numbers(self._pool)]}.values():
            found[self._canonical(pooled)] = True
        return found

    def _sorted(self, readers: Sequence[Manifest], both: Bools) -> tuple[tuple[str, ...], I32]:
        """Return the synced canonical names, sorted, and their numbers in the pool."""
        count = int(both.sum())
        for manifest in readers if not self._rules.aliases else ():
            pooled = manifest.name_numbers(self._pool)  # a manifest's names are sorted
            kept = both[pooled]
            if len(pooled) == count == int(kept.sum()):
                return manifest.names, pooled
        texts: dict[int, str] = {}
        for manifest in readers:
            pooled = self._canonical(manifest.name_numbers(self._pool))
            for i in np.nonzero(both[pooled])[0].tolist():
                texts.setdefault(int(pooled[i]), self._rules.canonical(manifest.names[i]))
        ordered = sorted(texts, key=texts.__getitem__)
        return tuple(texts[n] for n in ordered), np.array(ordered, np.int32)

    def _check(
        self, instance: str, writers: Iterable[Manifest], held: Iterable[Manifest], sent: Bools, own: Bools
    ) -> None:
        rules = self._rules
        missing = [n for n in self._texts(held, own & ~sent) if not rules.is_frozen(n)]
        unwanted = [n for n in self._texts(writers, sent & ~own) if not rules.is_extra(n)]
        if missing or unwanted:
            counts = (int(sent.sum()), int((sent & own).sum()))
            raise _name_error(instance, counts, missing, unwanted)

    def _texts(self, manifests: Iterable[Manifest], which: Bools) -> list[str]:
        found: set[str] = set()
        if which.any():
            for manifest in manifests:
                at = np.nonzero(which[self._canonical(manifest.name_numbers(self._pool))])[0]
                found.update(self._rules.canonical(manifest.names[i]) for i in at.tolist())
        return sorted(found)


def _name_error(
    instance: str, counts: tuple[int, int], missing: list[str], unwanted: list[str]
) -> NameMismatchError:
    found: list[str] = []
    if unwanted:
        found.append(f"{len(unwanted)} sent names that no rank wants, {_samples(unwanted)}")
    if missing:
        found.append(f"{len(missing)} reader names that nobody sends, {_samples(missing)}")
    told = f"received {counts[0]}, applied {counts[1]}, missing {len(missing)}"
    return NameMismatchError(
        f"names on one side only: {told}",
        tensor=min(missing or unwanted),
        rank=f"instance {instance}",
        expected="the same names on both sides",
        found="; ".join(found),
        hint="declare what is meant: Rules(extras=[...]) for sent names that nobody wants, frozen=[...] for "
        "reader names that nobody sends, aliases={name: canonical name} for tied tensors",
    )


def _samples(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_SAMPLES])
    return f"e.g. {shown}" + (", ..." if len(names) > _SAMPLES else "")
