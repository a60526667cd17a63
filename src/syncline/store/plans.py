"""Plans by their inputs: every process makes the same one from what the MetaServer tells."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from syncline.layout import Layout
from syncline.plan import plan
from syncline.store import rules as rules_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncline.layout import Manifest, Rules
    from syncline.plan import Plan
    from syncline.protocol.parts import InstanceLayout, RankLayout

_KEPT = (
    4  # the current plan, its predecessor while both are in use, and room for a member that comes and goes
)


class PlanBook:
    """Makes plans from manifests' fingerprints; thread-safe.

    Args:
        fetch: returns a manifest by its fingerprint, for example from the MetaServer.
    """

    def __init__(self, fetch: Callable[[bytes], Manifest]) -> None:
        self._fetch = fetch
        self._plans: OrderedDict[object, Plan] = OrderedDict()
        self._lock = threading.Lock()

    def plan(self, writers: Sequence[RankLayout], instances: Sequence[InstanceLayout]) -> Plan:
        """Return the plan for these writers and instances.

        Before an instance takes part in a common plan, it is checked on its own against the writers, so that
        what one instance allows (a frozen tower) never hides a gap in another.

        Raises:
            LayoutError: names, shapes, casts or coverage that do not fit, naming the tensor.
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
            return found

    def check(self, writers: Sequence[RankLayout], instance: InstanceLayout) -> None:
        """Raise what is wrong between the writers and one instance, under their own rules alone."""
        self._plan_of(writers, [instance])

    def _make(self, writers: Sequence[RankLayout], instances: Sequence[InstanceLayout]) -> Plan:
        if len(instances) > 1 and len({rank.rules for i in instances for rank in i.ranks}) > 1:
            for instance in instances:
                self.check(writers, instance)
        return self._plan_of(writers, instances)

    def _plan_of(self, writers: Sequence[RankLayout], instances: Sequence[InstanceLayout]) -> Plan:
        readers = {i.name: self._layout(i.ranks) for i in instances}
        return plan(self._layout(writers), readers, self._rules(writers, instances))

    def _layout(self, ranks: Sequence[RankLayout]) -> Layout:
        return Layout(tuple(self._fetch(r.manifest_fp) for r in ranks), tuple(r.host for r in ranks))

    @staticmethod
    def _rules(writers: Sequence[RankLayout], instances: Sequence[InstanceLayout]) -> Rules:
        blobs = {r.rules for r in writers} | {r.rules for i in instances for r in i.ranks}
        return rules_wire.merge(rules_wire.decode(blob) for blob in sorted(blobs))
