"""Many to many over the GPUs of one host: ``python -m benchmarks.gpu.many [--gpus N] [--out DIR]``.

A trainer on one half of the GPUs and an engine on the other, and both on all of them; on one GPU only the
latter. Every rank is a process. Each layout is moved over every transport, each tensor of each reader is
compared with what the CPU made, and then updates are timed, from one instant at which all ranks start to
the last one's end. In the same run the same bytes go in one large copy a pair of GPUs: the bound.

``--fake`` does the same with the fake devices of the tests, on CPU, without any speeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tests.forkserver import preloaded

from benchmarks.gpu import many_devices, many_peers, many_traffic
from benchmarks.gpu.many_cases import TINY, Case, Contents, cases, largest
from benchmarks.gpu.many_processes import RankError, Together, once
from benchmarks.gpu.many_ranks import NEAR, Offer, Order, Setup, serve
from benchmarks.gpu.many_report import Report, facts
from benchmarks.gpu.many_traffic import Traffic
from syncline.transport.base import Side

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

_MAKE_SECONDS, _LINK_SECONDS, _RUN_SECONDS = 240.0, 120.0, 90.0
_AHEAD = 0.02
_WARM = 2
MODES = ("split", "colocated")
TRANSPORTS = (NEAR, "nccl")
_MOST = 8
PARTS = ("ours", "bound", "peers")
LAYOUTS = ("FSDP-TP", "EP-TP", "EP-EP", "FSDP-EP")


@dataclass
class World:
    """All ranks of the cases of one mode, each a process."""

    setup: Setup
    writers: tuple[int, ...]
    readers: tuple[int, ...]
    step: int = 0
    together: Together = field(init=False)

    def __enter__(self) -> World:
        ends = ((Side.SOURCE, self.writers), (Side.DESTINATION, self.readers))
        given = [
            (f"{side} {rank} on GPU {gpu}", (self.setup, side, rank, gpu))
            for side, gpus in ends
            for rank, gpu in enumerate(gpus)
        ]
        self.together = Together(serve, given)
        return self

    def __exit__(self, *_: object) -> None:
        self.together.close()

    @property
    def reading(self) -> list[int]:
        """Numbers of the readers' processes."""
        return list(range(len(self.writers), len(self.writers) + len(self.readers)))

    def make(self, case: Case, version: int) -> tuple[dict[int, Offer], dict[int, Offer]]:
        """Have every rank allocate, and writers write a version; return what either side offers."""
        offers = self.together.ask(("make", case), _MAKE_SECONDS)
        count = len(self.writers)
        self.together.ask(("write", version), _MAKE_SECONDS, range(count))
        return dict(enumerate(offers[:count])), dict(enumerate(offers[count:]))

    def link(self, order: Order, offers: tuple[dict[int, Offer], dict[int, Offer]]) -> float:
        """Link, compile and bind every rank; return the seconds of the slowest."""
        count = len(self.writers)
        self.together.tell(("link", order, offers[1]), range(count))
        self.together.tell(("link", order, offers[0]), self.reading)
        return max(found["connect_s"] for found in self.together.answers(_LINK_SECONDS))

    def update(self, order: Order) -> tuple[float, int]:
        """Move everything once; return the seconds from the common start to the last end, and the bytes."""
        self.step += 1
        at = time.perf_counter() + _AHEAD
        ended = self.together.ask(("run", order, self.step, at), _RUN_SECONDS)
        return max(when for when, _ in ended) - at, sum(nbytes for _, nbytes in ended)

    def exact(self, order: Order, version: int) -> tuple[tuple[int, int], int]:
        """Spoil the readers' memory, update, compare: (right, all) tensors; and the bytes that arrived."""
        self.together.ask(("spoil",), _RUN_SECONDS, self.reading)
        _, nbytes = self.update(order)
        found = self.together.ask(("check", version), _MAKE_SECONDS, self.reading)
        return (sum(good for good, _ in found), sum(count for _, count in found)), nbytes


