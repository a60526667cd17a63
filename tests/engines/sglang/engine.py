"""SGLang on a CPU: how the tests start an engine, and what they read from it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engines.checkpoints import PROMPTS

HERE = Path(__file__).parent
STANDIN = HERE / "cpu_standin"
ROOT = HERE.parents[2]
TOKENS = 12


def environment(ranks: int, run: Path) -> dict[str, str]:
    """Return the environment of a process that runs SGLang on this machine's cores."""
    paths = [str(STANDIN), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in range(ranks)),
        "SGLANG_NCCL_SO_PATH": "/nonexistent",  # else two schedulers load NCCL, which finds no GPU
        "TORCHDYNAMO_DISABLE": "1",  # compiling a router takes a minute
        "HF_HUB_OFFLINE": "1",
        "SYNCLINE_RUN_DIR": str(run),
        "XDG_CACHE_HOME": str(run / "cache"),  # where it is remembered which layouts stood the twin check
    }


def spawn(command: list[str], environ: dict[str, str], log: Path, seconds: float) -> None:
    """Run a command to its end, or until it is late; nothing that it started outlives it."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            file.write(f"\nended after {seconds:g} s\n")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_radix_cache": True,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.5,  # of what is free; others may take some meanwhile
    "max_total_tokens": 1024,
    "skip_server_warmup": True,
    "log_level": "error",
}


def start(directory: Path | str, ranks: int = 1, *, dtype: str = "bfloat16", **more: Any) -> Any:
    """Start an engine in this process, which runs under `environment`; its schedulers get their own."""
    import sglang  # noqa: PLC0415 (tens of seconds, and only where it is installed)

    arguments = ARGUMENTS | {"custom_weight_loader": ["sglang_poison.fill", "sglang_probe.run"]} | more
    return sglang.Engine(model_path=str(directory), dtype=dtype, tp_size=ranks, **arguments)


def answers(engine: Any, prompts: tuple[str, ...] = PROMPTS) -> list[dict[str, Any]]:
    """Return greedy tokens of each prompt, with log-probabilities and the version that they carry."""
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    found = []
    for prompt in prompts:  # one by one: sums in a batch depend on its size
        out = engine.generate(prompt, sampling, return_logprob=True, top_logprobs_num=4, logprob_start_len=0)
        meta = out["meta_info"]
        found.append(
            {
                "tokens": list(out["output_ids"]),
                "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
                "top": [[(entry[0], entry[1]) for entry in step] for step in meta["output_top_logprobs"]],
                "version": meta.get("weight_version"),
            }
        )
    return found


def poison(engine: Any, names: list[str]) -> None:
    """Fill live tensors of every rank with NaN."""
    _session(engine, names, "sglang_poison.fill")


def probe(engine: Any, directory: Path) -> None:
    """Let every rank write into a directory what the coordinate probe finds."""
    _session(engine, [str(directory)], "sglang_probe.run")


def _session(engine: Any, names: list[str], loader: str) -> None:
    """Call a custom loader in every rank, by SGLang's own weight-update session."""
    import torch  # noqa: PLC0415

    done = [
        engine.begin_weight_update(),
        engine.update_weights_from_tensor([(name, torch.zeros(1)) for name in names], load_format=loader),
        engine.end_weight_update(),
    ]
    if not all(success for success, _ in done):
        raise RuntimeError(f"{loader} failed: {done}")


def say(text: str) -> None:
    """Print a line at once: the parent reads it, and sees where a run stands."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
