"""Memory of every form arrives right: tied, fused, transposed, scalar; and nothing beside it changes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from syncline.errors import ReplicaDivergenceError, SynclineError
from syncline.layout import Rules
from tests.store.pair import Engine, Trainer, blank, module, shard, stamped

if TYPE_CHECKING:
    from syncline.layout import Shard
    from tests.store.pair import Job


def changed(tensors: list[torch.Tensor], by: float) -> None:
    for tensor in tensors:
        tensor.data.add_(by)


# --- tied embeddings


def embedding(head: torch.Tensor | None, embed: torch.Tensor) -> nn.Module:
    """A model whose head is tied to its embedding, unless it gets one of its own."""
    model = module({"embed.weight": embed, "body.w": stamped(3, start=500)})
    model.add_module("head", nn.Module())
    parameter = model.embed.weight if head is None else nn.Parameter(head, requires_grad=False)
    model.head.register_parameter("weight", parameter)
    return model


def hollow(*, tied: bool) -> nn.Module:
    model = embedding(None if tied else torch.full((5, 4), -1.0), torch.full((5, 4), -1.0))
    model.body.w.data.fill_(-1.0)
    return model


@pytest.mark.parametrize("reads_tied", [True, False])
@pytest.mark.parametrize("writes_tied", [True, False])
def test_tied_and_untied_sides_in_every_combination(job: Job, writes_tied: bool, reads_tied: bool) -> None:
    embed = stamped(5, 4)
    model = embedding(None if writes_tied else embed.clone(), embed)  # B19
    trainer = Trainer(model)
    writer = job.writer(trainer)
    served = hollow(tied=reads_tied)
    reader = job.reader(Engine(served))
    for number in (1, 2):
        changed([p.data for p in model.parameters()], 1000.0 * number)
        writer.publish(number)
        report = reader.update(number, verify="installed")
        assert torch.equal(served.embed.weight, model.embed.weight)
        assert torch.equal(served.head.weight, model.head.weight)
        assert torch.equal(served.body.w, model.body.w)
        copies = 1 if reads_tied else 2
        assert report.nbytes == (20 * copies + 3) * 4  # B22: a tied tensor's bytes travel once
    assert (served.head.weight is served.embed.weight) == reads_tied
    assert sum(trainer.manifest.storage_nbytes.tolist()) == (20 * (1 if writes_tied else 2) + 3) * 4


def test_an_untied_head_of_other_contents_cannot_feed_a_tied_reader(job: Job) -> None:
    writer = job.writer(Trainer(embedding(stamped(5, 4, start=50), stamped(5, 4))))
    served = hollow(tied=True)
    reader = job.reader(Engine(served))
    publication = writer.publish(1)
    with pytest.raises(SynclineError):
        reader.update(1, timeout=5.0)
    with pytest.raises(ReplicaDivergenceError, match="held twice by one rank") as caught:
        publication.wait()
    assert caught.value.tensor == "embed.weight"
    assert reader.committed is None
    with pytest.raises(ReplicaDivergenceError):
        writer.close_window()  # the trainer hears it, and may go on


def test_two_names_and_a_view_of_one_storage_travel_once(job: Job) -> None:  # B22
    flat = stamped(12)
    model = module({"a": flat[:6], "b": flat[6:], "whole": flat})
    model.register_parameter("twin", model.a)
    writer = job.writer(Trainer(model))
    served = module(
        {"a": torch.full((6,), -1.0), "b": torch.full((6,), -1.0), "whole": torch.full((12,), -1.0)}
    )
    served.register_parameter("twin", served.a)
    reader = job.reader(Engine(served))
    for number in (1, 2):
        changed([model.whole.data], 100.0)
        writer.publish(number)
        report = reader.update(number)
        assert torch.equal(served.whole, stamped(12) + 100.0 * number)
        assert torch.equal(flat, served.whole)  # an alias that nobody named moved along
        assert torch.equal(served.a, served.whole[:6])
        assert torch.equal(served.twin, served.a)
        assert torch.equal(served.b, served.whole[6:])
        assert report.nbytes == (6 + 6 + 12) * 4


# --- gate and up


GATE, UP = stamped(12, 6), stamped(12, 6, start=1000)


def fused(rank: int, world: int, *, interleaved: bool) -> list[Shard]:
    """Shards of one rank's fused (24 / world, 6) tensor: [gate_i; up_i], or row by row."""
    rows = 12 // world
    step, second = (12, 6) if interleaved else (6, rows * 6)
    box = ((12, 6), (rank * rows, 0), (rows, 6))
    return [
        shard("gate", *box, at=0, stride=(step, 1)),
        shard("up", *box, at=second, stride=(step, 1)),
    ]


