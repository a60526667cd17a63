"""The four processes of a measured job, two trainer ranks and two ranks of one instance, and their leader.

Each child does what it is told over a pipe. Times are of CLOCK_MONOTONIC, which processes of one host share.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import tempfile
import time
import traceback
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import models
from benchmarks.process import OwnPeak, held, status
from syncline import WeightReader, WeightWriter, WorkerWeightsReader, faults
from syncline.adapters.fsdp import FSDPTrainer
from syncline.adapters.module import ModuleEngine
from syncline.adapters.modules import local_part
from syncline.kernels import host

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Barrier
    from types import TracebackType

JOB, INSTANCE = "bench", "serve"
_SECONDS = 240.0


class Marks:
    """When this process last came by a step, by the step's name: the library's own fault points."""

    def __init__(self, points: tuple[str, ...]) -> None:
        self.times: dict[str, float] = {}
        self._armed = contextlib.ExitStack()
        for name in points:
            self._armed.enter_context(faults.arm(name, lambda name=name: self._mark(name)))

    def _mark(self, name: str) -> None:
        self.times[name] = time.monotonic()


class Trainer:
    """One FSDP2 rank and its `WeightWriter`."""

    def __init__(self, shapes: models.Shapes, rank: int, store: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        model = models.module(shapes, "meta")
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        self._locals = [local_part(p).detach() for p in model.parameters()]
        models.fill(self._locals, rank)
        largest = max(part.nbytes for part in self._locals)
        self._locals.clear()  # a view would be a user of the old memory that the library does not know
        self._adapter = FSDPTrainer(model)
        parameters = len(self._adapter.manifest.names)
        with OwnPeak() as moving:
            self._adapter.share()
        self._locals = [local_part(p).detach().view(-1) for p in model.parameters()]
        self.moved = {
            "peak": moving.peak,
            "after": moving.after,
            "largest": largest,
            "tensors": parameters,
        }
        self._writer = WeightWriter(self._adapter, job=JOB)
        self._marks = Marks(("digest.before_source", "writer.before_digests"))
        self._publication: Any = None

    def moving(self) -> dict[str, int]:
        """Return what moving the parameters into the arena took, in bytes."""
        return self.moved

    def change(self, value: int) -> None:
        """Change some of every parameter, as a step of the optimizer would: the window closes before."""
        with self._adapter.mutation("a step"):
            for part in self._locals:
                part[:64].fill_(value)

    def publish(self, number: int) -> tuple[float, float]:
        """Publish; return when the call began and how long it took."""
        began = time.monotonic()
        self._publication = self._writer.publish(number)
        return began, time.monotonic() - began

    def published(self) -> tuple[float, float]:
        """Wait until this rank's digests are delivered; return when digesting began and ended."""
        self._publication.wait(_SECONDS)
        times = self._marks.times
        return times["digest.before_source"], times["writer.before_digests"]

    def held(self) -> dict[str, int]:
        """Return what this process holds."""
        return held()

    def close(self) -> None:
        """Leave the job."""
        self._writer.close()
        dist.destroy_process_group()


