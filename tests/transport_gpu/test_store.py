"""Writers and readers whose weights lie on a GPU, by the faces that users know; the GPU is `fake`."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from syncline import faults
from syncline.adapters import placed
from syncline.errors import DigestMismatchError, RevokedError, SynclineError, TransportError
from syncline.layout import Rules
from syncline.memory.cuda import DeviceSegments
from syncline.options import Options
from syncline.store import member
from syncline.store.lanes import lane_of
from syncline.transport.base import Endpoint
from syncline.transport.nccl import NcclTransport
from syncline.transport.nccl_card import Card
from tests.store.pair import OPTIONS, Engine, Job, Trainer, blank, module, shard, stamped
from tests.transport_gpu import fake

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

SHAPES = {"a.weight": (24, 10), "a.bias": (24,), "b.weight": (7, 13), "empty": (0, 4)}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> fake.Driver:
    return fake.install(monkeypatch)


@pytest.fixture
def job(run_dir: Path, driver: fake.Driver) -> Iterator[Job]:
    with Job("devices") as made:
        yield made


def tensors(start: float = 0.0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        name: stamped(*shape, start=start + 1000 * i, dtype=dtype)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def on_device(driver: fake.Driver, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: fake.placed(driver, t) for name, t in given.items()}


def equal(engine: Engine, expected: Mapping[str, torch.Tensor]) -> bool:
    live = engine.live_tensors()
    return all(torch.equal(live[name], t.to(live[name].dtype)) for name, t in expected.items())


@pytest.mark.parametrize("level", ["delivered", "installed"])
def test_versions_arrive_without_a_copy_at_the_trainer(job: Job, driver: fake.Driver, level: str) -> None:
    model = module(on_device(driver, tensors()))
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    writer = job.writer(Trainer(model, optimizer))
    engine = Engine(module(on_device(driver, blank(tensors()))))
    reader = job.reader(engine)
    for number in (1, 2, 3):
        publication = writer.publish(number)
        report = reader.update(number, verify=level)
        assert publication.wait().number == number
        assert report.nbytes == sum(p.nbytes for p in model.parameters())
        assert equal(engine, dict(model.named_parameters()))
        writer.close_window()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
    assert writer.adapter.share() == {}
    assert ("load", 0) in driver.log


def test_readers_wait_for_the_writes_before_a_publish(job: Job, driver: fake.Driver) -> None:  # B59
    """Recorded on the trainer's own stream, in its own thread, before the version is announced."""
    writer = job.writer(Trainer(module(on_device(driver, tensors()))))
    reader = job.reader(Engine(module(on_device(driver, blank(tensors())))))
    own = fake.Stream()
    driver.log.clear()
    with faults.arm("writer.before_put", lambda: driver.log.append(("put", 0))):
        with fake.on(own):
            writer.publish(1)
        reader.update(1)
    order = [entry for entry in driver.log if entry[0] in {"record", "put", "wait"}]
    assert order[:2] == [("record", own.cuda_stream), ("put", 0)]
    assert len([e for e in order if e[0] == "wait"]) >= 2  # the digest of the source, and the gather


def test_halves_of_a_tensor_and_a_cast(job: Job, driver: fake.Driver) -> None:
    whole = stamped(8, 6)
    shards = [shard("w", (8, 6), (4 * r, 0), (4, 6)) for r in range(2)]
    writers = [
        job.writer(
            Trainer(
                module(on_device(driver, {"w": whole[4 * r : 4 * r + 4].clone()})),
                shards=[shards[r]],
                rank=r,
                world=2,
            ),
            serve=r == 0,
        )
        for r in range(2)
    ]
    engine = Engine(module(on_device(driver, {"w": torch.zeros(8, 6, dtype=torch.bfloat16)})))
    reader = job.reader(engine, rules=Rules(casts="reader"))
    for writer in writers:
        writer.publish(1)
    reader.update(1, verify="installed")
    assert equal(engine, {"w": whole.to(torch.bfloat16)})


