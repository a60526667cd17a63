"""What the processes of the chaos tests are, and the loop in which they do what the test asks.

A command is (number, method, arguments); every command has a thread of its own, so that a process can be
asked how it is while it waits. The answer is (number, "ok", value) or (number, "error", fields).
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from syncline import faults
from syncline.adapters.fsdp import FSDPTrainer
from syncline.adapters.module import ModuleEngine
from syncline.errors import SynclineError
from syncline.meta import MetaServer
from syncline.options import Options
from syncline.store.reader import WeightReader
from syncline.store.worker import WorkerWeightsReader
from syncline.store.writer import WeightWriter
from tests.chaos import model as tiny

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from syncline.store.publication import Publication


class Notes(logging.Handler):
    """Keeps what the library logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.lines.append(text if not record.exc_info else f"{text}\n{self.format(record)}")


class Role:
    """What every process can be asked."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.reached: set[str] = set()
        logging.getLogger("syncline").addHandler(self.notes)

    def ping(self) -> int:
        return os.getpid()

    def arm(self, name: str, spec: str, call: int = 1) -> None:
        """Arm a fault for one pass of a point: its ``call``-th from now."""
        action, passes = faults._parse(name, spec), []
        self.reached.discard(name)

        def once() -> None:
            passes.append(1)
            if len(passes) == call:
                self.reached.add(name)
                action()
                faults._armed.pop(name, None)

        faults._armed[name] = once

    def passed(self, name: str) -> bool:
        """Say whether an armed point was reached."""
        return name in self.reached

    def armed(self) -> list[str]:
        return sorted(faults._armed)

    def arm_for_good(self, name: str, text: str) -> None:
        """Fail at every pass of a point, until `disarm`."""
        faults._armed[name] = faults._parse(name, f"raise:{text}")

    def disarm(self) -> None:
        faults._armed.clear()

    def log(self) -> str:
        return "\n".join(self.notes.lines)

    def resources(self) -> dict[str, int]:
        """Count what a leak would grow."""
        gc.collect()
        links = []
        for entry in Path("/proc/self/fd").iterdir():
            try:
                links.append(str(entry.readlink()))
            except OSError:
                continue  # the descriptor of this listing
        maps = Path("/proc/self/maps").read_text().splitlines()
        return {
            "fds": len(links),
            "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208 - a count, of a pseudo directory
            "regions": sum("memfd" in line for line in maps),
            "sockets": sum(link.startswith("socket:") for link in links),
        }

    def close(self) -> None:
        pass


class Server(Role):
    """A MetaServer of its own."""

    def __init__(self, job: str, options: dict[str, Any], recovery: float = 5.0) -> None:
        super().__init__()
        self.server = MetaServer(job, options=Options(**options), recovery=recovery).start()

    def boot(self) -> int:
        return self.server.boot

    def close(self) -> None:
        self.server.stop()


class Trainer(Role):
    """One trainer rank. With ``group`` (a file) it is an FSDP2 rank of a gloo group, else a replica."""

    def __init__(
        self,
        job: str,
        options: dict[str, Any],
        rank: int = 0,
        world: int = 1,
        group: str | None = None,
        serve: bool | None = None,
        wide: bool = False,
        broken: str | None = None,
    ) -> None:
        super().__init__()
        self.rank, self.world, self.wide = rank, world, wide
        torch.manual_seed(7)
        self.model = tiny.Tiny(wide=wide)
        if group is not None:
            dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=world)
            mesh = init_device_mesh("cpu", (world,))
            fully_shard(self.model.up, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.adapter = FSDPTrainer(self.model, self.optimizer, rank=rank, world=world)
        if broken is not None:
            _break(self.adapter, broken)
        self.writer = WeightWriter(self.adapter, job=job, options=Options(**options), serve=serve)
        self.publication: Publication | None = None

    def fill(self, version: float) -> float:
        """Stamp the weights, as an optimizer step would change them; return when they might change."""
        whole = tiny.stamped(version, wide=self.wide)
        with self.adapter.mutation("optimizer.step"), torch.no_grad():
            allowed = time.monotonic()
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(_like(whole[name], tensor))
        return allowed

    def spoil(self, name: str, index: int) -> None:
        """Flip one bit of a live weight behind everybody's back."""
        flat = self.model.state_dict()[name].view(-1).view(torch.int32)
        flat[index] ^= 1

    def step(self) -> dict[str, float]:
        """Make one real training step; return when the optimizer was allowed in."""
        tokens = torch.arange(6 * (self.rank + 1)) % tiny.VOCAB
        loss = nn_loss(self.model, tokens)
        loss.backward()
        began = time.monotonic()
        entered: list[float] = []
        hook = self.optimizer.register_step_pre_hook(lambda *_: entered.append(time.monotonic()))
        self.optimizer.step()
        hook.remove()
        self.optimizer.zero_grad()
        return {"began": began, "entered": entered[0], "loss": float(loss.detach())}

    def collect(self) -> float:
        """Take part in a collective of the trainers' own group."""
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    def publish(self, version: int, wait: str = "none", timeout: float | None = None) -> float:
        """Publish; return the time of the return."""
        self.publication = self.writer.publish(version, wait=wait, timeout=timeout)  # pyright: ignore[reportArgumentType]
        return time.monotonic()

    def published(self, timeout: float | None = None) -> str:
        return str(self._last().wait(timeout))

    def committed(self, timeout: float | None = None) -> tuple[str, ...]:
        return self._last().wait_committed(timeout)

    def window(self) -> dict[str, tuple[str, ...]]:
        last = self._last()
        return {"readers": last.readers, "revoked": last.revoked, "missed": last.missed}

    def await_readers(self, *names: str, timeout: float | None = None) -> tuple[str, ...]:
        return self.writer.await_readers(*names, timeout=timeout)

    def weights(self) -> dict[str, Any]:
        """Return the whole checkpoint as the trainer's own library gathers it."""
        found = {}
        for name, tensor in self.model.state_dict().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[name] = whole.detach().numpy().copy()
        return found

    def close(self) -> None:
        self.writer.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _last(self) -> Publication:
        if self.publication is None:
            raise SynclineError("nothing was published")
        return self.publication