def fuse(gate: torch.Tensor, up: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    return torch.stack([gate, up], 1).reshape(-1, 6) if interleaved else torch.cat([gate, up])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("world", [1, 3, 4])
def test_fused_gate_and_up_are_cut_by_rank_across_sizes(
    job: Job, world: int, interleaved: bool
) -> None:  # B06
    halves = [fuse(g, u, interleaved=interleaved) for g, u in zip(GATE.chunk(2), UP.chunk(2), strict=True)]
    models = [module({"gate_up": half.clone()}) for half in halves]
    writers = [
        job.writer(Trainer(m, shards=fused(r, 2, interleaved=interleaved), rank=r, world=2))
        for r, m in enumerate(models)
    ]
    engines = [
        Engine(
            module({"gate_up": torch.full((24 // world, 6), -1.0)}),
            shards=fused(rank, world, interleaved=interleaved),
            rank=rank,
            world=world,
        )
        for rank in range(world)
    ]
    for engine in engines[1:]:
        job.worker(engine)
    reader = job.reader(engines[0])
    for number in (1, 2):
        changed([m.gate_up.data for m in models], 10_000.0)
        for writer in writers:
            writer.publish(number)
        report = reader.update(number)
        want = [
            fuse(g, u, interleaved=interleaved) + 10_000.0 * number
            for g, u in zip(GATE.chunk(world), UP.chunk(world), strict=True)
        ]
        assert all(torch.equal(e.live_tensors()["gate_up"], w) for e, w in zip(engines, want, strict=True))
        assert report.nbytes == 2 * 72 * 4
        assert len(report.ranks) == world


def test_one_publish_feeds_a_fused_and_a_split_reader(job: Job) -> None:  # B07
    writer = job.writer(Trainer(module({"gate": GATE.clone(), "up": UP.clone()})))
    split = Engine(module({"gate": torch.full((12, 6), -1.0), "up": torch.full((12, 6), -1.0)}))
    joined = Engine(module({"mlp.gate_up": torch.full((24, 6), -1.0)}), shards=fused(0, 1, interleaved=False))
    readers = [job.reader(split, instance="split"), job.reader(joined, instance="fused")]
    publication = writer.publish(1)
    reports = [reader.update(1) for reader in readers]
    assert publication.wait_committed() == ("fused", "split")
    assert torch.equal(split.live_tensors()["gate"], GATE)
    assert torch.equal(split.live_tensors()["up"], UP)
    assert torch.equal(joined.live_tensors()["mlp.gate_up"], torch.cat([GATE, UP]))
    assert [(r.nbytes, r.coverage, r.tensors) for r in reports] == [(576, 1.0, 2)] * 2


# --- strides and scalars: B46 and B47


def test_bytes_beside_a_strided_destination_stay_as_they_are(job: Job) -> None:
    source = stamped(6, 8).t()  # (8, 6), not contiguous
    expanded, backwards = stamped(4, start=200), stamped(5, start=300)
    model = module({"turned": source[:, 1:4], "expanded": expanded, "backwards": backwards})
    turned = shard("turned", (8, 3), (0, 0), (8, 3), at=0, stride=(1, 8), storage=0)
    shards = [
        turned,
        shard("expanded", (3, 4), (0, 0), (3, 4), storage=1, stride=(0, 1)),
        shard("backwards", (5,), (0,), (5,), storage=2, at=4, stride=(-1,)),
    ]
    writer = job.writer(Trainer(model, shards=shards))
    holder, wide, thin = torch.full((8, 10), -7.0), torch.full((3, 9), -7.0), torch.full((10,), -7.0)
    served = module({"turned": holder[:, 2:5], "expanded": wide[:, 1::2], "backwards": thin[::2]})
    reader = job.reader(Engine(served))
    for number in (1, 2):
        changed([model.turned.data, model.expanded.data, model.backwards.data], 1000.0)
        writer.publish(number)
        report = reader.update(number, verify="installed")
        by = 1000.0 * number
        assert torch.equal(holder[:, 2:5], stamped(6, 8).t()[:, 1:4] + by)
        assert torch.equal(wide[:, 1::2], (stamped(4, start=200) + by).expand(3, 4))
        assert torch.equal(thin[::2], stamped(5, start=300).flip(0) + by)
        assert bool((holder[:, :2] == -7).all())
        assert bool((holder[:, 5:] == -7).all())
        assert bool((wide[:, ::2] == -7).all())
        assert bool((thin[1::2] == -7).all())
        assert report.nbytes == (24 + 12 + 5) * 4


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_scalars_of_every_dtype_arrive(job: Job, transport: str) -> None:
    values = {
        "f32": torch.tensor(3.25),
        "bf16": torch.tensor(-1.5, dtype=torch.bfloat16),
        "i64": torch.tensor(2**53 + 1),
        "u8": torch.tensor(200, dtype=torch.uint8),
        "flag": torch.tensor(True),
        "one": torch.tensor([7.0]),
        "empty": torch.empty(0, 4),
    }
    job.options = type(job.options)(
        connect_timeout=15.0, update_timeout=15.0, heartbeat=0.5, transport=transport
    )
    writer = job.writer(Trainer(module(values)))
    served = {n: torch.zeros_like(t) for n, t in values.items()}
    reader = job.reader(Engine(module(served)))
    writer.publish(1)
    report = reader.update(1)
    assert all(torch.equal(served[n], t) for n, t in values.items())
    assert report.nbytes == 4 + 2 + 8 + 1 + 1 + 4


# --- in place (B33, B34), buffers (B30, B31)


class Convolution(nn.Module):
    """A parent that keeps a view of its child's weight, and one that is a dictionary member."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 4, bias=False)
        self.conv.weight.requires_grad_(requires_grad=False).fill_(value)
        self.conv_weights = self.conv.weight.data.view(3, 8)
        self.held = {"row": self.conv.weight.data[1]}


def test_pointers_and_aliases_survive_three_updates(job: Job) -> None:
    trained, served = Convolution(0.0), Convolution(-1.0)
    writer = job.writer(Trainer(trained))
    reader = job.reader(Engine(served))
    tensors = [served.conv.weight, served.conv_weights, served.held["row"]]
    places = [(t.data_ptr(), t.untyped_storage().data_ptr(), id(t)) for t in tensors]
    for number in (1, 2, 3):
        value = stamped(3, 2, 4, start=100.0 * number)
        with writer.adapter.mutation("by hand"), torch.no_grad():
            trained.conv.weight.copy_(value)
        writer.publish(number)
        reader.update(number)
        assert torch.equal(served.conv.weight, value)
        assert torch.equal(served.conv_weights, value.view(3, 8))
        assert torch.equal(served.held["row"], value[1])
        now = [served.conv.weight, served.conv_weights, served.held["row"]]
        assert [(t.data_ptr(), t.untyped_storage().data_ptr(), id(t)) for t in now] == places


class Buffered(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((2, 3), fill), requires_grad=False)
        self.register_buffer("bias", torch.full((4,), fill))
        self.register_buffer("steps", torch.tensor(int(fill)))
        self.register_buffer("rope", torch.full((5,), fill), persistent=False)


def test_persistent_buffers_travel_and_others_stay(job: Job) -> None:
    trained, served = Buffered(7.0), Buffered(-1.0)
    writer = job.writer(Trainer(trained))
    engine = Engine(served)
    reader = job.reader(engine)
    writer.publish(1)
    report = reader.update(1)
    assert torch.equal(served.w, trained.w)
    assert torch.equal(served.bias, trained.bias)
    assert served.steps.item() == 7
    assert bool((served.rope == -1.0).all())
    assert report.nbytes == (6 + 4) * 4 + 8
    listed = {name: status.status.value for name, status in engine.live_status().items()}
    assert listed == {"w": "synced", "bias": "synced", "steps": "synced", "rope": "local"}


def test_an_engine_that_slept_is_whole_after_an_update_and_its_own_copies(job: Job) -> None:
    """B31: sleep loses every tensor. An update brings all that is synced, and the list says what it does not.

    What comes back lies where it was, as kernels' graphs want it, and holds anything.
    """
    trained, served = Buffered(7.0), Buffered(-1.0)
    writer = job.writer(Trainer(trained))
    engine = Engine(served)
    reader = job.reader(engine)
    writer.publish(1)
    reader.update(1)
    own = {
        n: engine.live_tensors()[n].clone() for n, s in engine.live_status().items() if s.status == "local"
    }
    for tensor in (*served.parameters(), *served.buffers()):
        tensor.data.fill_(math.nan if tensor.is_floating_point() else -999)
    with writer.adapter.mutation("by hand"), torch.no_grad():
        trained.w.fill_(9.0)
        trained.bias.fill_(10.0)
    writer.publish(2)
    reader.update(2, verify="installed")
    live = engine.live_tensors()
    lost = {name for name, tensor in live.items() if bool(tensor.isnan().any())}
    assert lost == own.keys() == {"rope"}
    for name, tensor in own.items():
        live[name].copy_(tensor)
    found = {name: tensor.unique().tolist() for name, tensor in live.items()}
    assert found == {"w": [9.0], "bias": [10.0], "steps": [7], "rope": [-1.0]}


def test_a_buffer_that_only_one_side_saves_is_named(job: Job) -> None:
    trained = Buffered(7.0)
    trained.register_buffer("rope", trained.rope, persistent=True)
    writer = job.writer(Trainer(trained))
    with pytest.raises(SynclineError, match=r"1 sent names that no rank wants, e\.g\. rope"):
        job.reader(Engine(Buffered(-1.0)))
    served = Buffered(-1.0)
    reader = job.reader(Engine(served), rules=Rules(extras=("rope",)))
    writer.publish(1)
    reader.update(1)
    assert bool((served.rope == -1.0).all())


# --- the two-sided transport; bucket sizes, B42


def test_both_transports_install_the_same(job: Job) -> None:
    values = {"cast": torch.randn(9, 7), "turned": stamped(6, 8).t(), "w": stamped(3, 5, start=700)}
    found = {}
    for transport in ("shm", "gloo"):
        options = type(job.options)(
            connect_timeout=15.0, update_timeout=15.0, heartbeat=0.5, transport=transport
        )
        model = module({n: t.clone() for n, t in values.items()})
        writer = job.writer(Trainer(model), table=transport, options=options)
        holder = torch.full((8, 20), -7.0)
        target = {"cast": torch.full((9, 7), -1, dtype=torch.bfloat16), "turned": holder[:, 3:15:2]}
        engine = Engine(module(target | {"w": torch.full((3, 5), -1.0)}))
        reader = job.reader(engine, table=transport, options=options, rules=Rules(casts={"cast": "bfloat16"}))
        for number in (1, 2):
            with writer.adapter.mutation("step"):
                changed([p.data for p in model.parameters()], 0.375)
            writer.publish(number)
            report = reader.update(number, verify="installed")
            assert report.level == "installed"
            assert report.nbytes == 63 * 2 + 48 * 4 + 15 * 4
        assert torch.equal(target["cast"], model.cast.bfloat16())
        assert torch.equal(target["turned"], model.turned)
        holder[:, 3:15:2] = -7.0
        assert bool((holder == -7.0).all())
        found[transport] = {n: t.clone() for n, t in engine.live_tensors().items() if n != "turned"}
    assert all(torch.equal(found["shm"][n], t) for n, t in found["gloo"].items())


def test_a_result_does_not_depend_on_the_bucket_size(  # B09
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    from syncline.transport import gloo  # noqa: PLC0415 - torch.distributed, only here
    from syncline.transport.base import Staging  # noqa: PLC0415

    values = {f"layers.{i}.w": stamped(5 + i, 8, start=1000.0 * i) for i in range(12)}
    values["a.large"] = stamped(40, 50, start=50_000)
    values["experts.w13"] = stamped(8, 12, 8, start=90_000)  # more than the smaller buckets hold
    largest = values["a.large"].nbytes
    job.options = type(job.options)(
        connect_timeout=15.0, update_timeout=15.0, heartbeat=0.5, transport="gloo"
    )
    model = module(values)
    writer = job.writer(Trainer(model))
    for number, bucket in enumerate((256, 1024, largest + 16, 1 << 28), 1):
        monkeypatch.setattr(gloo, "Staging", lambda bucket=bucket: Staging(bucket=bucket))
        calls: list[torch.Tensor] = []
        engine = Engine(module(blank(values)), after_update=lambda m, calls=calls: calls.append(m.a.large[0]))
        reader = job.reader(engine, instance=f"bucket-{bucket}")
        with writer.adapter.mutation("by hand"):
            changed([p.data for p in model.parameters()], 1.0)
        writer.publish(number)
        report = reader.update(number)
        live = engine.live_tensors()
        assert all(torch.equal(live[n], p) for n, p in model.named_parameters())
        assert len(calls) == 1
        assert report.nbytes == sum(t.nbytes for t in values.values())
        reader.close()