def test_moved_parameters_are_offered_anew_and_the_old_ones_closed(job: Job, driver: fake.Driver) -> None:
    model = module(on_device(driver, tensors()))
    trainer = Trainer(model)
    writer, engine = job.writer(trainer), Engine(module(on_device(driver, blank(tensors()))))
    reader = job.reader(engine)
    writer.publish(1)
    reader.update(1)
    before = trainer.binding()
    with trainer.mutation("offload and reload"):
        for p in model.parameters():
            p.data = fake.placed(driver, p.data + 5)
    writer.publish(2)
    reader.update(2)
    assert equal(engine, dict(model.named_parameters()))
    assert trainer.binding().generation > before.generation
    assert not set(trainer.binding().regions) & set(before.regions)
    transport = reader.member.cuda_ipc
    assert transport is not None
    (link,) = transport._links.values()
    assert link.regions == len(trainer.binding().regions)


def test_memory_released_and_resumed_at_the_same_addresses(job: Job, driver: fake.Driver) -> None:
    """What a sleep mode does: addresses stay, and other memory lies below them."""
    sizes = [fake.PAGE] * 3
    at = driver.virtual(sizes)
    held = fake._tensor(at, sum(sizes)).view(torch.float32)
    model = module({"w": held[: 2 * fake.PAGE // 4]})
    trainer = Trainer(model)
    model.w.data.copy_(stamped(2 * fake.PAGE // 4))
    writer, engine = (
        job.writer(trainer),
        Engine(module(on_device(driver, {"w": torch.zeros(2 * fake.PAGE // 4)}))),
    )
    reader = job.reader(engine)
    writer.publish(1)
    reader.update(1)
    first = trainer.binding()
    assert trainer.binding() is first
    writer.close_window()
    driver.release(at, sum(sizes))
    with pytest.raises(TransportError):
        trainer.binding()
    driver.virtual(sizes, at)
    model.w.data.copy_(stamped(2 * fake.PAGE // 4, start=9))
    assert trainer.binding().generation > first.generation
    assert trainer.binding().region.tolist() == first.region.tolist()
    writer.publish(2)
    reader.update(2)
    assert equal(engine, {"w": stamped(2 * fake.PAGE // 4, start=9)})


def test_a_byte_that_changes_inside_the_window_is_found(job: Job, driver: fake.Driver) -> None:
    model = module(on_device(driver, tensors()))
    writer, engine = job.writer(Trainer(model)), Engine(module(on_device(driver, blank(tensors()))))
    reader = job.reader(engine)

    def change() -> None:
        model.get_parameter("b.weight").data[3, 4] += 1

    writer.publish(1).wait()
    with faults.arm("cuda_ipc.before_first_byte", change), pytest.raises(SynclineError) as caught:
        reader.update(1, timeout=10.0)
    assert "b.weight" in str(caught.value)
    assert DigestMismatchError.__name__ in repr(caught.value) or "published" in str(caught.value)


def test_a_gpu_and_host_memory_do_not_meet(job: Job, driver: fake.Driver) -> None:
    writer = job.writer(Trainer(module(on_device(driver, tensors()))))
    reader = job.reader(Engine(module(blank(tensors()))))
    writer.publish(1)
    with pytest.raises(SynclineError, match="no transport from"):
        reader.update(timeout=10.0)


def test_parameters_on_several_devices_are_refused_by_name(job: Job, driver: fake.Driver) -> None:
    mixed = on_device(driver, tensors()) | {"b.weight": torch.empty(7, 13, device="meta")}
    with pytest.raises(SynclineError, match="several devices") as caught:
        placed.device_of(list(mixed.values()), list(mixed), "writer 0")
    assert "b.weight" in str(caught.value)


def test_lanes_follow_where_both_ends_lie() -> None:
    def end(host: str, card: str = "", apart: tuple[str, ...] = ()) -> Endpoint:
        addresses = {"shm": "/s", "gloo": "127.0.0.1"}
        if card:
            addresses |= {"cuda_ipc": "/c", "nccl": Card(device=card, version=1, apart=list(apart)).encode()}
        return Endpoint(job="j", id=host + card, name="n", host=host, uid=0, addresses=addresses)

    assert lane_of(end("h"), end("h"), None) == "shm"
    assert lane_of(end("h"), end("g"), None) == "gloo"
    assert lane_of(end("h", "0"), end("h", "1"), None) == "cuda_ipc"
    assert lane_of(end("h", "0"), end("h", "0"), None) == "cuda_ipc"
    assert lane_of(end("h", "0"), end("h", "1", ("0",)), None) == "nccl"
    assert lane_of(end("h", "0"), end("g", "1"), None) == "nccl"
    assert lane_of(end("h", "0"), end("h", "1"), "nccl") == "nccl"
    for ends, only in (((end("h"), end("h", "0")), None), ((end("h", "0"), end("h", "1")), "shm")):
        with pytest.raises(TransportError):
            lane_of(*ends, only)


def test_messages_between_gpus_that_cannot_map_each_other(
    run_dir: Path, driver: fake.Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same faces over ``nccl``: the writer sends, behind `publish`."""
    cards = iter(range(100))

    def nccl(self: member.Member) -> NcclTransport:
        made = NcclTransport(
            self.job,
            self._meet,
            self.process_id,
            "127.0.0.1",
            device=fake.FakeDevice(f"gpu-{next(cards)}"),
            after=self.cuda_ipc.hold if self.cuda_ipc is not None else None,
        )
        self._closing.callback(made.close, 2.0)
        return made

    patched = member.cached_property(nccl)
    patched.__set_name__(member.Member, "nccl")
    monkeypatch.setattr(member.Member, "nccl", patched)
    with Job("messages", transport="nccl") as job:
        model = module(on_device(driver, tensors()))
        writer = job.writer(Trainer(model))
        engine = Engine(module(on_device(driver, blank(tensors()))))
        reader = job.reader(engine)
        for number in (1, 2):
            writer.publish(number)
            reader.update(number, verify="installed")
            assert equal(engine, dict(model.named_parameters()))
            writer.close_window()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(2)


def test_bindings_are_made_anew_only_when_something_moved(driver: fake.Driver) -> None:
    segments = DeviceSegments(0)
    held = [driver.allocate(fake.PAGE) for _ in range(3)]
    places, sizes = [t.data_ptr() for t in held], [t.nbytes for t in held]
    first = segments.bind(b"f" * 16, places, sizes)
    assert segments.bind(b"f" * 16, places, sizes) is first
    assert segments.bind(b"g" * 16, places, sizes) is not first
    other = segments.bind(b"g" * 16, places[:2], sizes[:2])
    assert len(other) == 2
    assert np.array_equal(other.addresses(), places[:2])
    driver.release(places[0], fake.PAGE)
    with pytest.raises(TransportError):
        segments.bind(b"g" * 16, places[:2], sizes[:2])
    assert driver.depth.value == 0


def test_a_writer_gives_its_memory_back_on_demand(job: Job, driver: fake.Driver) -> None:
    model = module(on_device(driver, tensors()))
    writer, engine = job.writer(Trainer(model)), Engine(module(on_device(driver, blank(tensors()))))
    reader = job.reader(engine)
    writer.publish(1)
    reader.update(1)
    transport = reader.member.cuda_ipc
    assert transport is not None
    (link,) = transport._links.values()
    assert link.regions > 0
    writer.release(timeout=5.0)
    assert link.regions == 0
    with torch.no_grad():
        model.get_parameter("a.bias").add_(3)
    writer.publish(2)
    reader.update(2)
    assert equal(engine, dict(model.named_parameters()))
    with pytest.raises((RevokedError, SynclineError)):
        link.pointers([(999, 1)])


def _another(job: str, results: Any) -> None:
    """Be an engine in a process of its own: what it reads it has to map."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        driver = fake.install(patch)
        engine = Engine(module(on_device(driver, blank(tensors()))))
        with Job(job, connect_timeout=100.0, update_timeout=60.0, stall=30.0) as made:
            reader = made.reader(engine)
            for number in (1, 2):
                reader.update(number, timeout=60.0, verify="installed")
                results.put({name: t.float().tolist() for name, t in engine.live_tensors().items()})
            results.put([entry for entry in driver.log if entry[0] == "open"])


@pytest.mark.timeout(240)
def test_another_process_maps_each_segment_once(job: Job, driver: fake.Driver) -> None:
    model = module(on_device(driver, tensors()))
    trainer = Trainer(model)
    writer = job.writer(
        trainer, options=Options(**{**OPTIONS, "connect_timeout": 100.0, "update_timeout": 60.0})
    )
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=_another, args=("devices", results), daemon=True)
    child.start()
    writer.await_readers("a", timeout=100.0)
    for number in (1, 2):
        writer.publish(number)
        got = results.get(timeout=100.0)
        assert got == {name: p.data.float().tolist() for name, p in model.named_parameters()}
        writer.close_window()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(7)
    assert len(results.get(timeout=30.0)) == len(trainer.binding().regions)
    child.join(30.0)
