"""The adapter on small models of its own, without SGLang: what is direct, what is staged, what is refused."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from syncline.adapters.sglang import commands, host, layout, postload, staging
from syncline.adapters.sglang.adapter import SGLangAdapter
from syncline.adapters.sglang.errands import Errands
from syncline.adapters.sglang.tensors import Geometry, slots, values
from syncline.adapters.sglang.twin import Learned
from syncline.errors import AdapterError, NameMismatchError, ProtocolError, to_wire
from syncline.layout.loader import Spec, trace_loader
from syncline.store.adapter import Stage

if TYPE_CHECKING:
    from collections.abc import Iterable


class Plain:
    """A method that leaves weights alone."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.ready = True


class Transposed(Plain):
    """Repacks in place of the parameter, into new memory; can be undone."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight.data = layer.weight.data.t().contiguous()

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        if tuple(layer.weight.shape) != layer.loaded:
            layer.weight.data = layer.weight.data.t().contiguous()


class OneWay(Plain):
    """Repacks, and offers no way back."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight.data = layer.weight.data.t().contiguous()


class Scaled(Plain):
    """Rewrites weights where they are."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight.data.mul_(2)


class Packed(Plain):
    """Leaves the parameter, and gives the kernel a copy."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.packed = layer.weight.data * 1.0


class Looking(Plain):
    """Keeps what it saw of the weights where no module shows it."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.seen = layer.weight.data.sum()


class Layer(nn.Module):
    """A linear layer whose weight its method may repack."""

    def __init__(self, method: Any, rows: int = 6, columns: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns), requires_grad=False)
        self.loaded = (rows, columns)
        self.quant_method = method


class Model(nn.Module):
    """Two layers and a norm; the loader computes one tensor, pads another, and derives a third."""

    def __init__(self, methods: Iterable[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(method) for method in methods)
        self.norm = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.decay = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.table = torch.arange(3.0)
        self.absorbed: torch.Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        mine = dict(self.named_parameters())
        for name, tensor in weights:
            target = mine[name].data
            if name == "decay":
                target.copy_(tensor)
                target.neg_()
            else:
                target[: tensor.shape[0]].copy_(tensor)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        fresh = self.norm.data * 3
        if self.absorbed is None:
            self.absorbed = fresh
        else:
            self.absorbed.copy_(fresh)


CHECKPOINT = {
    "layers.0.weight": Spec((6, 4), "float32"),
    "layers.1.weight": Spec((5, 4), "float32"),  # one row fewer than the layer: it is padded
    "norm": Spec((4,), "float32"),
    "decay": Spec((4,), "float32"),
}


def learned(methods: list[Any]) -> Learned:
    with torch.device("meta"):
        twin = Model(methods)
    before = set(slots(twin))

    def state() -> dict[str, torch.Tensor]:
        return dict(twin.named_parameters())

    with torch.device("meta"):
        trace = trace_loader(state(), twin.load_weights, CHECKPOINT, state=state)
    after = slots(twin)
    forms = {name: Geometry.of(slot.get()) for name, slot in after.items()}
    return Learned(twin, trace, forms, frozenset(set(after) - before))


def weights(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(spec.shape, generator=made) for name, spec in CHECKPOINT.items()}


def fresh(methods: list[Any], seed: int) -> Model:
    """Load as an engine does: weights, then post-processing."""
    model = Model(methods)
    model.load_weights(weights(seed).items())
    for layer in model.layers:
        layer.quant_method.process_weights_after_loading(layer)
    return model


def inspect(method: Any) -> list[postload.Processed]:
    with torch.device("meta"):
        twin = Model([method])
    found = postload.inspect(twin, "cpu")
    assert all(parameter.device.type == "meta" for parameter in twin.parameters())
    return found


def test_weights_that_post_processing_leaves_alone_are_direct() -> None:
    assert inspect(Plain()) == []


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (Transposed(), "replaces weight: (6, 4) becomes (4, 6)"),
        (Scaled(), "rewrites weight"),
        (Packed(), "makes packed"),
        (Looking(), "reads weights by aten.sum.default"),
    ],
    ids=["transposed", "scaled", "packed", "looking"],
)
def test_what_post_processing_transforms_is_noticed(method: Any, reason: str) -> None:
    (found,) = inspect(method)
    assert (found.name, found.reason.replace("reads weights by aten.mul.Tensor", "makes packed")) == (
        "layers.0",
        reason,
    )


def test_a_module_that_is_repacked_for_good_is_refused_by_name() -> None:
    with pytest.raises(AdapterError, match=r"no way back") as caught:
        inspect(OneWay())
    assert caught.value.tensor == "layers.0.weight"


def test_slots_find_tensors_wherever_they_hang() -> None:
    model = Model([Plain()])
    model.cache = {"keys": torch.ones(2), "pair": [torch.ones(3), (torch.ones(4),)]}
    model.register_buffer("counter", torch.zeros(1))
    model.again = model.norm  # a second name of a parameter
    model.view = model.norm.data[1:]  # shares its storage
    found = slots(model)
    assert {"layers.0.weight", "norm", "decay", "counter", "table"} <= found.keys()
    assert {"cache.keys", "cache.pair.0", "cache.pair.1.0"} <= found.keys()
    assert not {"again", "view"} & found.keys()


def receive(plot: layout.Plot, stage: Any, addresses: list[int], seed: int) -> None:
    """Do what the store does for one stage: bring every shard's elements to where its view says."""
    from tests.adapters.helpers import write  # noqa: PLC0415 (imports Transformers)

    wanted = set(stage.storages)
    manifest = plot.manifest
    kept = [shard for shard in manifest.shards() if shard.view.storage in wanted]
    full = {name: tensor.numpy() for name, tensor in weights(seed).items()}

    class Part:
        storage_nbytes = manifest.storage_nbytes

        def shards(self) -> list[Any]:
            return kept

    write(Part(), addresses, full)


