"""One engine process of the vLLM benchmark: updated by syncline or by vLLM's own backends, or fresh.

python -m benchmarks.gpu.vllm_engine ROLE CASE DEVICE MODEL_DIRECTORY JOB DIRECTORY

Roles: ``syncline``, ``ipc``, ``nccl``, ``fresh``. ``vllm`` runs in this process, on CUDA graphs.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from hashlib import blake2b
from multiprocessing.connection import Client
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu import vllm_models as models
from benchmarks.gpu.vllm_wire import GROUP_PORT, only_in_ray, secret
from syncline.adapters.vllm import BACKEND, VLLMInstance, register
from syncline.adapters.vllm.leaves import content
from syncline.adapters.vllm.upstream import upstream
from syncline.cli.demo.wire import Events, commands
from syncline.errors import DeadlineError
from syncline.meta import MetaClient
from syncline.options import Options
from syncline.protocol import messages as m

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_CACHE_BYTES = 1 << 30
_SHARE = 0.15  # of the device's memory that vLLM asks to be free
_LOOK = 0.0005  # seconds between two questions for a new version
_CONNECT = 120.0


def main() -> None:
    """Serve until told to stop, and end at once: vLLM's modules may hang at exit."""
    code = 0
    try:
        role, case, where, model, job, directory = sys.argv[1:]
        kind = {"syncline": _Synced, "ipc": _ByIpc, "nccl": _ByNccl, "fresh": _Engine}[role]
        kind(role, models.CASES[case], where, Path(model), job, Path(directory)).serve()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class LiveRank:
    """vLLM's ``worker_extension_cls``; ``self`` is a vLLM worker."""

    model_runner: Any
    weight_transfer_engine: Any

    def live_sums(self) -> dict[str, list[Any]]:
        """Return every parameter and buffer as its shape, dtype and two sums over its bits."""
        found: dict[str, torch.Tensor] = dict(self.model_runner.get_model().named_parameters())
        found |= dict(self.model_runner.get_model().named_buffers())
        return {name: [str(part) for part in _bits(tensor)] for name, tensor in found.items()}

    def sync_report(self) -> dict[str, Any] | None:
        """Return syncline's report of the last update."""
        report = self.weight_transfer_engine.report
        return None if report is None else report.as_dict()

    def learned(self) -> dict[str, Any]:
        """Return how many layers syncline puts in which way, and the staging memory for that in bytes."""
        adapter = self.weight_transfer_engine.adapter
        return {
            "ways": adapter.ways,
            "arena": adapter.layout.plan.arena_nbytes,
            "stages": len(adapter.stages),
        }


def _bits(tensor: torch.Tensor) -> tuple[object, ...]:
    found = content(tensor)
    return tuple(blake2b(part).hexdigest() if isinstance(part, bytes) else part for part in found)


class _Engine:
    """A fresh engine: it answers."""

    def __init__(
        self, role: str, case: models.Case, where: str, model: Path, job: str, directory: Path
    ) -> None:
        torch.set_num_threads(4)
        self.case, self.job, self.directory = case, job, directory
        self.events = Events()
        began = time.monotonic()
        if torch.cuda.is_available():
            torch.cuda.set_device(torch.device(where))
        self.llm = _started(role, case, model)
        self.began = time.monotonic() - began

    def serve(self) -> None:
        """Do what is asked, one thing after the other."""
        self.events.tell("ready", seconds=self.began, **self.join())
        for command in commands():
            do = command.pop("do")
            if do == "stop":
                return
            self.events.tell(do, **getattr(self, do)(**command))

    def join(self) -> dict[str, Any]:
        """Meet the trainer, if that is wanted."""
        return {}

    def answer(self) -> dict[str, Any]:
        """Return greedy tokens and their logarithmic probabilities."""
        wanted = upstream("sampling_params").SamplingParams(
            temperature=0, max_tokens=models.TOKENS, ignore_eos=True, detokenize=False, logprobs=1
        )
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in models.prompts(self.case)]
        done = self.llm.generate(prompts, wanted, use_tqdm=False)
        said = [one.outputs[0] for one in done]
        return {
            "tokens": [list(one.token_ids) for one in said],
            "logprobs": [
                [step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)]
                for one in said
            ],
        }

    def sums(self) -> dict[str, Any]:
        """Return what stands in every live tensor."""
        return {"tensors": self.llm.collective_rpc("live_sums")[0]}

    def _updated(self, began: float, loaded: float) -> dict[str, Any]:
        """Return the clock of an update: paused, loaded, accepting again; the same clock in every process."""
        return {"paused": began, "loaded": loaded, "accepting": time.monotonic()}

    def _paused(self) -> float:
        began = time.monotonic()
        self.llm.sleep(level=0, mode="keep")
        return began

    def _resume(self) -> None:
        self.llm.reset_prefix_cache(reset_running_requests=True)
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()
        self.llm.wake_up(tags=["scheduling"])


