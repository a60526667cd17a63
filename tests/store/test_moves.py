"""A trainer whose memory moves, changes or is refreshed late: rebound, refused by name, or finished first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from syncline.errors import AdapterError, SynclineError, VersionAbortedError
from syncline.layout import Rules
from syncline.meta.client import MetaClient
from syncline.plan.plan import Plan
from tests.store.pair import Engine, Trainer, module, stamped

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncline.protocol.messages import Message
    from syncline.store.reader import WeightReader
    from syncline.store.writer import WeightWriter
    from tests.store.pair import Job


class Net(nn.Module):
    def __init__(self, fill: float | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))
        if fill is not None:
            for tensor in self.state_dict().values():
                tensor.fill_(fill)


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def joined(job: Job, trained: nn.Module, served: nn.Module) -> tuple[WeightWriter, WeightReader, Trainer]:
    trainer = Trainer(trained)
    return job.writer(trainer), job.reader(Engine(served)), trainer


def offload_and_reload(model: nn.Module) -> None:
    """Leave nothing behind in the old memory, then load the weights into new memory."""
    live = [*model.parameters(), *model.buffers()]
    kept = [tensor.detach().clone() for tensor in live]
    for tensor in live:
        tensor.data = torch.empty(0)
    for tensor, values in zip(live, kept, strict=True):
        tensor.data = values.clone()


def clones(model: nn.Module) -> None:
    """Give every parameter and buffer new memory, as ``.to(device)`` and back does."""
    model._apply(lambda tensor: tensor.clone())


def one_by_hand(model: nn.Module) -> None:
    model.second.weight.data = model.second.weight.data.clone()


@pytest.mark.parametrize("move", [offload_and_reload, clones, one_by_hand])
def test_moved_storages_are_rebound_without_planning_anew(  # B28, B45, B110
    job: Job, move: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, served = Net(), Net(-1.0)
    writer, reader, trainer = joined(job, trained, served)
    writer.publish(1)
    reader.update(1)
    assert equal(trained, served)
    generation = trainer.binding().generation
    made: list[Plan] = []
    real = Plan.__init__
    monkeypatch.setattr(Plan, "__init__", lambda self, *a, **k: (made.append(self), real(self, *a, **k))[1])
    for number in (2, 3):
        with trainer.mutation("moved"):
            move(trained)
            for tensor in trained.state_dict().values():
                tensor.add_(float(number))
        writer.publish(number)
        report = reader.update(number, verify="installed")
        assert equal(trained, served)
        assert trainer.binding().generation > generation
        generation = trainer.binding().generation
        assert report.level == "installed"
    assert made == []


def test_every_second_version_finds_all_storages_elsewhere(job: Job) -> None:
    trained, served = Net(), Net(-1.0)
    writer, reader, trainer = joined(job, trained, served)
    for number in range(1, 9):
        with trainer.mutation("step"):
            if number % 2 == 0:
                clones(trained)
            for tensor in trained.state_dict().values():
                tensor.mul_(1.5)
        writer.publish(number)
        reader.update(number)
        assert equal(trained, served)
    report = reader.update()
    assert not report.changed


def test_weights_that_are_offloaded_at_publish_are_named_and_come_back(job: Job) -> None:
    trained, served = Net(), Net(-1.0)
    writer, reader, trainer = joined(job, trained, served)
    writer.publish(1)
    first = reader.update(1)
    home = trained.second.weight.data
    with trainer.mutation("offload"):
        trained.second.weight.data = torch.empty(0)
    publication = writer.publish(2)
    with pytest.raises(AdapterError) as caught:
        publication.wait()
    assert caught.value.tensor == "second.weight"
    with pytest.raises(AdapterError), trainer.mutation("reload"):
        pass  # the trainer hears of it once more, where it would change the weights
    trained.second.weight.data = home
    with trainer.mutation("step"):
        home.add_(1.0)
    writer.publish(3)
    assert reader.committed == first.key
    assert reader.update(3).key.number == 3
    assert equal(trained, served)


def test_a_changed_dtype_is_refused_by_name_and_later_versions_work(job: Job) -> None:  # B29
    trained, served = Net(), Net(-1.0)
    writer, reader, trainer = joined(job, trained, served)
    writer.publish(1)
    first = reader.update(1)
    with trainer.mutation("to half"):
        trained.first.to(torch.float16)
    publication = writer.publish(2)
    with pytest.raises(AdapterError, match="changed its dtype") as caught:
        publication.wait()
    assert caught.value.tensor == "first.weight"
    assert (caught.value.expected, caught.value.found) == ("torch.float32", "torch.float16")
    with pytest.raises(AdapterError, match="changed its dtype"):
        writer.close_window()
    writer.close_window()  # it was told; nothing is open
    with pytest.raises(SynclineError):
        reader.update(2, timeout=0.3)
    assert reader.committed == first.key
    assert not reader.dirty
    with trainer.mutation("and back"):
        trained.first.to(torch.float32)
        trained.first.bias.data.add_(3.0)
    writer.publish(3)
    assert reader.update(3).key.number == 3
    assert equal(trained, served)


def test_the_other_ranks_version_is_aborted_and_the_reader_hears_who_left_it(job: Job) -> None:
    models = [module({f"part.{rank}": stamped(4, start=10.0 * rank)}) for rank in range(2)]
    trainers = [Trainer(model, rank=rank, world=2) for rank, model in enumerate(models)]
    writers = [job.writer(trainer) for trainer in trainers]
    served = module({f"part.{rank}": torch.full((4,), -1.0) for rank in range(2)})
    reader = job.reader(Engine(served))
    for writer in writers:
        writer.publish(1)
    first = reader.update(1)
    home = models[1].part._parameters["1"].data
    models[1].part._parameters["1"].data = home.double()
    good, bad = writers[0].publish(2), writers[1].publish(2)
    with pytest.raises(AdapterError) as caught:
        bad.wait()
    assert (caught.value.tensor, caught.value.rank) == ("part.1", "writer 1")
    good.wait()
    with pytest.raises(AdapterError):
        writers[1].close_window()
    models[1].part._parameters["1"].data = home
    writers[1].publish(3)  # it goes on: version 2 will never be whole
    with pytest.raises(VersionAbortedError, match="writer 1 went on to version"):
        reader.update(2)
    assert reader.committed == first.key
    models[0].part._parameters["0"].data.add_(5.0)
    writers[0].publish(3)
    assert reader.update(3).key.number == 3
    assert served.part._parameters["0"].tolist() == [5.0, 6.0, 7.0, 8.0]
    assert served.part._parameters["1"].tolist() == [10.0, 11.0, 12.0, 13.0]


class Lazy(nn.Module):
    """Its weight is a copy of the main weight, refreshed ahead of each forward pass only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, bias=False)
        self.main = nn.Parameter(self.layer.weight.detach().clone())
        self.layer.weight.requires_grad_(requires_grad=False)
        self.register_forward_pre_hook(lambda *_: self.refresh())

    def refresh(self) -> None:
        self.layer.weight.data.copy_(self.main.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.main)


