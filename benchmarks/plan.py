"""What a plan costs one rank of a large fleet: ``python -m benchmarks.plan --preset kimi-k2 --json``.

Layouts with real shapes are built, encoded, decoded and planned by the product's own classes. Printed:

rank_seconds      the worse of a reader and a trainer rank, from decoded columns to its program (median of 5)
rank_mib          growth of that process's peak memory while it plans; it had decoded the layouts before
metadata_mib      the larger of the trainer's and one instance's encoded layouts, equal manifests once
awex_rank_seconds Awex's planner for the same rank, on the same layouts, in an environment of its own
speedup           the smaller of the two ranks' ratios; speedup_cpu: of their CPU seconds, for a busy machine
balance           bytes of the busiest card (sender, receiver, host) beside a linear programme's bound
copies            of the worse rank; mean_run_bytes and descriptors likewise
coverage          share of the readers' elements that are received exactly once, from one holder
union             whether all trainers' rows together are all readers' rows together
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from benchmarks import plan_awex, plan_layouts, plan_meshed
from benchmarks.plan_bound import busiest, lp_bound
from benchmarks.plan_presets import MODELS
from benchmarks.plan_rank import Fleet
from benchmarks.process import MIB
from syncline.layout.hashing import mixed, weighted
from syncline.layout.mesh import MeshLayout
from syncline.plan import Plan, plan
from syncline.plan.columns import overlaps, sum_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from syncline.layout import Layout
    from syncline.plan import Hops

ROOT = Path(__file__).parent.parent


def worst(made: Plan, *, meshed: bool = False) -> tuple[str, int, int]:
    """Return (instance, reader rank, trainer rank) with many copies: all reader ranks, a few trainers."""
    name = made.instances[0]
    reader = max(range(made.ranks(name)), key=lambda rank: made.hop_count(name, rank))
    spread = np.linspace(0, made.writers - 1, 4).astype(int).tolist()
    some = sorted({*spread, int(made.sender_load.argmax())})
    if meshed:
        return name, reader, max(some, key=lambda rank: made.sent_bundles(rank).copies)
    return name, reader, max(some, key=lambda rank: len(made.writer(rank)))


def of_rank(fleet: Fleet, ranks: tuple[str, int, int]) -> dict[str, Any]:
    """Plan in a new process; return its figures."""
    with tempfile.NamedTemporaryFile(suffix=".msgpack") as file:
        file.write(msgspec.msgpack.encode(fleet))
        file.flush()
        command = [sys.executable, "-m", "benchmarks.plan_rank", file.name, *map(str, ranks)]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def coverage(made: Plan, readers: Mapping[str, Layout]) -> tuple[float, bool]:
    """Return (share of elements received exactly once, whether all senders' rows are all readers' rows)."""
    wanted = once = 0
    halves = [0, 0]
    seen: dict[bytes, int] = {}
    for name in made.instances:
        for rank, manifest in enumerate(readers[name].manifests):
            hops = made.reader(name, rank)
            halves[0] += _rows_sum(hops)
            wanted += int(manifest.box_size.prod(axis=1).sum())
            if manifest.fingerprint not in seen:  # boxes do not depend on who sends them
                seen[manifest.fingerprint] = _received_once(hops, manifest.names, made.names, manifest)
            got = int(hops.size.prod(axis=1).sum())
            once += min(got, seen[manifest.fingerprint])
    for rank in range(made.writers):
        halves[1] += _rows_sum(made.writer(rank))
    return once / wanted, (halves[0] - halves[1]) % (1 << 64) == 0


def _received_once(hops: Hops, own: tuple[str, ...], names: tuple[str, ...], manifest: Any) -> int:
    """Return the elements of a manifest's tensors that disjoint hops bring, tensor by tensor."""
    twice, other = overlaps(hops.tensor, hops.offset, hops.size)
    bad = {*hops.tensor[twice].tolist(), *hops.tensor[other].tolist()}
    got = sum_by(hops.tensor, hops.size.prod(axis=1), len(names))
    number = {name: i for i, name in enumerate(names)}
    place = np.array([number[name] for name in own], np.int64)
    want = sum_by(place[manifest.tensor], manifest.box_size.prod(axis=1), len(names))
    good = (got == want) & ~np.isin(np.arange(len(names)), list(bad))
    return int(want[good].sum())