class _Synced(_Engine):
    def join(self) -> dict[str, Any]:
        began = time.monotonic()
        self.instance = VLLMInstance(self.llm, instance="a", job=self.job, twin_check=self.case.fresh)
        self.meta = MetaClient(self.job, Options.from_environment())
        return {"join": time.monotonic() - began, **self.llm.collective_rpc("learned")[0]}

    def follow(self, number: int, verify: Any) -> dict[str, Any]:
        """Receive a version as soon as there is one."""
        until = time.monotonic() + _CONNECT
        while not _published(self.meta, number):
            if time.monotonic() > until:
                raise DeadlineError("the version did not come", expected=number)
            time.sleep(_LOOK)
        began = time.monotonic()
        report = self.instance.update(number, verify=verify)
        ended = time.monotonic()
        loaded = began + report.seconds["pause"] + report.seconds["update"]
        return {
            "paused": began,
            "loaded": loaded,
            "accepting": ended,
            "seconds": dict(report.seconds),
            "report": self.llm.collective_rpc("sync_report")[0],
        }

    def effective(self, checkpoint: str) -> dict[str, Any]:
        """Compare every live tensor with vLLM's own load of a checkpoint; raises if one differs."""
        self.instance.check_effective(checkpoint)
        return {}


class _ByIpc(_Engine):
    def join(self) -> dict[str, Any]:
        address, until = str(self.directory / "ipc.sock"), time.monotonic() + _CONNECT
        self.llm.init_weight_transfer_engine({"init_info": {}})
        while True:
            try:
                self.connection: Connection = Client(address, "AF_UNIX", authkey=secret(self.directory))
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
            else:
                return {}

    def receive(self) -> dict[str, Any]:
        """Take what the trainer sends by vLLM's CUDA-IPC backend."""
        info = self.connection.recv()
        began = self._paused()
        self.llm.start_weight_update()
        while info is not None:
            self.llm.update_weights({"update_info": info})
            self.connection.send(True)
            info = self.connection.recv()
        self.llm.finish_weight_update()
        loaded = time.monotonic()
        self._resume()
        self.connection.send(True)
        return self._updated(began, loaded)


class _ByNccl(_Engine):
    def meet(self) -> dict[str, Any]:
        """Meet the trainer in a group of vLLM's."""
        place = {
            "master_address": "127.0.0.1",
            "master_port": GROUP_PORT,
            "rank_offset": 1,
            "world_size": 2,
        }
        self.llm.init_weight_transfer_engine({"init_info": place})
        return {}

    def receive(self, listed: dict[str, Any]) -> dict[str, Any]:
        """Take what the trainer sends by vLLM's NCCL backend, packed."""
        began = self._paused()
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {**listed, "packed": True}})
        self.llm.finish_weight_update()
        loaded = time.monotonic()
        self._resume()
        return self._updated(began, loaded)


def _published(meta: MetaClient, number: int) -> bool:
    status: m.Status = meta.request(m.StatusQuery("weights"))
    return any(v.key.number == number and v.state == "SEALED" for t in status.tables for v in t.versions)


def _started(role: str, case: models.Case, model: Path) -> Any:
    backend = {"syncline": BACKEND, "ipc": "ipc", "nccl": "nccl"}.get(role)
    if role == "ipc":
        only_in_ray()
    register()
    options: dict[str, Any] = {} if backend is None else {"weight_transfer_config": {"backend": backend}}
    if case.quantisation is not None:
        options["quantization"] = case.quantisation
    if torch.cuda.is_available():
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    else:
        options["enforce_eager"] = True
    filled = any(model.glob("*.safetensors"))
    return upstream("entrypoints.llm").LLM(
        model=str(model),
        load_format="auto" if filled else "dummy",
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=8,
        gpu_memory_utilization=_SHARE,
        kv_cache_memory_bytes=_CACHE_BYTES,
        skip_tokenizer_init=True,
        seed=0,
        worker_extension_cls="benchmarks.gpu.vllm_engine.LiveRank",
        **options,
    )


if __name__ == "__main__":
    main()
