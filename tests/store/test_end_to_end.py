"""One writer and one reader in one process: the whole path, and what it refuses."""

from __future__ import annotations

import torch
from torch import nn

from syncline.adapters.fsdp import FSDPTrainer
from syncline.adapters.module import ModuleEngine
from syncline.store.reader import WeightReader
from syncline.store.writer import WeightWriter


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4, bias=False))


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def test_two_versions_arrive_in_place(run_dir: object) -> None:
    train, serve = model(1), model(2)
    optimizer = torch.optim.SGD(train.parameters(), lr=0.1)
    engine = ModuleEngine(serve)
    pointers = [p.data_ptr() for p in serve.parameters()]
    with (
        WeightWriter(FSDPTrainer(train, optimizer), job="e2e") as writer,
        WeightReader(engine, instance="a", job="e2e") as reader,
    ):
        if True:
            publication = writer.publish(1)
            report = reader.update(1)
            assert same(train, serve)
            assert report.nbytes == sum(p.nbytes for p in serve.parameters())
            assert publication.wait_committed() == ("a",)
            train(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            assert not same(train, serve)
            writer.publish(2)
            second = reader.update(2, verify="installed")
            assert same(train, serve)
            assert (str(second.key), second.level) == ("1.2", "installed")
            assert reader.committed == second.key
            assert not reader.dirty
    assert [p.data_ptr() for p in serve.parameters()] == pointers
