"""The parts of the Megatron adapter that need no Megatron: watching exporters, vocabularies, refusals."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from syncline.adapters.megatron import learn, state
from syncline.adapters.megatron.quiet import Group, Quiet, quiet
from syncline.adapters.megatron.trace import Held, trace
from syncline.adapters.megatron.trainer import MegatronTrainer
from syncline.errors import AdapterError, CoverageError, LayoutError
from syncline.layout.box import Box
from syncline.layout.view import View
from syncline.layout.written import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from syncline.adapters.megatron.trace import Exported


def watch(
    live: dict[str, tuple[int, ...]], export: Callable[..., Iterable[tuple[str, torch.Tensor]]]
) -> Exported:
    """Watch an exporter on float32 tensors of these shapes."""
    answers: list[Quiet] = []

    def watched(tracer: Any) -> Any:
        answers.append(Quiet(tracer.stand_in))
        return quiet(answers[0])

    return trace({n: Spec(s, "float32") for n, s in live.items()}, export, watched)


def values(made: Exported, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return checkpoint tensors filled with what is held; -1 elsewhere."""
    found = {name: torch.full(shape, -1.0) for name, shape in made.shapes.items()}
    for one in made.held:
        where = tuple(slice(o, o + n) for o, n in zip(one.box.offset, one.box.size, strict=True))
        axes = list(one.view.axes())
        flat = live[one.live].reshape(-1)
        part = flat.as_strided([n for n, _ in axes], [s for _, s in axes], one.view.offset)
        found[one.name][where] = part.reshape(one.box.size)
    return found