class Reader(Role):
    """One rank of an instance that cuts the model with plain tensors; rank 0 holds the controller."""

    def __init__(
        self,
        job: str,
        options: dict[str, Any],
        instance: str = "a",
        rank: int = 0,
        world: int = 1,
        wide: bool = False,
        broken: str | None = None,
        check: bool = True,
    ) -> None:
        super().__init__()
        self.rank, self.world, self.wide = rank, world, wide
        whole = tiny.stamped(0, wide=wide)
        shapes = {name: tuple(t.shape) for name, t in tiny.cut(whole, rank, world).items()}
        self.model = tiny.Part(shapes)
        self.hooks = 0
        self.engine = ModuleEngine(
            self.model,
            rank=rank,
            world=world,
            cuts=tiny.cuts(whole, rank, world),
            after_update=self._count_hook,
        )
        self.pointers = [p.data_ptr() for p in self.model.parameters()]
        if broken is not None:
            _break(self.engine, broken)
        given = Options(**options)
        if rank == 0:
            self.reader = WeightReader(self.engine, instance=instance, job=job, options=given, check=check)
        else:
            self.worker = WorkerWeightsReader(self.engine, instance=instance, job=job, options=given)
        self.follower: Any = None
        self.seen: list[str] = []

    def update(self, version: int | None = None, **keywords: Any) -> dict[str, Any]:
        return self.reader.update(version, **keywords).as_dict()

    def updated_at(self, version: int | None = None, **keywords: Any) -> float:
        """Update; return the time of the return."""
        self.reader.update(version, **keywords)
        return time.monotonic()

    def follow(self, every: int = 1, max_staleness: int | None = None) -> None:
        self.follower = self.reader.follow(
            every, max_staleness, on_update=lambda report: self.seen.append(str(report.key))
        )

    def followed(self) -> list[str]:
        return self.seen

    def state(self) -> dict[str, Any]:
        """Return what the MetaServer and the engine say."""
        committed = self.reader.committed
        return {
            "committed": None if committed is None else str(committed),
            "dirty": self.reader.dirty,
            "paused": self.engine.paused,
            "serves": None if self.engine.version is None else str(self.engine.version),
        }

    def version_state(self, number: int) -> str | None:
        """Return what the MetaServer says of the newest version of this number."""
        versions, _ = self.reader._versions(5.0)
        return next((v.state for v in reversed(versions) if v.key.number == number), None)

    def paused(self) -> bool:
        return self.engine.paused

    def served(self) -> str | None:
        return None if self.engine.version is None else str(self.engine.version)

    def forward(self, deadline: float) -> str:
        """Run one forward pass on whatever is served; the version that it saw."""
        with self.engine.forward(deadline):
            return str(self.engine.version)

    def wrong(self, version: float) -> list[str]:
        """Compare the live tensors with a version, bit for bit; return the names that differ."""
        expected = tiny.cut(tiny.stamped(version, wide=self.wide), self.rank, self.world)
        live = dict(self.model.named_parameters())
        assert [p.data_ptr() for p in self.model.parameters()] == self.pointers
        return [name for name, tensor in expected.items() if not torch.equal(live[name], tensor)]

    def weights(self) -> dict[str, Any]:
        return {name: p.detach().numpy().copy() for name, p in self.model.named_parameters()}

    def post_loads(self) -> int:
        return self.hooks

    def raise_foreign(self, point: str, text: str) -> None:
        """Arm a failure of a class that no other process knows, once."""

        class KernelPanicError(Exception):
            pass

        def fail() -> None:
            del faults._armed[point]
            raise KernelPanicError(text)

        faults._armed[point] = fail

    def flip_after(self, point: str, name: str, index: int) -> None:
        """Flip one bit of a live tensor when a point is passed, once."""

        def flip() -> None:
            del faults._armed[point]
            dict(self.model.named_parameters())[name].data.view(-1).view(torch.int32)[index] ^= 1

        faults._armed[point] = flip

    def transports(self) -> list[str]:
        """Return which transports have moved bytes into this rank."""
        routes = self._worker()._updater._puller._routes.values()
        return sorted({lane.transport.name for route in routes for lane in route.lanes})

    def close(self) -> None:
        (self.reader if self.rank == 0 else self.worker).close()

    def _worker(self) -> WorkerWeightsReader:
        worker = self.reader.worker if self.rank == 0 else self.worker
        assert worker is not None
        return worker

    def _count_hook(self, _model: object) -> None:
        self.hooks += 1


