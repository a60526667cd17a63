"""In each scheduler process of an SGLang engine: what answers the commands of the instance's user.

A command reaches every rank by SGLang's own way for weight updates. The scheduler's thread stops in
`Host.answer` and serves errands while a thread of ours does the work: the controller (`WeightReader`) on
rank 0, the data (`WorkerWeightsReader`) on each rank. No exception leaves it: one would end the engine.
"""

from __future__ import annotations

import logging
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from syncline.adapters import checked
from syncline.adapters import checkpoint as specs
from syncline.adapters.sglang import commands as c
from syncline.adapters.sglang.adapter import SGLangAdapter
from syncline.adapters.sglang.errands import Errands
from syncline.adapters.sglang.gather import gather
from syncline.adapters.sglang.srt import srt
from syncline.adapters.sglang.tensors import slots, values
from syncline.errors import AdapterError, ProtocolError, SynclineError, to_wire
from syncline.layout import Rules
from syncline.options import Options
from syncline.store.reader import WeightReader
from syncline.store.worker import WorkerWeightsReader

logger = logging.getLogger(__name__)


class Host:
    """Answers commands in one scheduler process.

    Args:
        manager: SGLang's ``SchedulerWeightUpdaterManager``: what it needs to reach the models, the group of
            all ranks, and the caches.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._errands = Errands()
        self._adapter: SGLangAdapter | None = None
        self._reader: WeightReader | None = None
        self._worker: WorkerWeightsReader | None = None

    @property
    def rank(self) -> int:
        """Rank of this process in the engine."""
        return torch.distributed.get_rank(self._manager.tp_cpu_group)

    @property
    def world(self) -> int:
        """Number of the engine's ranks."""
        return torch.distributed.get_world_size(self._manager.tp_cpu_group)

    def answer(self, payload: bytes) -> tuple[bool, str]:
        """Obey a command on this rank, together with all others; called in the scheduler's thread.

        Returns:
            Whether it went well on every rank, and rank 0's `commands.Reply` as JSON.
        """
        reply = self._errands.serve(lambda: self._obey(payload))
        held = self._adapter is not None and self._adapter.held
        reply = msgspec.structs.replace(reply, hold=held)
        return reply.error is None, c.encode(reply).decode()

    # ------------------------------------------------------------------------------------ in a thread of ours

    def _obey(self, payload: bytes) -> c.Reply:
        """Run a command in two steps that all ranks take together: what may refuse, then what acts."""
        command: c.Command | None = None
        try:
            command = c.decode_command(payload)
            refusal = None
            self._errands.run(lambda: self._prepare(command))
        except Exception as error:
            refusal = _failed(error)
        first = self._agree(refusal or c.Reply())
        if first.error is not None or command is None:
            return first
        try:
            reply = self._act(command)
        except Exception as error:
            logger.warning("rank %d: %s failed", self.rank, type(command).__name__, exc_info=True)
            reply = _failed(error)
        agreed = self._agree(reply)
        return self._conclude(command, agreed)

    def _agree(self, mine: c.Reply) -> c.Reply:
        """Return rank 0's reply, or the first error of any rank; results of all ranks come as a list."""
        replies = [c.decode_reply(text) for text in gather(self._manager.tp_cpu_group, c.encode(mine))]
        failed = next((reply for reply in replies if reply.error is not None), None)
        if failed is not None:
            return c.Reply(failed.error, failed.notes)
        return c.Reply(result=[reply.result for reply in replies])

    def _prepare(self, command: c.Command) -> None:
        """Refuse what cannot be done now; in the scheduler's thread, before anything is touched."""
        if isinstance(command, c.Join):
            self._check_joinable(command)
            self._check_updatable()
        if isinstance(command, c.Update):
            self._check_updatable()
            self._check_still()
        if isinstance(command, c.Update | c.Describe | c.Effective) and self._adapter is None:
            raise ProtocolError(
                "this engine has not joined a job", hint="make a SGLangInstance for it, which does"
            )
        device = getattr(torch, torch.device(self._manager.tp_worker.model_runner.device).type, None)
        if device is not None and hasattr(device, "synchronize"):
            device.synchronize()  # kernels of the last forward pass still read what will be written

    def _check_joinable(self, command: c.Join) -> None:
        pipeline = srt("runtime_context").get_parallel().pp_size
        if pipeline > 1:
            raise AdapterError(
                "an SGLang engine with pipeline stages is not supported",
                expected="pp_size 1",
                found=pipeline,
            )
        if self._manager.draft_worker is not None and not command.frozen_draft:
            raise AdapterError(
                "this engine has a draft model, which updates would leave behind",
                expected="frozen_draft=True: the draft keeps what it was started with",
                hint="a draft that is trained along needs an engine of its own",
            )

    def _check_updatable(self) -> None:
        """Refuse an engine whose weights are away, or that SGLang itself would not update online."""
        runner = self._manager.tp_worker.model_runner
        if "weights" in self._manager.offload_tags:
            raise AdapterError(
                "the engine has released the memory of its weights",
                rank=f"rank {self.rank}",
                hint='resume_memory_occupation(tags=["weights"]) before an update; the cache may stay away',
            )
        rules = srt("model_executor.model_runner_components.weight_updater")
        reason = rules._unsupported_derived_weight_cache_error(runner.model)  # noqa: SLF001 (its own rule)
        if reason is not None:
            raise AdapterError("SGLang does not update this engine online", found=reason)
        runner.weight_updater._assert_weight_cache_inactive("an update")  # noqa: SLF001 (SGLang's own rule)

    def _check_still(self) -> None:
        if self._manager._session is not None:  # noqa: SLF001 (SGLang's record of somebody else's session)
            raise ProtocolError(
                "a weight-update session of SGLang is open",
                hint="end it with end_weight_update: two updates at once would mix",
            )
        scheduler = self._manager.scheduler
        paused = scheduler is not None and scheduler._engine_paused  # noqa: SLF001 (SGLang asks it so itself)
        if not self._manager.is_fully_idle(ignore_waiting=paused):
            raise AdapterError(
                "requests are running in the engine: their caches hold what old weights computed",
                rank=f"rank {self.rank}",
                hint='pause with "retract" or "abort"; "in_place" holds an engine without running requests',
            )

    # ------------------------------------------------------------------------------------ the commands

    def _act(self, command: c.Command) -> c.Reply:
        if isinstance(command, c.Join):
            return self._join(command)
        if isinstance(command, c.Update):
            return self._update(command)
        if isinstance(command, c.Describe):
            return c.Reply(result=self._describe())
        if isinstance(command, c.Explain):
            return c.Reply(result=self._explain(command))
        if isinstance(command, c.Effective):
            return c.Reply(result=self._effective(Path(command.directory)))
        if isinstance(command, c.Dump):
            return c.Reply(result=self._errands.run(lambda: self._dump(Path(command.directory))))
        self._leave()
        return c.Reply()

    def _join(self, command: c.Join) -> c.Reply:
        self._leave()
        options = Options.from_environment(**command.options)
        rules = Rules(
            command.rules.casts, command.rules.frozen, command.rules.extras, dict(command.rules.aliases)
        )
        held = specs.from_directory(self._model_directory())
        held = held or specs.from_writers(command.job, command.table, options)
        adapter = self._adapter = self._errands.run(lambda: self._adapt(held, rules))
        if command.twin_check:
            checked.once(adapter.build, held, adapter.check_twin)
        if self.rank == 0:
            self._reader = WeightReader(
                adapter,
                instance=command.instance,
                job=command.job,
                table=command.table,
                rules=rules,
                options=options,
                check=command.check,
                verify_every=command.verify_every,
            )
            return c.Reply(result=self._facts())
        self._worker = WorkerWeightsReader(
            adapter,
            instance=command.instance,
            job=command.job,
            table=command.table,
            rules=rules,
            options=options,
        )
        return c.Reply(result=self._facts())

    def _adapt(self, held: Any, rules: Rules) -> SGLangAdapter:
        return SGLangAdapter(
            self._manager.tp_worker.model_runner,
            rank=self.rank,
            world=self.world,
            checkpoint=held,
            errands=self._errands,
            flush=lambda: self._manager.flush_cache(empty_cache=False),
            local=rules.frozen,
        )

    def _model_directory(self) -> Path:
        return Path(self._manager.tp_worker.model_runner.model_config.model_path)

    def _facts(self) -> dict[str, Any]:
        adapter = self._adapted()
        return {"rank": self.rank, "unused": list(adapter.unused), **adapter.counts()}

    def _update(self, command: c.Update) -> c.Reply:
        if self._reader is None:  # another rank than 0: its worker's thread works, its scheduler's serves
            return c.Reply()
        report = self._reader.update(command.version, timeout=command.timeout, verify=command.verify)
        return c.Reply(result=report.as_dict())

    def _conclude(self, command: c.Command, agreed: c.Reply) -> c.Reply:
        """End a command on this rank, knowing what became of it on all."""
        if isinstance(command, c.Join) and agreed.error is not None:
            self._leave()
        if isinstance(command, c.Update) and agreed.error is None and self._reader is None:
            try:
                self._adapted().flush_caches()  # rank 0's controller has done so there
            except SynclineError as error:
                return _failed(error)
        return agreed

    def _describe(self) -> dict[str, Any]:
        live = self._errands.run(self._adapted().live_status)
        return {name: asdict(status) for name, status in live.items()}

    def _explain(self, command: c.Explain) -> dict[str, Any]:
        held = specs.from_directory(Path(command.directory))
        if not held:
            raise AdapterError(
                "no checkpoint to explain", expected="safetensors files", found=command.directory
            )
        rules = Rules(frozen=command.local)
        adapter = self._errands.run(lambda: self._adapt(held, rules))
        return self._errands.run(adapter.explained).plain()

    def _effective(self, directory: Path) -> dict[str, int]:
        worker = self._worker or (self._reader.worker if self._reader is not None else None)
        if worker is None:
            raise ProtocolError("this rank takes no part in updates", rank=f"rank {self.rank}")
        report = worker.check_effective(directory)
        return {"tensors": report.tensors, "elements": report.elements}

    def _dump(self, directory: Path) -> int:
        live = values(slots(self._manager.tp_worker.model_runner.model))
        directory.mkdir(parents=True, exist_ok=True)
        stored = {name: part.to("cpu", copy=True).contiguous() for name, part in live.items()}
        save_file(stored, str(directory / f"rank-{self.rank}.safetensors"))
        return len(stored)

    def _leave(self) -> None:
        reader, worker = self._reader, self._worker
        self._reader = self._worker = self._adapter = None
        if reader is not None:
            reader.close()
        if worker is not None:
            worker.close()

    def _adapted(self) -> SGLangAdapter:
        if self._adapter is None:
            raise ProtocolError("this engine has not joined a job", rank=f"rank {self.rank}")
        return self._adapter


def _failed(error: BaseException) -> c.Reply:
    fields = to_wire(error, "".join(traceback.format_exception(error)))
    notes = tuple(getattr(error, "__notes__", ()))
    return c.Reply(fields, notes)
