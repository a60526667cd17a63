"""Random loaders: chains of views, copies, joins and in-place operations, traced and run for real."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.layout.loader import Spec, trace_loader
from syncline.layout.probe import compare, probe_loader
from syncline.verify.twin import twin_check

SHAPES = {"x": (6, 8), "y": (4, 3, 4), "z": (12,)}
CHECKPOINT = {"a": Spec((6, 8), "float32"), "b": Spec((2, 12), "float32"), "c": Spec((4, 3, 4), "bfloat16")}


def _step(draw, view: torch.Tensor):
    """Draw one view operation that fits; returns a function to apply to any tensor of that layout."""
    kind = draw(
        st.sampled_from(["narrow", "stride", "select", "permute", "unflatten", "reshape", "unsqueeze"])
    )
    if view.ndim == 0 or kind == "unsqueeze":
        return lambda t: t.unsqueeze(0)
    dim = draw(st.integers(0, view.ndim - 1))
    n = view.shape[dim]
    if kind == "narrow":
        low = draw(st.integers(0, n - 1))
        size = draw(st.integers(1, n - low))
        return lambda t: t.narrow(dim, low, size)
    if kind == "stride":
        index = (slice(None),) * dim + (slice(draw(st.integers(0, n - 1)), None, draw(st.integers(1, 3))),)
        return lambda t: t[index]
    if kind == "select":
        at = draw(st.integers(0, n - 1))
        return lambda t: t.select(dim, at)
    if kind == "permute":
        order = draw(st.permutations(range(view.ndim)))
        return lambda t: t.permute(order)
    if kind == "unflatten":
        size = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
        return lambda t: t.unflatten(dim, (size, -1))
    return lambda t: t.reshape(-1)


def _chain(draw, shape: tuple[int, ...], *, only_views: bool):
    probe = torch.empty(shape)
    steps = []
    for _ in range(draw(st.integers(0, 4))):
        step = _step(draw, probe)
        after = step(probe)
        if only_views and after.untyped_storage().data_ptr() != probe.untyped_storage().data_ptr():
            continue
        steps.append(step)
        probe = after
    return steps, tuple(probe.shape)


def _apply(steps, tensor):
    for step in steps:
        tensor = step(tensor)
    return tensor


def _fit(source: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return as many elements of a tensor as a shape needs, repeated if it has too few."""
    flat = source.reshape(-1)
    numel = torch.Size(shape).numel()
    if flat.numel() < numel:
        flat = torch.cat([flat] * (-(-numel // flat.numel())))
    return flat[:numel].reshape(shape)


@st.composite
def programs(draw):
    """A list of actions (live, weights) -> None."""
    actions = []
    for _ in range(draw(st.integers(1, 6))):
        target = draw(st.sampled_from(sorted(SHAPES)))
        into, shape = _chain(draw, SHAPES[target], only_views=True)
        name = draw(st.sampled_from(sorted(CHECKPOINT)))
        outof, _ = _chain(draw, CHECKPOINT[name].shape, only_views=False)
        kind = draw(
            st.sampled_from(["copy", "copy", "copy", "contiguous", "cast", "negate", "double", "fill", "set"])
        )

        def act(live, weights, target=target, into=into, shape=shape, name=name, outof=outof, kind=kind):
            view = _apply(into, live[target])
            source = _fit(_apply(outof, weights[name]), shape)
            if kind == "copy":
                view.copy_(source)
            elif kind == "contiguous":
                view.copy_(source.transpose(0, -1).contiguous().transpose(0, -1) if source.ndim else source)
            elif kind == "cast":
                view.copy_(source.to(torch.float64))
            elif kind == "negate":
                view.copy_(source)
                view.neg_()
            elif kind == "double":
                view.copy_(source * 2)
            elif kind == "fill":
                view.fill_(source.reshape(-1)[0].item())
            else:
                view[...] = source

        actions.append(act)
    return actions


def _live(device):
    return {name: torch.zeros(shape, device=device) for name, shape in SHAPES.items()}


@settings(max_examples=120, deadline=None)
@given(programs())
def test_any_program_of_copies_installs_what_it_loads(actions):
    def loader(live):
        def load(weights):
            held = dict(weights)
            for act in actions:
                act(live, held)

        return load

    meta = _live("meta")
    trace = trace_loader(meta, loader(meta), CHECKPOINT)
    real = _live("cpu")
    report = twin_check(trace, real, loader(real), CHECKPOINT, 5)
    assert report.written + report.replayed + report.untouched == report.elements == 48 + 48 + 12
    assert compare(trace, probe_loader(real, loader(real), CHECKPOINT)) == 3
