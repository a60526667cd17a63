"""What the vLLM benchmark found, as a table and as JSON."""

from __future__ import annotations

import datetime as dt
import json
import platform
import statistics
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT = ["dense-small", "moe-small", "fp8-small", "fp8-moe-small", "dense-8.8GB", "fp8-8.8GB", "moe-11.2GB"]
_TIMED = "dense-8.8GB"
"""The case whose figures stand at the top of the JSON."""


def summary(results: dict[str, dict[str, Any]], layout: str, seconds: float) -> dict[str, Any]:
    """Return everything that is written.

    Args:
        results: by case.
        layout: of the run.
        seconds: that it took.
    """
    cases = {name: _case(result) for name, result in results.items()}
    top = cases.get(_TIMED) or next(iter(cases.values()), {})
    return {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["python -m benchmarks.gpu.vllm_live", *_said(sys.argv[1:])]),
        "layout": layout,
        "hardware": _hardware(),
        "versions": {name: _version(name) for name in ("torch", "triton", "vllm", "transformers")}
        | {"python": platform.python_version(), "cuda": torch.version.cuda},
        "seconds": round(seconds, 1),
        "dense_tokens_equal": _tokens(results, "dense-"),
        "moe_tokens_equal": _tokens(results, "moe-"),
        "fp8_tokens_equal": _tokens(results, "fp8-"),
        **{key: top.get(key) for key in _FIGURES},
        "all_equal": all(case["equal"] for case in cases.values()),
        "cases": cases,
        "results": results,
    }


_FIGURES = (
    "sync_ms", "pause_ms", "served_ms", "vllm_ipc_ms", "vllm_nccl_ms", "speedup_ipc", "speedup_nccl",
)  # fmt: skip


_EXPLAINED = """\
Milliseconds are medians over the versions after the first. *sync*: from the call of `publish` (with finished
weights) until the update is committed and post-processed, digests on. *pause*: from the first refused to the
first accepted forward pass, cache reset included. *install*: post-processing of staged layers; *apply*: the
engine's hooks after the commit. *ipc*, *nccl*: vLLM's own backends in the same run, from the start of sending
until `finish_weight_update` returned; of packed and unpacked ipc the faster. Small models run together, and
prove their first version `installed`."""
_FIGURE_COLUMNS = (
    "model", "GB", "tensors", "layers by way", "staging MB", "first sync", "sync", "transfer", "proof",
    "install", "apply", "pause", "vLLM ipc", "ratio", "vLLM nccl", "ratio",
)  # fmt: skip
_CARRIED = ("tensors", "nbytes", "ways", "stages", "arena", "seconds", "join")
_EQUAL_COLUMNS = (
    "model", "versions", "tokens = fresh engine", "logprobs = fresh engine", "live tensors = fresh load",
    "live tensors = vLLM ipc", "answers change",
)  # fmt: skip


def _head(columns: tuple[str, ...]) -> str:
    return "| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns)


def table(found: dict[str, Any]) -> str:
    """Return the text of the Markdown file."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    lines = [
        f"# vLLM on a GPU, {found['layout']}, {found['date']}",
        "",
        f"{found['hardware']}; {versions}. `{found['command']}`, {found['seconds']} s.",
        "",
        _EXPLAINED,
        "",
        _head(_FIGURE_COLUMNS),
    ]
    lines += [_row(name, case) for name, case in found["cases"].items()]
    lines += ["", _head(_EQUAL_COLUMNS)]
    lines += [_equal_row(name, case) for name, case in found["cases"].items()]
    lines += ["", *(f"{name}: {case['error']}" for name, case in found["cases"].items() if case["error"])]
    if found["vllm_nccl_ms"] is None:
        lines += ["vLLM's NCCL backend was not run: it needs two GPUs (`--layout split`)."]
    return "\n".join(lines) + "\n"


def write(found: dict[str, Any], text: str, out: Path) -> None:
    """Write ``OUT.md`` and ``OUT.json``."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(out.name + ".md").write_text(text)
    out.with_name(out.name + ".json").write_text(json.dumps(found, indent=1) + "\n")