class Bench:
    """The whole run."""

    def __init__(self, options: argparse.Namespace, report: Report, setup: Setup) -> None:
        self.options, self.report, self.setup = options, report, setup
        self._until = time.monotonic() + options.seconds

    def run(self, listed: Iterable[Case]) -> None:
        """Run all cases that fit into the time."""
        if not self.options.fake:
            self.report.rates = once(many_traffic.rates, [(self.options.gpus,)], _RUN_SECONDS)[0]
        for ends, group in groupby(listed, lambda c: (c.writer_gpus, c.reader_gpus)):
            fitted = [c if self.options.fake else c.fitted(many_devices.free()) for c in group]
            if "ours" in self.options.parts:
                self._attempt(lambda ends=ends, fitted=fitted: self._mode(ends, fitted))
            if "peers" in self.options.parts:
                self._peers(fitted)

    def _attempt(self, what: Callable[[], None]) -> None:
        """Go on with the rest if a process dies or fails: its world is gone, and the report says so."""
        try:
            what()
        except RankError as error:
            self.report.failed.append(str(error))
            print(f"FAILED: {error}", file=sys.stderr, flush=True)

    def _mode(self, ends: tuple[tuple[int, ...], tuple[int, ...]], fitted: Sequence[Case]) -> None:
        bounds = {case: self._bound(case) for case in fitted}
        with World(self.setup, *ends) as world:
            for case in fitted:
                self._ours(world, case, bounds[case])

    def _bound(self, case: Case) -> dict[str, Any]:
        if self.options.fake or "bound" not in self.options.parts or self._late(case, "its bound"):
            return {}
        return once(many_traffic.bound, [(Traffic.of(case).between,)], _RUN_SECONDS)[0]

    def _ours(self, world: World, case: Case, bound: dict[str, Any]) -> None:
        if self._late(case, "all of it"):
            return
        traffic, version = Traffic.of(case), 1 + len(self.report.lines)
        offers = world.make(case, version)
        for order in self._orders(traffic):
            if self._late(case, self._way(order)):
                break
            connect = world.link(order, offers)
            exact, nbytes = world.exact(order, version)
            if nbytes != traffic.total:
                raise ValueError(f"{case.name}: {nbytes} bytes arrived, {traffic.total} were planned")
            took = [world.update(order)[0] for _ in range(_WARM + self.options.rounds)][_WARM:]
            self._line(traffic, self._way(order), exact, statistics.median(took), bound, connect)
        world.together.ask(("close",), _RUN_SECONDS)

    def _orders(self, traffic: Traffic) -> list[Order]:
        orders = [Order(NEAR)]
        if min(len(traffic.case.writer_gpus), len(traffic.case.reader_gpus)) > 1:
            orders.append(Order(NEAR, staggered=False))
        if any(a != b and n for (a, b), n in traffic.between.items()):
            orders.append(Order("nccl"))
        else:
            self.report.leave("nccl", "no two ranks on different GPUs exchange bytes", traffic.case.name)
        return [o for o in orders if o.transport in self.options.transports]

    def _line(
        self,
        traffic: Traffic,
        way: str,
        exact: tuple[int, int],
        seconds: float,
        bound: dict[str, Any],
        connect: float,
    ) -> None:
        figures: dict[str, Any] = {
            "layout": traffic.case.name,
            "layers": traffic.case.layers,
            "way": way,
            "bytes": traffic.total,
            "ms": 1e3 * seconds,
            "gbs": traffic.total / seconds / 1e9,
            **traffic.balance(),
            "exact": exact,
        }
        if bound:
            figures |= {
                "bound_gbs": traffic.total / bound["seconds"] / 1e9,
                "ratio": bound["seconds"] / seconds,
                "bound_ingress": bound["ingress"],
                "bound_egress": bound["egress"],
            }
        rates = self.report.rates
        if rates:
            predicted = traffic.predicted(rates.get("link", rates["local"]), rates["local"])
            figures |= {"predicted_ms": 1e3 * predicted, "error_percent": 100 * (predicted / seconds - 1)}
        if not self.options.fake:
            figures["connect_s"] = connect
        self.report.line(**figures)
        if self.options.out:
            self.report.save(self.options.out)

    def _peers(self, fitted: Sequence[Case]) -> None:
        """Time what others do, on few layers of the same layouts."""
        for case in fitted:
            for name in many_peers.WAYS:
                few = many_peers.few(case)
                why = many_peers.refused(name, few)
                if why:
                    self.report.leave(name, why, case.name)
                elif not self._late(case, name):
                    self._attempt(lambda name=name, few=few: self._other(name, few))

    def _other(self, name: str, few: Case) -> None:
        found = many_peers.measured(name, few, self.setup, "cpu" if self.options.fake else "cuda")
        self.report.line(layout=few.name, layers=few.layers, way=name, **found)

    def _way(self, order: Order) -> str:
        return order.transport if order.staggered else f"{order.transport}, all from the first writer"

    def _late(self, case: Case, what: str) -> bool:
        late = time.monotonic() > self._until
        if late:
            self.report.leave(what, f"no time left of {self.options.seconds:g} s", case.name)
        return late


