"""vLLM's weight-transfer engine ``syncline``: one object in each worker, driven by vLLM's own update calls.

``init_transfer_engine`` joins the job: each worker becomes a `WorkerWeightsReader`, the instance's first one
its `WeightReader` too. ``update_weights`` runs one update on all workers together; their main threads wait in
it, so that no forward pass runs meanwhile. Everything that crosses vLLM's wires is JSON.
"""

from __future__ import annotations

import json
import logging
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from syncline import faults
from syncline.adapters import checked, checkpoint
from syncline.adapters.vllm.adapter import VLLMAdapter
from syncline.adapters.vllm.carry import CarriedError
from syncline.adapters.vllm.doors import LEAVE
from syncline.adapters.vllm.draft import check_draft
from syncline.adapters.vllm.mainthread import MainThread
from syncline.adapters.vllm.peers import Peers
from syncline.adapters.vllm.upstream import upstream
from syncline.errors import AdapterError, SynclineError, from_wire, to_wire
from syncline.layout import Rules
from syncline.layout.loader import Spec
from syncline.options import Options
from syncline.store.reader import WeightReader
from syncline.store.worker import WorkerWeightsReader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from syncline.store.report import UpdateReport

logger = logging.getLogger(__name__)

_base = upstream("distributed.weight_transfer.base")

_SLACK = 30.0  # seconds beyond an update's own deadline until a worker stops waiting for it


@dataclass
class InitInfo(_base.WeightTransferInitInfo):
    """What ``init_weight_transfer_engine`` takes, as JSON.

    Attributes:
        job: name of the job.
        table: name of the table.
        instance: name of this instance.
        options: fields of `syncline.options.Options`.
        casts: ``"reader"``, or patterns of names and the dtypes to which they may be narrowed.
        extras: patterns of checkpoint tensors that the trainer sends and this engine does not load.
        frozen: patterns of checkpoint tensors that this engine loads and the trainer does not send.
        local: patterns of parameters that no checkpoint tensor fills and that stay as they are.
        verify_every: prove every n-th update.
        check: wait for the writers, and refuse at once if they cannot feed this instance.
        twin_check: prove the layout by the engine's own loader, once on a host: `syncline.adapters.checked`.
        frozen_draft: leave a draft model as it was started.
    """

    job: str = "default"
    table: str = "weights"
    instance: str = "vllm"
    options: dict[str, float | int | str] = field(default_factory=dict)
    casts: dict[str, str] | str = field(default_factory=dict)
    extras: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    local: list[str] = field(default_factory=list)
    verify_every: int = 1
    check: bool = True
    twin_check: bool = True
    frozen_draft: bool = False


@dataclass
class UpdateInfo(_base.WeightTransferUpdateInfo):
    """What ``update_weights`` takes, as JSON.

    Attributes:
        version: the writers' number; None: the newest.
        timeout: seconds; ``update_timeout`` if left out.
        verify: the proof demanded: ``"none"``, ``"delivered"``, ``"installed"``; or ``"effective"``: no
            update, but a comparison of all live tensors with a fresh load of ``directory``; or ``"leave"``:
            leave the job, where vLLM has no verb for it.
        directory: of the checkpoint for ``"effective"``.
    """

    version: int | None = None
    timeout: float | None = None
    verify: str = "delivered"
    directory: str | None = None