def _rows_sum(hops: Hops) -> int:
    """Return the sum of hashes of rows: equal for the same rows in any order."""
    columns = [hops.src, hops.dst, hops.instance, hops.tensor, hops.src_storage, hops.dst_storage]
    wide = [c.astype(np.int64)[:, None] for c in [*columns, hops.src_base, hops.dst_base, hops.nbytes]]
    tables = [*wide, hops.offset, hops.size, hops.src_stride, hops.dst_stride]
    return int(mixed(weighted(tables, 9)).sum(dtype=np.uint64))


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build, plan, measure."""
    model = MODELS[arguments.preset]
    split = tuple(arguments.split) if arguments.split else None
    writer: Layout | MeshLayout
    if arguments.trainer_kind == "fsdp":
        writer = plan_layouts.fsdp(model, arguments.trainers)
    elif arguments.trainer_kind == "fsdp-packed":
        writer = plan_layouts.packed(model, arguments.trainers)
    else:
        writer = plan_layouts.megatron(model, arguments.trainers, split)
    readers = plan_layouts.readers(model, arguments.readers)
    fleet = Fleet.of(writer, readers)
    made = plan(writer, readers)
    meshed = isinstance(writer, MeshLayout)
    ranks = worst(made, meshed=meshed)
    cost = of_rank(fleet, ranks)
    other = (
        None if arguments.no_awex or meshed else _awex(writer, readers, ranks)
    )  # one right after the other
    found: dict[str, Any] = {"preset": arguments.preset, "trainers": arguments.trainers}
    found |= {
        "trainer_kind": arguments.trainer_kind,
        "readers": arguments.readers,
        "tensors": len(made.names),
    }
    found |= dict(_cost(cost))
    side = next(iter(fleet.readers.values()))
    found["metadata_mib"] = max(fleet.nbytes(fleet.writer), fleet.nbytes(side)) / MIB
    bound, received = lp_bound(*plan_meshed.samples(writer, readers)) if meshed else lp_bound(writer, readers)
    cards = busiest(made, received, plan_layouts.HOST_RANKS)
    found["balance"] = max(cards.values()) / max(bound, cards["receiver"])
    found["sender_balance"] = cards["sender"] / bound
    if not arguments.quick:
        found["coverage"], found["union"] = (plan_meshed.coverage if meshed else coverage)(made, readers)
    if other is not None:
        found["awex_rank_seconds"] = max(other["reader_seconds"], other["trainer_seconds"])
        found["awex"] = other
        for name, kind in (("speedup", "seconds"), ("speedup_cpu", "cpu_seconds")):
            found[name] = min(other[f"{who}_{kind}"] / cost[who][kind] for who in ("reader", "trainer"))
    return found


def _awex(writer: Layout, readers: Mapping[str, Layout], ranks: tuple[str, int, int]) -> dict[str, Any]:
    python = plan_awex.environment(ROOT / ".venv-awex")
    return plan_awex.measure(python, writer, readers, ranks[1:])


def _cost(cost: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    reader, trainer = cost["reader"], cost["trainer"]
    for name, key in (("rank_seconds", "seconds"), ("rank_cpu_seconds", "cpu_seconds"), ("rank_mib", "mib")):
        yield name, max(reader[key], trainer[key])
    for key in ("copies", "descriptors"):
        yield key, max(reader[key], trainer[key])
    yield "mean_run_bytes", min(reader["run_bytes"], trainer["run_bytes"])
    yield "decode_seconds", cost["decode_seconds"]
    yield "reader", reader
    yield "trainer", trainer


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=sorted(MODELS), default="kimi-k2")
    parser.add_argument("--trainers", type=int, default=256)
    parser.add_argument("--readers", default="8xTP16", help="instances: 8xTP16, 4xEP32")
    parser.add_argument("--trainer-kind", choices=["megatron", "fsdp", "fsdp-packed"], default="megatron")
    parser.add_argument("--split", type=int, nargs=3, metavar=("PP", "EP", "TP"), help="of the trainer")
    parser.add_argument("--quick", action="store_true", help="leave out the coverage of all ranks")
    parser.add_argument("--no-awex", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        found = figures(arguments)
    except ValueError as error:
        parser.error(str(error))
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:>18} {value}")


if __name__ == "__main__":
    main()
