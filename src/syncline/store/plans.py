"""Plans by their inputs: every process makes the same one from what the MetaServer tells."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from syncline.errors import LayoutError
from syncline.layout import Layout
from syncline.plan import plan
from syncline.store import rules as rules_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncline.layout import Manifest, Rules
    from syncline.plan import Plan
    from syncline.protocol.parts import InstanceLayout, RankLayout

logger = logging.getLogger(__name__)

_KEPT = (
    4  # the current plan, its predecessor while both are in use, and room for a member that comes and goes
)


@dataclass(frozen=True, slots=True)
class _Made:
    """A plan and whom it leaves out; no plan if it would leave out everybody."""

    plan: Plan | None
    misfits: Mapping[str, LayoutError]


class PlanBook:
    """Makes plans from manifests' fingerprints; thread-safe.

    Args:
        fetch: returns a manifest by its fingerprint, for example from the MetaServer.
    """

    def __init__(self, fetch: Callable[[bytes], Manifest]) -> None:
        self._fetch = fetch
        self._plans: OrderedDict[object, _Made] = OrderedDict()
        self._lock = threading.Lock()

    def plan(
        self, writers: Sequence[RankLayout], instances: Sequence[InstanceLayout], mine: str | None = None
    ) -> Plan:
        """Return the plan for these writers and for those of the instances that they can feed.

        Each instance is judged on its own: what one allows (a frozen tower) never hides a gap in another, and
        one that does not fit is left out, by every process alike, instead of spoiling the version for all.

        Args:
            writers: all ranks, rank 0 first.
            instances: that are there.
            mine: the instance that asks, if one does.

        Raises:
            LayoutError: names, shapes, casts or coverage of ``mine`` that do not fit, naming the tensor; or,
                if no instance fits, of the first one.
        """
        key = (tuple(writers), tuple(instances))
        with self._lock:
            found = self._plans.get(key)
            if found is None:
                found = self._plans[key] = self._make(writers, instances)
                while len(self._plans) > _KEPT:
                    self._plans.popitem(last=False)
            else:
                self._plans.move_to_end(key)
        if mine is not None and mine in found.misfits:
            raise found.misfits[mine]
        if found.plan is None:
            raise next(iter(found.misfits.values()))
        return found.plan

    def check(self, writers: Sequence[RankLayout], instance: InstanceLayout) -> None:
        """Raise what is wrong between the writers and one instance, under their own rules alone."""
        self._plan_of(writers, [instance], self._rules(writers, [instance]))

    def _make(self, writers: Sequence[RankLayout], instances: Sequence[InstanceLayout]) -> _Made:
        if len({rank.rules for one in instances for rank in one.ranks}) <= 1:
            try:
                return _Made(self._plan_of(writers, instances, self._rules(writers, instances)), {})
            except LayoutError as error:
                if len(instances) == 1:
                    return _Made(None, {instances[0].name: error})
        fitting, misfits = self._sort_out(writers, instances)
        for name, error in misfits.items():
            logger.warning("instance %s is left out: %s", name, error)
        if not fitting:
            return _Made(None, misfits)
        # every cast was allowed by the instance's own rules; together they may say two things of one pattern
        rules = replace(self._rules(writers, fitting, casts=False), casts="reader")
        return _Made(self._plan_of(writers, fitting, rules), misfits)

    def _sort_out(
        self, writers: Sequence[RankLayout], instances: Sequence[InstanceLayout]
    ) -> tuple[list[InstanceLayout], dict[str, LayoutError]]:
        fitting: list[InstanceLayout] = []
        misfits: dict[str, LayoutError] = {}
        for instance in instances:
            try:
                self.check(writers, instance)
                self._rules(writers, [*fitting, instance], casts=False)
            except LayoutError as error:
                misfits[instance.name] = error
            else:
                fitting.append(instance)
        return fitting, misfits

    def _plan_of(
        self, writers: Sequence[RankLayout], instances: Sequence[InstanceLayout], rules: Rules
    ) -> Plan:
        readers = {one.name: self._layout(one.ranks) for one in instances}
        return plan(self._layout(writers), readers, rules)

    def _layout(self, ranks: Sequence[RankLayout]) -> Layout:
        return Layout(tuple(self._fetch(r.manifest_fp) for r in ranks), tuple(r.host for r in ranks))

    @staticmethod
    def _rules(
        writers: Sequence[RankLayout], instances: Sequence[InstanceLayout], *, casts: bool = True
    ) -> Rules:
        blobs = {r.rules for r in writers} | {r.rules for one in instances for r in one.ranks}
        parts = [rules_wire.decode(blob) for blob in sorted(blobs)]
        return rules_wire.merge(parts if casts else [replace(part, casts={}) for part in parts])