class SynclineTransferEngine(_base.WeightTransferEngine):
    """See the module. vLLM constructs it with the live model."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.adapter: VLLMAdapter | None = None
        self.report: UpdateReport | None = None  # of the last update, on rank 0
        self._reader: WeightReader | None = None
        self._worker: WorkerWeightsReader | None = None
        self._peers: Peers | None = None
        self._main = MainThread()
        self._options = Options.from_environment()

    # ------------------------------------------------------------------------------------ vLLM's calls

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Learn the layout and join the job. A second call leaves the first job.

        Raises:
            CarriedError: what went wrong in any worker; see `_together` for who raises it.
        """
        faults.point("adapters.init_transfer_engine")
        self.shutdown()
        self._options = Options.from_environment(**init_info.options)
        self._together(lambda: self._join(init_info), self._options.connect_timeout + _SLACK)

    def start_weight_update(self) -> None:
        """Nothing to prepare: the first byte moves in `update_weights`."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Run one update; unlike the base class's, without synchronising a whole device.

        What was written is there when this returns: its kernels were waited for, on their own streams.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Bring this worker's live tensors to a version, together with all other workers of the instance.

        Raises:
            CarriedError: what went wrong in any worker; see `_together` for who raises it.
        """
        seconds = self._options.update_timeout if update_info.timeout is None else update_info.timeout
        if update_info.verify == LEAVE:
            self.shutdown()
        elif update_info.verify == "effective":
            self._together(lambda: self._compare(update_info.directory), seconds + _SLACK)
        else:
            self._together(lambda: self._update(update_info, seconds), seconds + _SLACK)

    def finish_weight_update(self) -> None:
        """Nothing is left to do: an update that returned is committed and applied."""

    def shutdown(self) -> None:
        """Leave the job; the engine keeps its weights."""
        if self._reader is not None:
            self._reader.close()
        elif self._worker is not None:
            self._worker.close()
        self._reader = self._worker = self.adapter = None

    @staticmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        """Refuse: a trainer publishes, and every engine pulls.

        Raises:
            AdapterError: always.
        """
        del iterator, trainer_args
        raise AdapterError("a trainer sends nothing to this engine", hint="use syncline.WeightWriter.publish")

    # ------------------------------------------------------------------------------------ what they do

    @property
    def _who(self) -> str:
        return f"rank {self.parallel_config.rank}"

    def _ranks(self) -> tuple[int, int]:
        """Return rank and world among all workers of one forward pass, data-parallel ones included."""
        p = self.parallel_config
        return p.data_parallel_index * p.world_size + p.rank, p.world_size * p.data_parallel_size

    def _join(self, info: InitInfo) -> None:
        check_draft(self.vllm_config.speculative_config, frozen=info.frozen_draft, who=self._who)
        rank, world = self._ranks()
        specs = self._specs(info)
        made: list[VLLMAdapter] = []

        def learn() -> None:
            adapter = VLLMAdapter(
                getattr(self, "_default_model", self.model),  # there is no other where vLLM knows no draft
                self.vllm_config,
                self.device,
                specs,
                rank=rank,
                world=world,
                local=info.local,
                run=self._main.run,
                held=lambda: self._main.held,
            )
            if info.twin_check:
                checked.once(adapter.build, specs, adapter.check_twin)
            made.append(adapter)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # what was tried out is not kept from whoever shares the device

        self._main.run(learn)
        adapter = made[0]
        logger.info("syncline learned %d shards; layers: %s", adapter.manifest.rows, adapter.ways)
        rules = Rules(
            casts=info.casts,  # pyright: ignore[reportArgumentType] (checked there: it came over the wire)
            extras=tuple(info.extras),
            frozen=tuple(info.frozen),
        )
        common: dict[str, Any] = {
            "instance": info.instance,
            "job": info.job,
            "table": info.table,
            "rules": rules,
            "options": self._options,
        }
        if rank == 0:
            self._reader = WeightReader(adapter, verify_every=info.verify_every, check=info.check, **common)
            self._worker = self._reader.worker
        else:
            self._worker = WorkerWeightsReader(adapter, **common)
        self.adapter = adapter

    def _specs(self, info: InitInfo) -> Mapping[str, Spec]:
        """Return the checkpoint's tensors: of its files, or else of the writers, whom one worker asks."""
        directory = Path(self.vllm_config.model_config.model)
        found = checkpoint.from_directory(directory) if directory.is_dir() else {}
        if found:
            return found
        mine: dict[str, Any] = {}
        if self._joined_peers().rank == 0:
            try:
                found = checkpoint.from_writers(info.job, info.table, self._options)
                mine = {"specs": {name: [list(spec.shape), spec.dtype] for name, spec in found.items()}}
            except SynclineError as error:
                mine = {"error": to_wire(error)}
        told = json.loads(self._joined_peers().exchange(json.dumps(mine).encode())[0])
        if "error" in told:
            raise from_wire(told["error"])
        return {name: Spec(tuple(shape), dtype) for name, (shape, dtype) in told["specs"].items()}

    def _update(self, info: UpdateInfo, seconds: float) -> None:
        if self.adapter is None:
            raise AdapterError(
                "this engine has not joined a job",
                rank=self._who,
                hint="call init_weight_transfer_engine first",
            )
        if self._reader is not None:
            self.report = self._reader.update(info.version, timeout=seconds, verify=info.verify)  # pyright: ignore[reportArgumentType]

    def _compare(self, directory: str | None) -> None:
        if directory is None or self._worker is None:
            raise AdapterError(
                "nothing to compare with",
                expected="directory= of a checkpoint",
                found=directory,
                rank=self._who,
            )
        self._worker.check_effective(Path(directory))

    # ------------------------------------------------------------------------------- all workers together

    def _joined_peers(self) -> Peers:
        if self._peers is None:
            self._peers = Peers()
        return self._peers

    def _together(self, task: Callable[[], None], deadline: float) -> None:
        """Run a task in every worker at once; return when all have ended.

        Raises:
            CarriedError: a worker's task failed. Only the last worker raises it: vLLM reads the workers'
                answers in order up to an error, and takes those left for answers to its next call.
        """
        error = self._main.serve(lambda: self._outcome(task), deadline)
        parallel = self.parallel_config
        if error is not None and parallel.rank == parallel.world_size - 1:
            raise CarriedError(error)

    def _outcome(self, task: Callable[[], None]) -> SynclineError | None:
        peers = self._joined_peers()
        peers.exchange(b"")  # from here on every worker's main thread is held: no forward pass runs
        mine: dict[str, str | None] | None = None
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # this thread begins on the first one
            task()
        except BaseException as error:  # travels to all workers, and is raised there
            logger.warning("%s: failed", self._who, exc_info=True)
            mine = to_wire(error, "".join(traceback.format_exception(error)))
            mine["rank"] = mine.get("rank") or self._who
        for told in peers.exchange(json.dumps(mine).encode()):
            if (fields := json.loads(told)) is not None:
                return from_wire(fields)
        return None