def test_lazily_refreshed_weights_are_finished_before_a_version_opens(job: Job) -> None:  # B108
    trained = Lazy()
    optimizer = torch.optim.SGD([trained.main], lr=0.5)
    calls: list[bool] = []

    def finish() -> None:
        trained.refresh()
        calls.append(writer._current is None)

    trainer = Trainer(trained, optimizer, quiesce=finish)
    writer = job.writer(trainer, rules=Rules(extras=("main",)))
    served = module({"layer.weight": torch.full((3, 4), -1.0)})
    reader = job.reader(Engine(served))
    for number in (1, 2):
        trained(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert not torch.equal(trained.layer.weight, trained.main)
        writer.publish(number)
        reader.update(number)
        assert torch.equal(served.layer.weight, trained.main)
    assert calls == [True, True]  # while no window was open


def test_a_step_waits_for_its_window_and_readers_never_meet_half_a_step(job: Job) -> None:
    trained, served = Net(), Net(-1.0)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    writer = job.writer(Trainer(trained, optimizer))
    reader = job.reader(Engine(served))
    for number in (1, 2, 3):
        writer.publish(number)
        want = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
        reader.update(number)
        trained.second(trained.first(torch.ones(2, 5))).sum().backward()
        optimizer.step()
        assert writer._current is None
        assert all(torch.equal(want[n], t) for n, t in served.state_dict().items())
        assert not equal(trained, served)


def test_an_optimizer_that_nobody_named_closes_the_window_too(job: Job) -> None:
    trained = Net()
    writer = job.writer(Trainer(trained))
    job.reader(Engine(Net(-1.0)))
    writer.publish(1)
    trained.second(trained.first(torch.ones(2, 5))).sum().backward()
    torch.optim.Adam(trained.parameters()).step()
    assert writer._current is None


def test_publishing_needs_no_reader(job: Job) -> None:
    trained, served = Net(), Net(-1.0)
    writer = job.writer(Trainer(trained))
    assert writer.publish(1).wait().number == 1
    assert writer.publish(2).readers == ()
    reader = job.reader(Engine(served))
    assert reader.update().key.number == 2  # a late reader gets the version whose window is open
    assert equal(trained, served)


def test_an_update_before_which_nothing_moved_sends_no_metadata(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, served = Net(), Net(-1.0)
    writer, reader, trainer = joined(job, trained, served)
    writer.publish(1)
    reader.update(1)
    sent: list[str] = []
    real = MetaClient.request

    def request(self: MetaClient, message: Message, deadline: float | None = None) -> object:
        sent.append(type(message).__name__)
        return real(self, message, deadline)

    monkeypatch.setattr(MetaClient, "request", request)
    metadata = {"PutManifest", "GetManifest", "PutBinding", "GetBinding"}
    for number in (2, 3):
        with trainer.mutation("a step"):
            trained.first.weight.data.fill_(float(number))
        writer.publish(number)
        reader.update(number)
        assert equal(trained, served)
    assert "Put" in sent
    assert not metadata & set(sent)
    with trainer.mutation("moved"):
        clones(trained)
    writer.publish(4)
    reader.update(4)
    assert sent.count("PutBinding") == sent.count("GetBinding") == 1