def update(model: Model, plot: layout.Plot, seed: int) -> None:
    arena = staging.Arena(plot.groups, "cpu")
    addresses = plot.addresses(arena.address)
    whole = (Stage("direct", tuple(range(len(addresses)))),)
    for index, stage in enumerate(plot.stages or whole):
        receive(plot, stage, addresses, seed)
        group = plot.group_of(index) if plot.stages else None
        if group is not None:
            plot.put_through(model, group, arena)
    model.post_load_weights()
    plot.check_pins()


@pytest.mark.parametrize(
    "kinds",
    [(Plain, Plain), (Transposed, Plain), (Scaled, Transposed), (Packed, Scaled), (Looking, Packed)],
    ids=lambda kinds: "-".join(kind.__name__.lower() for kind in kinds),
)
def test_an_update_through_stages_equals_a_fresh_load(kinds: tuple[type, ...]) -> None:
    methods = [kind() for kind in kinds]
    model = fresh(methods, seed=1)
    plot = layout.survey(model, learned(methods), "cpu", (), "rank 0")
    before = {name: tensor.data_ptr() for name, tensor in values(slots(model)).items()}
    for seed in (2, 3):
        for parameter in model.parameters():
            if parameter is not model.layers[1].weight:  # its last row is the engine's own
                parameter.data.fill_(float("nan"))
        update(model, plot, seed)
        expected = values(slots(fresh([kind() for kind in kinds], seed)))
        found = values(slots(model))
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    assert before == {name: tensor.data_ptr() for name, tensor in values(slots(model)).items()}


def test_every_live_tensor_is_explained() -> None:
    methods = [Plain(), Packed()]
    plot = layout.survey(fresh(methods, 1), learned(methods), "cpu", (), "rank 0")
    assert plot.names["layers.1.weight"] == ("layers.1.weight",)
    assert plot.names["decay"] == ("decay",)
    assert plot.derived == {"absorbed", "layers.1.packed"}
    assert plot.local == {"table"}


def test_a_tensor_that_nothing_explains_is_refused_by_name_or_declared() -> None:
    methods = [Plain(), Plain()]
    model = fresh(methods, 1)
    model.layers[0].shadow = torch.ones(6, 4)
    with pytest.raises(AdapterError, match="nothing explains") as caught:
        layout.survey(model, learned(methods), "cpu", (), "rank 3")
    assert (caught.value.tensor, caught.value.rank) == ("layers.0.shadow", "rank 3")
    plot = layout.survey(model, learned(methods), "cpu", ("layers.*.shadow",), "rank 3")
    assert "layers.0.shadow" in plot.local


