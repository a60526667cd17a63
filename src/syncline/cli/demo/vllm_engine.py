"""One inference instance of the demo: vLLM, in this process and, where it is cut, in workers of its own.

python -m syncline.cli.demo.vllm_engine MODEL_DIRECTORY INSTANCE WORLD JOB
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

import torch

from syncline.adapters.vllm import BACKEND, VLLMInstance
from syncline.adapters.vllm.upstream import upstream
from syncline.cli.demo import lesson
from syncline.cli.demo.wire import Events, commands
from syncline.errors import DeadlineError
from syncline.meta import MetaClient
from syncline.options import Options
from syncline.protocol import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncline.protocol.ids import VersionKey

_LOOK = 0.01  # seconds between two questions for a new version
_CACHE_BYTES = 64 << 20
_TABLE = "weights"


def main() -> None:
    """Serve one instance until told to stop, and end at once: vLLM's modules may hang at exit."""
    code = 0
    try:
        _serve(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(directory: str, instance: str, world: str, job: str) -> None:
    torch.set_num_threads(1)
    events = Events()
    try:
        llm = _start(directory, int(world))
    except Exception as error:
        events.tell("started", refused=f"{type(error).__name__}: {error}")
        traceback.print_exc()
        next((c for c in commands() if c["do"] == "stop"), None)
        return
    events.tell("started", refused=None)
    try:
        with VLLMInstance(llm, instance=instance, job=job, table=_TABLE) as driven:
            _Process(llm, driven, events, job).serve()
    finally:
        llm.llm_engine.engine_core.shutdown()


def _start(directory: str, world: int) -> Any:
    return upstream("entrypoints.llm").LLM(
        model=directory,
        dtype="float32",  # so that differently cut instances round to the same tokens
        tensor_parallel_size=world,
        max_model_len=256,
        max_num_seqs=1,
        kv_cache_memory_bytes=_CACHE_BYTES,
        seed=0,
        enforce_eager=True,
        weight_transfer_config={"backend": BACKEND},
        worker_extension_cls="syncline.cli.demo.vllm_rank.DemoRank",
    )


class _Process:
    def __init__(self, llm: Any, instance: VLLMInstance, events: Events, job: str) -> None:
        self._llm, self._instance, self._events, self._job = llm, instance, events, job

    def serve(self) -> None:
        """Do what is asked, one thing after the other, until told to stop."""
        self._events.tell("ready")
        for command in commands():
            do = command.pop("do")
            if do == "stop":
                return
            told = getattr(self, f"do_{do}")(**command)
            self._events.tell(do, **told)

    def do_answer(self) -> dict[str, Any]:
        """Answer the lesson's question."""
        wanted = upstream("sampling_params").SamplingParams(temperature=0, max_tokens=lesson.MAX_NEW_TOKENS)
        (done,) = self._llm.chat(lesson.chat(lesson.QUESTION), wanted, use_tqdm=False)
        return {"text": done.outputs[0].text, "version": str(self._instance.committed)}

    def do_memcpy(self, at: float) -> dict[str, Any]:
        """Time a memcpy in all workers at once; the slowest counts."""
        copies = self._ranks("demo_memcpy", at)
        return {
            "seconds": max(copy["seconds"] for copy in copies),
            "nbytes": sum(c["nbytes"] for c in copies),
        }

    def do_follow(self, steps: int) -> dict[str, Any]:
        """Receive so many versions, each as soon as there is one."""
        for key in self._versions(steps):
            self._instance.update(key.number)
            self._events.tell("updated", report=self._ranks("demo_report")[0])
        return {}

    def do_effective(self, checkpoint: str) -> dict[str, Any]:
        """Compare every live tensor of every worker with vLLM's own load of a checkpoint."""
        return {"ranks": self._ranks("demo_effective", checkpoint)}

    def do_dump(self, directory: str, instance: str) -> dict[str, Any]:
        """Write every worker's live tensors."""
        self._ranks("demo_dump", directory, instance)
        return {}

    def _ranks(self, what: str, *arguments: object) -> list[Any]:
        return self._llm.collective_rpc(what, args=arguments)

    def _versions(self, count: int) -> Iterator[VersionKey]:
        """Yield versions as they can be had: until then, vLLM is free to answer."""
        options = Options.from_environment()
        last: VersionKey | None = None
        with MetaClient(self._job, options) as meta:
            for _ in range(count):
                until = time.monotonic() + options.update_timeout
                while (key := _newer(meta, last)) is None:
                    if time.monotonic() > until:
                        raise DeadlineError("no new version came", expected=f"{count} versions", found=last)
                    time.sleep(_LOOK)
                yield (last := key)


def _newer(meta: MetaClient, last: VersionKey | None) -> VersionKey | None:
    """Return the oldest version that can be had and is newer than the last one."""
    status: m.Status = meta.request(m.StatusQuery(_TABLE))
    sealed = [v.key for t in status.tables for v in t.versions if v.state == "SEALED" and not v.closed]
    return min((key for key in sealed if last is None or key > last), default=None)


if __name__ == "__main__":
    main()
