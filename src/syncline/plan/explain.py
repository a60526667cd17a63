"""Explain: what a plan will move over which link, and what limits it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncline.plan.lower import lower

if TYPE_CHECKING:
    from syncline.plan.columns import I64
    from syncline.plan.plan import Plan


def explain(plan: Plan, *, runs: bool, bytes_per_second: float | None) -> dict[str, Any]:
    """Return the plan's traffic as plain data; see `Plan.explain`."""
    ranks = [(name, rank) for name in plan.instances for rank in range(plan.ranks(name))]
    traffic = np.stack([plan.link_bytes(name, rank) for name, rank in ranks], axis=1)
    sent, received = traffic.sum(axis=1), traffic.sum(axis=0)
    sender, receiver = int(np.argmax(sent)), int(np.argmax(received))
    bound = max(int(plan.sender_bound), int(received[receiver]))
    busiest = max(int(sent[sender]), int(received[receiver]))
    is_sender = int(sent[sender]) >= int(received[receiver])
    name, rank = ranks[receiver]
    found: dict[str, Any] = {
        "id": plan.id.hex(),
        "tensors": len(plan.names),
        "bytes": int(traffic.sum()),
        "pieces": plan.piece_count,
        "hops": sum(plan.hop_count(*key) for key in ranks),
        "links": _links(traffic, ranks),
        "senders": sent.tolist(),
        "receivers": [
            {"instance": n, "rank": r, "bytes": b} for (n, r), b in zip(ranks, received.tolist(), strict=True)
        ],
        "busiest": {"sender": sender, "bytes": int(sent[sender])}
        if is_sender
        else {"instance": name, "rank": rank, "bytes": int(received[receiver])},
        "bound": bound,
        "hosts": _hosts(plan, traffic, ranks),
        "casts": [list(cast) for cast in plan.casts],
    }
    if runs:
        found["runs"] = sum(_run_count(plan, *key) for key in ranks)
    if bytes_per_second:
        found["seconds"] = busiest / bytes_per_second
        found["bound_seconds"] = bound / bytes_per_second
    return found


def _links(traffic: I64, ranks: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return the links with traffic, the busiest first."""
    src, dst = np.nonzero(traffic)
    order = np.lexsort((dst, src, -traffic[src, dst]))
    return [
        {"src": s, "instance": ranks[d][0], "dst": ranks[d][1], "bytes": int(traffic[s, d])}
        for s, d in zip(src[order].tolist(), dst[order].tolist(), strict=True)
    ]


def _hosts(plan: Plan, traffic: I64, ranks: list[tuple[str, int]]) -> dict[str, dict[str, int]]:
    """Return bytes that leave, enter and stay within each host."""
    ends = [plan.reader_hosts[name][rank] for name, rank in ranks]
    found = {h: {"out": 0, "in": 0, "local": 0} for h in sorted({*plan.writer_hosts, *ends})}
    targets = np.array(ends)
    for host, sums in found.items():
        out = np.array([h == host for h in plan.writer_hosts])
        into = targets == host
        sums["local"] = int(traffic[np.ix_(out, into)].sum())
        sums["out"] = int(traffic[out].sum()) - sums["local"]
        sums["in"] = int(traffic[:, into].sum()) - sums["local"]
    return found


def _run_count(plan: Plan, instance: str, rank: int) -> int:
    hops = plan.reader(instance, rank)
    return len(lower(hops.size, [hops.source_stream(), hops.destination_stream()]))
