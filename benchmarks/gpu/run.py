"""The GPU data plane against one large copy: ``python -m benchmarks.gpu.run [--part P] [--quick] [--out D]``.

First every kernel and transport is compared with the CPU reference, then timed. Times are wall-clock
medians from idle GPUs to idle GPUs. A ratio is the time that one large copy of as many bytes takes in the
same run, over ours. With two GPUs the writer is on GPU 0 and the reader on the last; with one, what needs
two is left out.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import awex, clock, exact, fragments, messages, polite
from benchmarks.gpu.resharding import Update

SIZES = {"4k": 4 << 10, "16k": 16 << 10, "64k": 64 << 10, "1m": 1 << 20}


PARTS = ("check", "fragments", "updates", "polite", "nccl", "awex")


class Report:
    """Figures by name, and the lines of the table."""

    def __init__(self) -> None:
        self.part = "all"
        self.figures: dict[str, Any] = {}
        self.lines: list[tuple[str, str, str, str, str]] = []
        self.began = time.monotonic()

    def line(self, what: str, limit: float, ours: float, nbytes: float, others: str = "") -> float:
        """Add a line: seconds of the limit and ours; return the ratio."""
        ratio = limit / ours
        rate = f"{ours * 1e3:.2f} ms, {nbytes / ours / 1e9:.0f} GB/s"
        self.lines.append((what, f"{limit * 1e3:.2f} ms", rate, f"{ratio:.3f}", others))
        print(
            f"[{time.monotonic() - self.began:6.1f} s] {what}: {rate}, ratio {ratio:.3f} {others}", flush=True
        )
        return ratio

    def note(self, **figures: Any) -> None:
        """Keep figures, and print them."""
        self.figures |= figures
        print(f"[{time.monotonic() - self.began:6.1f} s] {figures}", flush=True)


def check(report: Report, *, quick: bool) -> None:
    """Compare everything with the reference."""
    wrong = exact.kernels(5 if quick else 20) + exact.transports(4 if quick else 12)
    good = sum(not one for one in wrong)
    report.note(bit_exact=good, cases=len(wrong), wrong=sorted({one for one in wrong if one}))
    print(f"bit-exact: {good} of {len(wrong)} cases", flush=True)


class Limits:
    """What one large copy does, between GPUs and within one; and the buffers it is measured with."""

    def __init__(self, report: Report, peer: int, own: int) -> None:
        clock.reachable()
        self.src = torch.empty(fragments.TOTAL, dtype=torch.uint8, device=f"cuda:{peer}").random_()
        self.near = torch.empty(fragments.TOTAL, dtype=torch.uint8, device=f"cuda:{own}").random_()
        self.dst = torch.zeros(fragments.TOTAL, dtype=torch.uint8, device=f"cuda:{own}")
        torch.cuda.set_device(own)
        self.peer = fragments.TOTAL / clock.median(lambda: self.dst.copy_(self.src))
        self.local = fragments.TOTAL / clock.median(lambda: self.dst.copy_(self.near))
        report.note(peer_copy_gbs=self.peer / 1e9, local_copy_gbs=self.local / 1e9)

    def free(self) -> None:
        """Give the buffers back."""
        del self.src, self.near, self.dst
        torch.cuda.empty_cache()


def small(report: Report, limits: Limits) -> None:
    """Fragments of each size, and quantisation."""
    for name, size in SIZES.items():
        found = fragments.measure(size, limits.src, limits.dst)
        limit = fragments.TOTAL / limits.peer
        others = f"a copy each {found['copies_gbs']:.1f} GB/s"
        ratio = report.line(f"fragments {name}", limit, found["ours"], fragments.TOTAL, others)
        report.line(f"fragments {name}, digest", limit, found["digest"], fragments.TOTAL)
        few = report.line(f"fragments {name}, 24 SMs", limit, found["few"], fragments.TOTAL)
        report.note(**{f"frag_{name}_ratio": ratio, f"frag_{name}_polite_ratio": few})
        near = fragments.measure(size, limits.near, limits.dst)
        limit = fragments.TOTAL / limits.local
        ratio = report.line(f"fragments {name}, one GPU", limit, near["ours"], fragments.TOTAL)
        report.line(f"fragments {name}, one GPU, digest", limit, near["digest"], fragments.TOTAL)
        report.note(**{f"frag_{name}_colocated_ratio": ratio})
    limits.near.view(torch.bfloat16).normal_()
    seconds, elements = fragments.fp8(limits.near, limits.dst)
    # a copy of n bytes moves 2 n through memory; quantising moves 3 bytes an element
    report.note(
        fp8_ratio=report.line(
            "bf16 to fp8 with scales, one GPU", 1.5 * elements / limits.local, seconds, 2 * elements
        )
    )


def update(report: Report, name: str, made: Update, rate: float, source_bytes: float) -> dict[str, float]:
    """Time one resharding; return its figures."""
    limit = source_bytes / rate
    plain, digest = made.seconds(), made.seconds(digest=True)
    ratio = report.line(name, limit, plain, source_bytes)
    report.line(f"{name}, digest", limit, digest, source_bytes)
    kernels = made.plain()
    back = made.read_back()
    again = made.installed()
    proved, source = made.proved()
    found = {
        "ratio": ratio,
        "digest_overhead": digest / plain - 1,
        "kernels_ratio": limit / kernels,
        "installed_overhead": back / kernels - 1,
        "installed_apart_overhead": again / plain,
        "source_digest_s": source,
        "proved": proved,
        "bytes": made.nbytes,
        "seconds": plain,
        "hops": made.program.hops,
        "launches": made.program.launches,
        "host_ms": made.host_ms(),
        "table_mib": made.program.table_bytes / 2**20,
        "regions": made.regions,
        "connect_s": made.connect_s,
        "link_s": made.link_s,
        "bind_s": made.bind_s,
        "rebind_ms": 1e3 * made.rebind_s,
        "compile_s": made.compile_s,
        "plan_s": made.plan_s,
    }
    report.note(**{name: found})
    return found


def copy_each(made: Update) -> float:
    """Return GB/s of a ``copy_`` a hop, on as many hops as the update's first storages take."""
    count = 2048
    rows = [(int(made.hops.nbytes[h]) // 2) for h in range(min(count, len(made.hops)))]
    device = made.transport.device
    other = (device + 1) % torch.cuda.device_count()
    src = [torch.empty(n, dtype=torch.bfloat16, device=f"cuda:{other}") for n in rows]
    dst = [torch.empty(n, dtype=torch.bfloat16, device=f"cuda:{device}") for n in rows]

    def run() -> None:
        for to, at in zip(dst, src, strict=True):
            to.copy_(at, non_blocking=True)

    return 2 * sum(rows) / clock.median(run, 3) / 1e9


def beside(report: Report, limits: Limits, made: Update) -> None:
    """Run updates without a pause beside a neighbour's steps on the receiving GPU."""
    for kind in ("decode", "train"):
        for sms in (24, 8, None):
            slower, seconds = polite.beside(kind, lambda: made.pull(sms=sms))  # noqa: B023 - used at once
            ratio = made.nbytes / limits.peer / seconds
            report.note(**{f"polite_{kind}_{sms or 'all'}": {"slowdown": slower, "ratio": ratio}})
    beside = [report.figures[f"polite_{kind}_24"] for kind in ("decode", "train")]
    report.note(
        polite_ratio=min(b["ratio"] for b in beside), polite_slowdown=max(b["slowdown"] for b in beside)
    )


def resharding(report: Report, limits: Limits, last: int, *, quick: bool, neighbours: bool) -> None:
    """Qwen3-30B-A3B between GPUs, with a cast, and within one."""
    layers = 6 if quick else 48
    if last:
        made = Update(0, last, layers)
        found = update(report, "qwen3_30b tp2", made, limits.peer, made.nbytes)
        each = copy_each(made)
        report.note(
            qwen3_30b_ratio=found["ratio"],
            digest_overhead=found["digest_overhead"],
            installed_overhead=found["installed_overhead"],
            connect_s=found["connect_s"],
            connect_tensors=sum(o[4] for o in made.offer),
            connect_gb=made.trainer_bytes / 1e9,
            launches_per_peer=found["launches"],
            host_ms_per_update=found["host_ms"],
            copy_each_gbs=each,
        )
        few = made.seconds(sms=24)
        report.line("qwen3_30b tp2, 24 SMs", made.nbytes / limits.peer, few, made.nbytes)
        if neighbours:
            beside(report, limits, made)
        made.close()
        made = Update(0, last, max(4, layers // 4), tp=4)
        update(report, "qwen3_30b tp4", made, limits.peer, made.nbytes)
        made.close()
        made = Update(0, last, max(4, layers // 4), dtypes=("float32", "bfloat16"))
        found = update(report, "qwen3_30b fp32 to bf16", made, limits.peer, 2 * made.nbytes)
        report.note(cast_ratio=found["ratio"])
        made.close()
    made = Update(last, last, max(4, layers // 4))
    found = update(report, "qwen3_30b one GPU", made, limits.local, made.nbytes)
    report.note(colocated_ratio=found["ratio"], colocated_digest_overhead=found["digest_overhead"])
    made.close()


def nccl(report: Report, last: int, *, quick: bool) -> None:
    """Our messages beside one large one, and a message a tensor."""
    wrong = messages.exact(2 if quick else 6, 0, last)
    good = sum(not one for one in wrong)
    report.note(nccl_bit_exact=good, nccl_cases=len(wrong), nccl_wrong=sorted({one for one in wrong if one}))
    with tempfile.TemporaryDirectory() as directory:
        one, each = fragments.nccl(1024, 3 << 20, f"{directory}/out", 29533)
        _, tiny = fragments.nccl(4096, 64 << 10, f"{directory}/out", 29534)
    report.note(nccl_single_gbs=one, nccl_3m_messages_gbs=each, nccl_64k_messages_gbs=tiny)
    made = messages.Messages(0, last)
    made.made(("qwen", 4 if quick else 16, 2, "bfloat16", "bfloat16"))
    report.note(nccl_proved=not made.wrong())
    plain, digest = made.seconds(), made.seconds(digest=True)
    others = f"a message a tensor of 3 MiB {each:.1f} GB/s"
    ratio = report.line("qwen3_30b tp2, nccl", made.nbytes / one / 1e9, plain, made.nbytes, others)
    report.line("qwen3_30b tp2, nccl, digest", made.nbytes / one / 1e9, digest, made.nbytes)
    report.note(
        nccl_ratio=ratio,
        nccl_gbs=made.nbytes / plain / 1e9,
        nccl_digest_overhead=digest / plain - 1,
        nccl_connect_s=made.connect_s,
        nccl_bucket_mib=made.program.staged_bytes / 2**20,
    )
    made.done()
    made.close()


def beside_awex(report: Report, last: int, *, quick: bool) -> None:
    """Awex's path over NCCL beside ours over cuda_ipc, each for experts of the same shapes."""
    if not awex.found():
        report.note(awex="not installed")
        return
    layers = 4 if quick else 8
    made = Update(0, last, layers)
    ours = made.nbytes / made.seconds() / 1e9
    made.close()
    with tempfile.TemporaryDirectory() as directory:
        theirs = awex.measure(layers, f"{directory}/out", 29535)
    report.note(awex_gbs=theirs, awex_beside_gbs=ours, awex_speedup=ours / theirs)


def _arguments() -> str:
    """Return what this was called with, the place of the results left out."""
    kept = [a for a in sys.argv[1:] if "/" not in a and a != "--out"]
    return "".join(f" {a}" for a in kept)


def versions() -> dict[str, str]:
    """Return what this ran on."""
    import triton  # noqa: PLC0415 - only where there is one

    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "gpus": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "command": "python -m benchmarks.gpu.run" + _arguments(),
    }


def text(report: Report) -> str:
    """Return the report as Markdown."""
    v = {k: report.figures[k] for k in versions()}
    checked = (
        "bit-exact: {bit_exact} of {cases} cases"
        if "cases" in report.figures
        else "bits: not part of this run"
    )
    out = [
        f"# GPU data plane, {v['date']}",
        "",
        f"{v['gpus']}, torch {v['torch']}, Triton {v['triton']}, CUDA {v['cuda']}, Python {v['python']}.",
        f"`{v['command']}`",
        "",
        checked.format_map(report.figures),
        "",
        "| what | limit: one large copy | ours | ratio | others |",
        "| --- | --- | --- | --- | --- |",
        *(f"| {' | '.join(line)} |" for line in report.lines),
        "",
        "| figure | measured |",
        "| --- | --- |",
        *(
            f"| {k} | {_short(v)} |"
            for k, v in report.figures.items()
            if not isinstance(v, str | dict | list)
        ),
        *(
            f"| {name}: {k} | {_short(v)} |"
            for name, found in report.figures.items()
            if isinstance(found, dict)
            for k, v in found.items()
        ),
        "",
    ]
    return "\n".join(out)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def save(report: Report, directory: str) -> None:
    """Write what is known so far."""
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    part = "" if report.part == "all" else f"{report.part}-"
    name = f"gpu-{part}{report.figures['date']}"
    (place / f"{name}.json").write_text(json.dumps(report.figures, indent=1) + "\n", encoding="utf-8")
    (place / f"{name}.md").write_text(text(report), encoding="utf-8")


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description="the GPU data plane against one large copy")
    parser.add_argument("--quick", action="store_true", help="fewer cases and layers: to see that it runs")
    parser.add_argument("--part", choices=("all", *PARTS), default="all", help="one part alone")
    parser.add_argument("--out", default="benchmarks/results", help="where the results go")
    options = parser.parse_args()
    report = Report()
    report.figures |= versions()
    last = torch.cuda.device_count() - 1
    report.part = options.part
    parts = PARTS if options.part == "all" else (options.part,)
    if "check" in parts:
        check(report, quick=options.quick)
        save(report, options.out)
    if {"fragments", "updates", "polite"} & set(parts):
        limits = Limits(report, 0, last)
        if "fragments" in parts:
            small(report, limits)
            save(report, options.out)
        limits.free()
        if {"updates", "polite"} & set(parts):
            resharding(report, limits, last, quick=options.quick, neighbours="polite" in parts)
            save(report, options.out)
    if last and "nccl" in parts:
        nccl(report, last, quick=options.quick)
        save(report, options.out)
    if last and "awex" in parts:
        beside_awex(report, last, quick=options.quick)
        save(report, options.out)
    print(text(report))
    figures = report.figures
    good = figures.get("bit_exact") == figures.get("cases") and not figures.get("nccl_wrong")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
