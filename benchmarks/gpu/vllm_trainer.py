"""The trainer process of the vLLM benchmark: FSDP2, published by syncline and sent by vLLM's own backends.

python -m benchmarks.gpu.vllm_trainer CASE DEVICE JOB DIRECTORY
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from multiprocessing.connection import Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.gpu import vllm_models as models
from benchmarks.gpu.vllm_wire import GROUP_PORT, only_in_ray, secret
from syncline import WeightWriter
from syncline.adapters.fsdp import FSDPTrainer
from syncline.adapters.vllm.upstream import upstream
from syncline.cli.demo.wire import Events, commands

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection


def main() -> None:
    """Do what is asked until told to stop."""
    name, where, job, directory = sys.argv[1:]
    torch.set_num_threads(4)
    device = torch.device(where)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{directory}/trainers", rank=0, world_size=1)
    events = Events()
    trainer = _Trainer(models.CASES[name], device, Path(directory))
    adapter = FSDPTrainer(trainer.model, trainer.optimizer)
    with WeightWriter(adapter, job=job) as writer:
        manifest = adapter.manifest
        events.tell("ready", tensors=len(manifest.names), nbytes=trainer.nbytes, names=list(manifest.names))
        for command in commands():
            do = command.pop("do")
            if do == "stop":
                break
            told = trainer.publish(writer, **command) if do == "publish" else getattr(trainer, do)(**command)
            events.tell(do, **told)
    dist.destroy_process_group()


class _Trainer:
    def __init__(self, case: models.Case, device: torch.device, directory: Path) -> None:
        self.case, self.device, self.directory = case, device, directory
        self.model: Any = models.made(case, device)
        mesh = init_device_mesh(device.type, (1,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        if case.trains:
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self._connection: Connection | None = None
        self._group: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def step(self, number: int) -> dict[str, Any]:
        """Take an optimizer step, which closes the window of the version before."""
        began = time.monotonic()
        torch.manual_seed(number)
        if self.case.trains:
            ids = torch.randint(3, self.case.sizes["vocab_size"], (4, 64), device=self.device)
            self.model(input_ids=ids, labels=ids).loss.backward()
        else:
            for p in self.model.parameters():
                p.grad = _like(p)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"seconds": time.monotonic() - began}

    def publish(self, writer: WeightWriter, number: int) -> dict[str, Any]:
        """Publish a version, once what was queued before is done: the clock starts with finished weights."""
        self._idle()
        began = time.monotonic()
        writer.publish(number)
        return {"began": began, "seconds": time.monotonic() - began}

    def save(self, directory: str) -> dict[str, Any]:
        """Write the weights as a checkpoint, gathered by torch."""
        began = time.monotonic()
        whole = {name: _whole(p).cpu() for name, p in self.model.state_dict().items()}
        models.save(self.case, whole, Path(directory))
        return {"seconds": time.monotonic() - began}

    # --- vLLM's own backends

    def open_ipc(self) -> dict[str, Any]:
        """Wait for the engine that vLLM's CUDA-IPC backend serves."""
        address = str(self.directory / "ipc.sock")
        with Listener(address, "AF_UNIX", authkey=secret(self.directory)) as listener:
            self._connection = listener.accept()
        return {}

    def ipc(self, packed: bool) -> dict[str, Any]:
        """Send every weight by vLLM's CUDA-IPC backend; its handles go straight to the engine's process."""
        only_in_ray()
        theirs = upstream("distributed.weight_transfer.ipc_engine")
        connection = self._connection
        if connection is None:
            raise RuntimeError("no engine has connected")

        def hand_over(info: Any) -> None:
            connection.send({k: v for k, v in asdict(info).items() if k != "ipc_handles_pickled"})
            connection.recv()

        self._idle()
        began = time.monotonic()
        arguments = theirs.IPCTrainerSendWeightsArgs(send_mode=hand_over, packed=packed)
        theirs.IPCWeightTransferEngine.trainer_send_weights(self._exported(), arguments)
        connection.send(None)
        connection.recv()
        return {"began": began, "seconds": time.monotonic() - began}

    def nccl_init(self) -> dict[str, Any]:
        """Meet the engine in a group of vLLM's."""
        theirs = upstream("distributed.weight_transfer.nccl_engine")
        place = {"master_address": "127.0.0.1", "master_port": GROUP_PORT, "world_size": 2}
        self._group = theirs.NCCLWeightTransferEngine.trainer_init(place)
        return {}

    def nccl(self) -> dict[str, Any]:
        """Send every weight by vLLM's NCCL backend, packed."""
        theirs = upstream("distributed.weight_transfer.nccl_engine")
        self._idle()
        began = time.monotonic()
        arguments = theirs.NCCLTrainerSendWeightsArgs(group=self._group, packed=True)
        theirs.NCCLWeightTransferEngine.trainer_send_weights(self._exported(), arguments)
        self._idle()
        return {"began": began, "seconds": time.monotonic() - began}

    def listed(self) -> dict[str, Any]:
        """Return the names, dtypes and shapes that the backends send, in their order."""
        tensors = list(self._exported())
        return {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(t.dtype).removeprefix("torch.") for _, t in tensors],
            "shapes": [list(t.shape) for _, t in tensors],
        }

    def _exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors under the checkpoint's names: fused experts one by one, as views."""
        for name, p in self.model.named_parameters():
            whole = _whole(p)
            if not self.case.moe or ".experts." not in name:
                yield name, whole
                continue
            layer = name.partition(".experts.")[0] + ".experts"
            for number, expert in enumerate(whole):
                if name.endswith("gate_up_proj"):
                    gate, up = expert.chunk(2)
                    yield f"{layer}.{number}.gate_proj.weight", gate
                    yield f"{layer}.{number}.up_proj.weight", up
                else:
                    yield f"{layer}.{number}.down_proj.weight", expert

    def _idle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _like(parameter: torch.Tensor) -> torch.Tensor:
    """Return a random gradient with the parameter's sharding."""
    if not isinstance(parameter, DTensor):
        return torch.randn_like(parameter)
    local = torch.randn_like(parameter.to_local())
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements)


if __name__ == "__main__":
    main()