def test_a_parameter_that_was_repacked_behind_the_hooks_is_refused() -> None:
    methods = [Plain(), Plain()]
    model = fresh(methods, 1)
    model.layers[0].weight.data = model.layers[0].weight.data.t()
    with pytest.raises(AdapterError, match="another form") as caught:
        layout.survey(model, learned(methods), "cpu", (), "rank 0")
    assert caught.value.tensor == "layers.0.weight"


def test_a_tensor_that_moved_is_noticed() -> None:
    methods = [Plain(), Plain()]
    model = fresh(methods, 1)
    plot = layout.survey(model, learned(methods), "cpu", (), "rank 0")
    plot.check_pins()
    model.absorbed = model.absorbed.clone()
    with pytest.raises(AdapterError, match="moved") as caught:
        plot.check_pins()
    assert caught.value.tensor == "absorbed"


def test_errands_run_in_the_thread_that_serves() -> None:
    errands = Errands()
    assert not errands.serving
    where = errands.serve(lambda: (errands.serving, errands.run(threading.get_ident), threading.get_ident()))
    assert where[:2] == (True, threading.get_ident())
    assert where[2] != threading.get_ident()
    assert not errands.serving


def test_errors_cross_the_threads_of_errands() -> None:
    errands = Errands()

    def fail() -> None:
        raise NameMismatchError("no such tensor", tensor="a.b")

    with pytest.raises(NameMismatchError, match="no such tensor"):
        errands.serve(lambda: errands.run(fail))
    assert errands.serve(lambda: 7) == 7


def test_an_errand_that_comes_too_late_is_refused() -> None:
    errands = Errands()
    errands.serve(lambda: None)
    with pytest.raises(AdapterError, match="gone on"):
        errands.run(lambda: None)


def test_commands_and_errors_survive_their_wire() -> None:
    for command in (
        commands.Join(instance="i", frozen_draft=True),
        commands.Update(3, 1.5),
        commands.Explain("directory", ("draft.*",)),
        commands.Leave(),
    ):
        assert commands.decode_command(commands.encode(command)) == command
    sent = commands.Reply(to_wire(NameMismatchError("missing", tensor="x", hint="send it")), ("a note",))
    error = commands.error_of(commands.decode_reply(commands.encode(sent).decode()))
    assert isinstance(error, NameMismatchError)
    assert (error.tensor, error.hint, error.__notes__) == ("x", "send it", ["a note"])


@pytest.mark.parametrize("data", [b"", b"{}", b'{"type":"update","more":1}', b"x" * (commands.MAX_BYTES + 1)])
def test_bytes_that_are_no_command_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        commands.decode_command(data)


def test_an_engine_without_the_plugin_is_named() -> None:
    with pytest.raises(ProtocolError, match="plug-in") as caught:
        commands.decode_reply("Unknown load_format=syncline")
    assert "Unknown load_format=syncline" in str(caught.value)


def joining(monkeypatch: pytest.MonkeyPatch, *, draft: object = None, stages: int = 1) -> Any:
    """Return what a host checks before it joins, on an engine that is not there."""
    parallel = SimpleNamespace(pp_size=stages)
    monkeypatch.setattr(host, "srt", lambda _name: SimpleNamespace(get_parallel=lambda: parallel))
    return host.Host(SimpleNamespace(draft_worker=draft))._check_joinable


def test_a_draft_model_is_refused_unless_it_is_to_stay_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    check = joining(monkeypatch, draft="a draft")
    with pytest.raises(AdapterError, match="draft model") as caught:
        check(commands.Join(instance="i"))
    assert "frozen_draft=True" in str(caught.value)
    check(commands.Join(instance="i", frozen_draft=True))
    joining(monkeypatch)(commands.Join(instance="i"))


def test_pipeline_stages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AdapterError, match="pipeline stages"):
        joining(monkeypatch, stages=2)(commands.Join(instance="i"))


def test_a_refused_flush_is_an_error() -> None:
    adapter: Any = SGLangAdapter.__new__(SGLangAdapter)
    adapter.rank, adapter._errands, adapter._flush = 1, Errands(), lambda: False
    with pytest.raises(AdapterError, match="refused to flush") as caught:
        adapter._errands.serve(adapter.flush_caches)
    assert caught.value.rank == "rank 1"