def _case(result: dict[str, Any]) -> dict[str, Any]:
    seen = result["versions"]
    later = seen[1:] or seen
    found: dict[str, Any] = {"error": result["error"], "versions": len(seen)}
    found |= {
        key: result.get(key) for key in ("tensors", "nbytes", "ways", "stages", "arena", "seconds", "join")
    }
    found["first_sync_ms"] = seen[0]["syncline"]["sync_ms"] if seen else None
    for key in ("sync_ms", "served_ms", "pause_ms"):
        found[key] = _median([v["syncline"][key] for v in later])
    for phase in ("transfer", "proof", "install", "bind", "plan"):
        ranks = [v["syncline"]["report"]["ranks"][0] for v in later if v["syncline"]["report"]]
        found[f"{phase}_ms"] = _median([1e3 * rank.get(f"{phase}_s", 0.0) for rank in ranks])
    applied = [v["syncline"]["report"]["seconds"]["apply"] for v in later if v["syncline"]["report"]]
    found["apply_ms"] = _median([1e3 * seconds for seconds in applied])
    for name in ("ipc", "nccl"):
        own = [v[name] for v in later if name in v]
        best = [x for x in ([o["sync_ms"] for o in own if o["packed"] is p] for p in (True, False)) if x]
        found[f"vllm_{name}_ms"] = min(map(statistics.median, best)) if best else None
        found[f"vllm_{name}_pause_ms"] = _median([o["pause_ms"] for o in own])
        theirs = found[f"vllm_{name}_ms"]
        found[f"speedup_{name}"] = theirs / found["sync_ms"] if theirs and found["sync_ms"] else None
    found["tokens_equal"] = _all(seen, "tokens_equal")
    found["logprobs_equal"] = _all(seen, "logprobs_equal")
    found["live_equal"] = _all(seen, "live_equal")
    found["answers_differ"] = result.get("answers_differ")
    beside = [v["ipc"] for v in seen if "ipc" in v]
    found["ipc_live_equal"] = all(not o["differ"] for o in beside) if beside else None
    found["ipc_tokens_equal"] = all(o["tokens_equal"] for o in beside) if beside else None
    checks = ("tokens_equal", "logprobs_equal", "live_equal", "ipc_live_equal", "ipc_tokens_equal")
    found["equal"] = result["error"] is None and bool(seen) and all(found[c] is not False for c in checks)
    return found


def _row(name: str, case: dict[str, Any]) -> str:
    ways = ", ".join(f"{count} {way}" for way, count in (case["ways"] or {}).items() if count)
    size = "-" if case["nbytes"] is None else f"{case['nbytes'] / 1e9:.2f}"
    staged = "-" if case["arena"] is None else f"{case['arena'] / 1e6:.0f}"
    cells = [name, size, case["tensors"] or "-", ways or "-", staged]
    keys = ("first_sync_ms", "sync_ms", "transfer_ms", "proof_ms", "install_ms")
    keys += ("apply_ms", "pause_ms", "vllm_ipc_ms")
    cells += [_number(case[key]) for key in keys]
    cells += [_number(case["speedup_ipc"]), _number(case["vllm_nccl_ms"]), _number(case["speedup_nccl"])]
    return "| " + " | ".join(map(str, cells)) + " |"


def _equal_row(name: str, case: dict[str, Any]) -> str:
    keys = ("tokens_equal", "logprobs_equal", "live_equal", "ipc_live_equal", "answers_differ")
    said = {True: "yes", False: "NO", None: "not compared"}
    return "| " + " | ".join([name, str(case["versions"]), *(said[case[key]] for key in keys)]) + " |"


def _tokens(results: dict[str, dict[str, Any]], kind: str) -> bool | None:
    """Whether all fresh engines of a kind said the same; None: none was started."""
    known = [
        version["tokens_equal"]
        for name, result in results.items()
        if name.startswith(kind)
        for version in result["versions"]
        if "tokens_equal" in version
    ]
    return all(known) if known else None


def _all(seen: list[dict[str, Any]], key: str) -> bool | None:
    known = [version[key] for version in seen if key in version]
    return all(known) if known else None


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _said(arguments: list[str]) -> list[str]:
    """Return the arguments that say what is run: not where on this machine things are put."""
    places = {"--out", "--logs", "--work"}
    return [x for i, x in enumerate(arguments) if x not in places and arguments[max(i - 1, 0)] not in places]


def _hardware() -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"