def _options(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="many to many over the GPUs of one host")
    parser.add_argument("--gpus", type=int, help="how many GPUs; all, if left out")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--models", nargs="+", choices=("qwen3-30b-a3b", "qwen3-235b"))
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--layers", type=int, help="at most so many layers")
    parser.add_argument("--rounds", type=int, default=7, help="timed updates of each kind")
    parser.add_argument("--seconds", type=float, default=500.0, help="nothing new begins after that")
    parser.add_argument("--fake", action="store_true", help="fake devices on CPU: no speeds")
    parser.add_argument("--out", help="where the results go; printed only, if left out")
    options = parser.parse_args(given)
    if options.fake:
        options.gpus, options.models, options.rounds = options.gpus or 4, [TINY], 1
    else:
        options.gpus = options.gpus or torch.cuda.device_count()
        options.models = options.models or ["qwen3-30b-a3b", "qwen3-235b"]
    if options.gpus < 2:
        options.modes = [mode for mode in options.modes if mode == "colocated"]
    return options


def _leave_out(options: argparse.Namespace, report: Report) -> None:
    """Note the kinds of run that the options and the machine exclude."""
    for chosen, every, what in (
        (options.modes, MODES, "{} layouts"),
        (options.layouts, LAYOUTS, "{}"),
        (options.transports, TRANSPORTS, "transport {}"),
        (options.parts, PARTS, "part {}"),
    ):
        for one in every:
            if one not in chosen:
                report.leave(what.format(one))
    if options.fake:
        report.leave("real GPUs, speeds and the bound; messages of others go over gloo")
    elif options.gpus < torch.cuda.device_count():
        report.leave(f"more than {options.gpus} of {torch.cuda.device_count()} GPUs")
    elif options.gpus < _MOST:
        report.leave(f"more than {options.gpus} GPUs", "the machine has no more")


def run(given: Sequence[str]) -> Report:
    """Run everything that the arguments ask for, save and show it."""
    options = _options(given)
    report = Report(options.fake, facts(list(given), fake=options.fake))
    _leave_out(options, report)
    with tempfile.TemporaryDirectory(prefix="sl-") as directory:
        bits = Path(directory) / "bits"
        setup = Setup(directory, (str(bits), Contents.make(bits, largest(options.models))), options.fake)
        every = cases(options.gpus, options.modes, options.models, options.layers)
        chosen = [case for case in every if f"{case.trainer}-{case.engine}" in options.layouts]
        Bench(options, report, setup).run(chosen)
    if options.out:
        report.save(options.out)
    report.show()
    return report


def loaded(*, fake: bool) -> AbstractContextManager[None]:
    """Let processes begin with everything imported, whatever each of them will do."""
    names = ("ranks", "peers", "traffic", *(["fake"] if fake else []))
    return preloaded(*(f"benchmarks.gpu.many_{name}" for name in names))


def main() -> int:
    """Run what the command line asks for; the exit status says whether all of it was right."""
    with loaded(fake="--fake" in sys.argv):
        report = run(sys.argv[1:])
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