class Engine:
    """One tensor-parallel rank of an engine, its reader, and two private buffers of as many bytes."""

    def __init__(self, shapes: models.Shapes, rank: int, together: Barrier) -> None:
        local, cuts = models.halves(shapes, rank)
        model = models.module(local, "cpu")
        models.fill([p.detach() for p in model.parameters()], 100 + rank)
        self.nbytes = sum(p.nbytes for p in model.parameters())
        self._together = together
        self._from = torch.ones(self.nbytes, dtype=torch.uint8)
        self._to = torch.ones(self.nbytes, dtype=torch.uint8)
        self._libc = ctypes.CDLL(None)
        self._libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        before = status()["RssAnon"]
        host.load()
        self._resident = {"libraries": status()["RssAnon"] - before, "before": status()["RssAnon"]}
        engine = ModuleEngine(model, rank=rank, world=2, cuts=cuts)
        self._marks = Marks(("worker.before_first_byte", "worker.before_verified", "reader.after_commit"))
        self._controller: WeightReader | None = None
        if rank == 0:
            self._controller = WeightReader(engine, instance=INSTANCE, job=JOB)
            self._face: WeightReader | WorkerWeightsReader = self._controller
        else:
            self._face = WorkerWeightsReader(engine, instance=INSTANCE, job=JOB)

    def resident(self) -> dict[str, int]:
        """Return private memory before the reader was made, in bytes, and who this is."""
        return self._resident | {"nbytes": self.nbytes, "pid": os.getpid()}

    def memcpy(self) -> tuple[float, float]:
        """Copy this rank's bytes by one libc memcpy, as the other rank does; return start and end."""
        self._together.wait(_SECONDS)
        began = time.monotonic()
        self._libc.memcpy(self._to.data_ptr(), self._from.data_ptr(), self.nbytes)
        return began, time.monotonic()

    def update(self, number: int, level: str) -> tuple[float, dict[str, Any]]:
        """Bring the instance to a version; return when it was committed, and the report."""
        if self._controller is None:
            raise RuntimeError("only rank 0 has the controller")
        report = self._controller.update(number, verify=level)  # type: ignore[arg-type]
        return self._marks.times["reader.after_commit"], report.as_dict()

    def transferred(self) -> tuple[float, float]:
        """Return when this rank's last transfer began and ended; its proof is no part of it at level none."""
        times = self._marks.times
        return times["worker.before_first_byte"], times["worker.before_verified"]

    def held(self) -> dict[str, int]:
        """Return what this process holds."""
        return held()

    def close(self) -> None:
        """Leave the job."""
        self._face.close()


def _child(kind: type[Trainer] | type[Engine], arguments: tuple[Any, ...], pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        one: Any = kind(*arguments)
        pipe.send((True, None))
        while True:
            name, given = pipe.recv()
            pipe.send((True, getattr(one, name)(*given)))
            if name == "close":
                return
    except EOFError:
        return
    except BaseException as error:  # told to the leader, which raises it
        pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class Child:
    """A process at the other end of a pipe."""

    def __init__(self, context: Any, kind: type, arguments: tuple[Any, ...]) -> None:
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_child, args=(kind, arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, name: str, *given: Any) -> None:
        """Call a method over there."""
        self._pipe.send((name, given))

    def hear(self) -> Any:
        """Return what the method returned; raise what it raised."""
        if not self._pipe.poll(_SECONDS):
            raise RuntimeError(f"no answer from {self.process.name}")
        fine, answer = self._pipe.recv()
        if not fine:
            raise RuntimeError(f"{self.process.name}: {answer}")
        return answer


class Fleet:
    """A job of two trainer ranks and one instance of two ranks, all warm."""

    def __init__(self, shapes: models.Shapes) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="syncline-bench-")
        os.environ["SYNCLINE_RUN_DIR"] = self._directory.name
        context = multiprocessing.get_context("spawn")
        together = context.Barrier(2)
        store = f"{self._directory.name}/store"
        self.writers = [Child(context, Trainer, (shapes, rank, store)) for rank in range(2)]
        self.readers = [Child(context, Engine, (shapes, rank, together)) for rank in range(2)]
        self.number = 0
        try:
            for child in self.children:
                child.hear()
        except BaseException:
            self.close(told=False)
            raise

    @property
    def children(self) -> list[Child]:
        """All four, writers first."""
        return [*self.writers, *self.readers]

    def all(self, children: list[Child], name: str, *given: Any) -> list[Any]:
        """Tell several at once, then hear them."""
        for child in children:
            child.tell(name, *given)
        return [child.hear() for child in children]

    def memcpy(self) -> float:
        """Return the seconds of the baseline: from the first's start to the last's end."""
        return span(self.all(self.readers, "memcpy"))

    def publish(self) -> list[tuple[float, float]]:
        """Change the weights and publish them; return (start, seconds) of each rank's call."""
        self.number += 1
        self.all(self.writers, "change", self.number % 251)
        return self.all(self.writers, "publish", self.number)

    def close(self, *, told: bool = True) -> None:
        """End the children: readers first, by word; then by force."""
        with contextlib.suppress(RuntimeError, OSError, EOFError):
            if told:
                self.all(self.readers, "close")
                self.all(self.writers, "close")
        for child in self.children:
            child.process.join(10.0 if told else 0.0)
            child.process.kill()
            child.process.join()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(told=error is None)


def span(times: list[tuple[float, float]]) -> float:
    """Return the seconds from the first start to the last end."""
    return max(end for _, end in times) - min(start for start, _ in times)