def gathered(tensor: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return torch.cat(parts, dim=dim)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gather_is_answered_by_the_own_part_and_stand_ins(rank: int) -> None:
    group = Group(2, rank, "tensor")
    made = watch({"w": (3, 4)}, lambda w: [("out", gathered(w["w"], group))])
    live = torch.arange(12.0).reshape(3, 4)
    expected = torch.full((6, 4), -1.0)
    expected[3 * rank : 3 * rank + 3] = live
    assert torch.equal(values(made, {"w": live})["out"], expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_interleaved_rows_picked_by_number_become_views(rank: int) -> None:
    """Two groups of (q, q, k, v) heads of 2 rows; each of two ranks holds one group."""
    group = Group(2, rank, "tensor")

    def export(w: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        heads = gathered(w["qkv"], group).view(8, 2, 5)
        pick = {"q": torch.tensor([0, 1, 4, 5]), "k": torch.arange(2, 8, 4), "v": torch.arange(3, 8, 4)}
        return [(name, heads[index].reshape(-1, 5)) for name, index in pick.items()]

    made = watch({"qkv": (8, 5)}, export)
    live = torch.arange(40.0).reshape(8, 5)
    found = values(made, {"qkv": live})
    assert torch.equal(found["q"][4 * rank : 4 * rank + 4], live[:4])
    assert torch.equal(found["k"][2 * rank : 2 * rank + 2], live[4:6])
    assert torch.equal(found["v"][2 * rank : 2 * rank + 2], live[6:])
    assert sum(one.box.numel for one in made.held) == 40
    assert not made.replays


def test_heads_of_one_rank_are_one_nested_view() -> None:
    index = torch.cat([torch.arange(4 * i, 4 * i + 2) for i in range(8)])
    made = watch({"qkv": (64, 5)}, lambda w: [("q", w["qkv"].view(32, 2, 5)[index].reshape(-1, 5))])
    assert len(made.held) == 1
    assert made.held[0].view.shape[0] == (8, 4)


def test_gate_and_up_of_every_rank_are_cut_apart() -> None:
    group = Group(2, 1, "tensor")

    def export(w: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        parts = [torch.empty_like(w["fc1"]) for _ in range(2)]
        dist.all_gather(parts, w["fc1"], group=group)
        halves = [torch.chunk(part, 2, dim=0) for part in parts]
        return [("gate", torch.cat([g for g, _ in halves])), ("up", torch.cat([u for _, u in halves]))]

    made = watch({"fc1": (6, 2)}, export)
    live = torch.arange(12.0).reshape(6, 2)
    found = values(made, {"fc1": live})
    assert torch.equal(found["gate"][3:], live[:3])
    assert torch.equal(found["up"][3:], live[3:])
    assert bool((found["gate"][:3] == -1).all())


def test_what_is_computed_is_recorded_and_computed_again() -> None:
    def export(w: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        shifted = w["norm"].clone()
        shifted.data += 1
        return [("norm", shifted)]

    made = watch({"norm": (4,)}, export)
    assert made.held == ()
    assert [str(box) for box in made.computed["norm"]] == [str(Box((0,), (4,)))]
    live, out = torch.tensor([0.5, -1.0, 0.0, 2.0]), {"norm": torch.zeros(4)}
    made.replays[0].run({"norm": live}, out)
    assert torch.equal(out["norm"], live + 1)


def test_a_computation_with_peers_elements_is_refused_by_name() -> None:
    group = Group(2, 0, "tensor")
    with pytest.raises(LayoutError) as caught:
        watch({"w": (4,)}, lambda w: [("sum", gathered(w["w"], group).view(2, 4).sum(0))])
    assert caught.value.tensor == "sum"


def test_what_peers_compute_alone_is_theirs() -> None:
    group = Group(2, 0, "tensor")
    made = watch(
        {"w": (4,)}, lambda w: [("double", torch.cat([p * 2 for p in gathered(w["w"], group).chunk(2)]))]
    )
    assert [str(box) for box in made.computed["double"]] == [str(Box((0,), (4,)))]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("all_reduce", lambda t, g: dist.all_reduce(t, group=g)),
        ("broadcast", lambda t, g: dist.broadcast(t, 0, group=g)),
        ("all_gather_object", lambda _t, g: dist.all_gather_object([None, None], 1, group=g)),
        ("all_gather_into_tensor", lambda t, g: dist.all_gather_into_tensor(t, t[:2], group=g)),
        ("barrier", lambda _t, g: dist.barrier(group=g)),
        ("isend", lambda t, g: dist.isend(t, 1, group=g)),
    ],
)
def test_a_mapping_that_communicates_is_refused_by_name(name: str, call: Callable[..., object]) -> None:
    group = Group(2, 0, "tensor")
    answers = Quiet(lambda tensor, _peer: tensor)
    answers.current = "decoder.layers.3.weight"
    with quiet(answers), pytest.raises(AdapterError) as caught:
        call(torch.zeros(4), group)
    assert "communicates" in str(caught.value)
    assert name in str(caught.value.found)
    assert caught.value.tensor == "decoder.layers.3.weight"


def test_a_fake_group_offers_nothing_but_size_and_rank() -> None:
    with pytest.raises(AdapterError, match="communicates"):
        Group(4, 1, "expert").allgather([])


def test_collectives_past_the_functions_are_refused_as_well() -> None:
    with quiet(Quiet(lambda tensor, _peer: tensor)), pytest.raises(AdapterError, match="communicates"):
        torch.ops._c10d_functional.all_reduce(torch.zeros(2), "sum", "group")


def test_other_threads_and_what_comes_after_communicate_as_before() -> None:
    seen: list[str] = []

    def other() -> None:
        try:
            dist.barrier()
        except Exception as error:
            seen.append(type(error).__name__)

    original = dist.all_reduce
    with quiet(Quiet(lambda tensor, _peer: tensor)):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == ["ValueError"]  # torch's own: no process group here
    assert dist.all_reduce is original


# ------------------------------------------------------------------------------------------- vocabulary, ties


def held(name: str, rows: int, low: int = 0, of: int | None = None) -> Held:
    return Held(
        name, (of or rows, 3), "float32", Box((low, 0), (rows, 3)), "w", View.contiguous(0, 0, (rows, 3))
    )


@pytest.mark.parametrize(
    ("low", "kept"), [(0, 4), (4, 4), (8, 2), (12, 0)], ids=["whole", "second", "cut", "padding only"]
)
def test_rows_of_padding_are_not_published(low: int, kept: int) -> None:
    found = learn.cropped(held("embed", 4, low, 16), 10)
    assert (found.box.size[0] if found else 0) == kept
    if found:
        assert found.shape == (10, 3)
        assert found.view.size == found.box.size


def test_same_elements_under_two_names_are_an_alias() -> None:
    assert learn.same_elements([held("embed", 4), held("head", 4), held("other", 3)]) == {"head": "embed"}


# ------------------------------------------------------------------------------------------- refusals


class Quantised(torch.Tensor):
    """A wrapper, as TransformerEngine's quantised parameters are: no memory of its own behind it."""

    @staticmethod
    def __new__(cls, payload: torch.Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, payload.shape, dtype=torch.bfloat16)

    def __init__(self, payload: torch.Tensor) -> None:
        self.payload = payload

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Quantised(args[0].payload)
        raise AssertionError(func)


def chunk_of(**tensors: torch.Tensor) -> torch.nn.Module:
    made = torch.nn.Module()
    for name, tensor in tensors.items():
        made.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return made


def test_a_quantised_parameter_is_refused_by_name() -> None:
    chunk = chunk_of(plain=torch.zeros(2), fp8=Quantised(torch.zeros(2, dtype=torch.uint8)))
    with pytest.raises(AdapterError, match="quantised") as caught:
        state.live_tensors(state.walk_chunks([chunk]), 0)
    assert caught.value.tensor == "0.fp8"
    assert "Quantised" in str(caught.value.found)


def test_an_offloaded_parameter_is_refused_by_name() -> None:
    with pytest.raises(AdapterError, match="offloaded") as caught:
        state.live_tensors(state.walk_chunks([chunk_of(a=torch.zeros(2), b=torch.zeros(0))]), 0)
    assert caught.value.tensor == "0.b"


class Described(torch.nn.Module):
    """A chunk that says which rows of a whole tensor it holds, as Megatron's models do."""

    def __init__(self, rows: torch.Tensor, low: int, of: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(rows)
        self._low, self._of = low, of

    def sharded_state_dict(self, metadata: Any = None) -> dict[str, Any]:
        one = SimpleNamespace(
            key="block.weight",
            data=self.weight.detach(),
            global_shape=(self._of, 4),
            global_offset=(self._low, 0),
        )
        return {"weight": one}


def test_an_exporter_of_whole_tensors_needs_to_know_nothing_of_ranks() -> None:
    rows = torch.arange(8.0).reshape(2, 4)

    def exporter(whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        top, bottom = whole["block.weight"].chunk(2)
        return {"top": top.t(), "bottom": bottom.t()}

    with pytest.raises(CoverageError) as caught:  # rows 0 and 1 are held by nobody
        MegatronTrainer(Described(rows, 2, 4), exporter=exporter, rank=0, world=1)
    assert caught.value.tensor == "top"
    both = torch.arange(16.0).reshape(4, 4)
    trainer = MegatronTrainer(Described(both, 0, 4), exporter=exporter, rank=0, world=1)
    shards = {shard.name: shard for shard in trainer.manifest.shards()}
    assert shards["top"].global_shape == (4, 2)
    assert shards["bottom"].view.offset == 8
    assert shards["bottom"].view.stride == ((1,), (4,))


def test_an_exporter_that_forgets_a_parameter_is_told() -> None:
    chunk = Described(torch.zeros(4, 4), 0, 4)
    chunk.register_parameter("more", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(AdapterError, match="does not know") as caught:
        MegatronTrainer(chunk, exporter=lambda whole: {"w": whole["block.weight"]}, rank=0, world=1)
    assert caught.value.tensor == "0.more"
    MegatronTrainer(
        chunk, exporter=lambda whole: {"w": whole["block.weight"]}, rank=0, world=1, local=["*.more"]
    )


def test_without_a_bridge_an_exporter_is_asked_for() -> None:
    with pytest.raises(AdapterError, match="a bridge or an exporter"):
        MegatronTrainer(chunk_of(a=torch.zeros(2)), rank=0, world=1)


def test_steps_of_chained_optimizers_are_mutations() -> None:
    chunk = Described(torch.zeros(4, 4), 0, 4)
    inner = torch.optim.SGD(chunk.parameters(), lr=0.1)
    chained = SimpleNamespace(
        chained_optimizers=[SimpleNamespace(optimizer=inner), SimpleNamespace(optimizer=None)]
    )
    trainer = MegatronTrainer(
        chunk, chained, exporter=lambda whole: {"w": whole["block.weight"]}, rank=0, world=1
    )
    seen: list[str] = []
    trainer.on_mutation(seen.append)
    inner.step()
    with trainer.mutation("offload"):
        pass
    assert seen == ["optimizer.step", "offload"]