def nn_loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of predicting each token from itself."""
    return torch.nn.functional.cross_entropy(model(tokens), tokens)


def _like(whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return whole
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)


def _break(adapter: object, text: str) -> None:
    """Make an adapter fail where its metadata is made, with a class of its own."""

    class UnsupportedModelError(Exception):
        pass

    def fail(_self: object) -> None:
        raise UnsupportedModelError(text)

    kind = type(adapter)
    adapter.__class__ = type(kind.__name__, (kind,), {"manifest": property(fail, lambda _self, _value: None)})


ROLES: dict[str, type[Role]] = {"server": Server, "trainer": Trainer, "reader": Reader}


def main(pipe: Connection, role: str, environment: dict[str, str], arguments: dict[str, Any]) -> None:
    """Be a role until told to close."""
    os.environ.update(environment)
    faults._armed.update(faults._from_environment())
    torch.set_num_threads(1)
    sending = threading.Lock()

    def answer(number: int, kind: str, value: Any) -> None:
        with sending:
            pipe.send((number, kind, value))

    def do(number: int, work: Callable[[], Any]) -> Any:
        try:
            value = work()
        except BaseException as error:
            answer(number, "error", describe(error))
            return None
        answer(number, "ok", value if number else os.getpid())
        return value

    made = do(0, lambda: ROLES[role](**arguments))
    if made is None:
        return
    while True:
        try:
            number, method, positional, keywords = pipe.recv()
        except EOFError:
            os._exit(3)  # the test is gone
        call = getattr(made, method)
        if method == "close":
            do(number, call)
            return
        threading.Thread(
            target=do, args=(number, lambda c=call, p=positional, k=keywords: c(*p, **k)), daemon=True
        ).start()


def describe(error: BaseException) -> dict[str, Any]:
    """Return an error as plain values."""
    return {
        "kind": type(error).__name__,
        "text": "\n".join([str(error), *getattr(error, "__notes__", [])]),
        "rank": getattr(error, "rank", None),
        "tensor": getattr(error, "tensor", None),
        "trace": "".join(traceback.format_exception(error)),
    }
