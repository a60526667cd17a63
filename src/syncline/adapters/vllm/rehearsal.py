"""Finding out, for each layer with post-processing, what its kernel reads and how new weights get there.

Nothing is assumed: the layer's own post-processing runs on a twin layer in real memory, on two sets of
random weights, and what it changes is compared bit for bit. A way of putting weights in counts only if the
twin layer holds afterwards what a fresh one loaded with the same weights holds.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from syncline.adapters.vllm.layers import Reload, Untouched, ask, own_tensors, width
from syncline.adapters.vllm.leaves import content, leaves
from syncline.adapters.vllm.temporaries import Temporaries
from syncline.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PROBE_ROWS = 4


class Way(StrEnum):
    """How new weights get into a layer."""

    DIRECT = "direct"
    """The kernel reads the parameters themselves: written in place."""
    RELOAD = "reload"
    """vLLM's layerwise reload, from staging memory."""
    REPEAT = "repeat"
    """Post-processing of an untouched twin layer, copied into the kernel's tensors."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rehearsal found out about a layer.

    Attributes:
        way: how weights are put in.
        taken: own names of the tensors that go through staging; others of the layer are written in place.
        after: own tensors after post-processing: name -> (shape, dtype).
        derived: paths, behind the layer's attributes, of what depends on the weights.
        opaque: whether the kernel holds its weights where no tensor shows them.
        keeps: whether the kernel goes on using the memory that the weights were given in.
    """

    way: Way
    taken: frozenset[str]
    after: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    derived: frozenset[str] = frozenset()
    opaque: bool = False
    keeps: bool = False


@dataclass(slots=True)
class _Seen:
    """A layer after post-processing: contents by path, and what its kernel answers."""

    tensors: dict[str, object]
    hidden: dict[str, object]
    answer: object


def kind_of(module: Any) -> tuple[object, ...]:
    """Return what layers have in common that one rehearsal serves."""
    plain = (bool, int, float)
    attributes = tuple((k, v) for k, v in sorted(vars(module).items()) if type(v) in plain)
    shapes = tuple((n, tuple(t.shape), t.stride(), t.dtype) for n, t in own_tensors(module).items())
    return type(module), type(module.quant_method), attributes, shapes


class Rehearsal:
    """Rehearses one twin layer, which stays untouched.

    Args:
        name: the layer's, for errors.
        module: of the twin, on the meta device, never post-processed.
        written: own names of the tensors that the checkpoint fills.
        device: where the live layer lies.
        model_config: vLLM's.
    """

    def __init__(
        self, name: str, module: Any, written: frozenset[str], device: torch.device, model_config: Any
    ) -> None:
        self._name, self._module, self._written = name, module, written
        self._device, self._model_config = device, model_config
        self._untouched = Untouched(module)
        self._inputs = self._probe()
        self._alive: list[object] = []  # a freed handle's address would come again

    def run(self) -> Finding:
        """Return the finding.

        Raises:
            AdapterError: no way puts weights into this layer as a fresh load does; the layer is named.
        """
        try:
            return self._find()
        finally:
            self._untouched.restore()
            self._alive.clear()

    def _find(self) -> Finding:
        first, second = self._random(1), self._random(2)
        one, again, other = self._fresh(first), self._fresh(first), self._fresh(second)
        handles = {path for path in one.hidden.keys() | again.hidden.keys() if _differ(one, again, path)}
        derived = {path for path in one.hidden.keys() | other.hidden.keys() if _differ(one, other, path)}
        self._untouched.process(first)
        after = {n: (tuple(t.shape), t.dtype) for n, t in own_tensors(self._module).items()}
        if not derived and self._unchanged(first):
            return Finding(Way.DIRECT, frozenset(), after)
        reasons: list[str] = []
        for way in (self._reload, self._repeat):
            try:
                return way(first, second, other, handles, frozenset(derived))
            except Exception as error:  # a layer's own code may raise anything: the way is out
                reasons.append(f"{way.__name__[1:]}: {_text(error)}")
        raise AdapterError(
            f"{type(self._module).__name__} cannot be updated: vLLM transforms its weights after loading, "
            "and doing so again gives other weights than a fresh load",
            expected="post-processing that can be repeated for new weights",
            found="; ".join(reasons),
            tensor=self._name,
            hint="this engine has to be restarted to change these weights",
        )

    def _reload(
        self, first: _Given, second: _Given, want: _Seen, handles: set[str], derived: frozenset[str]
    ) -> Finding:
        self._untouched.process(_copies(first))
        after = {n: (tuple(t.shape), t.dtype) for n, t in own_tensors(self._module).items()}
        given = _copies(second)
        before = self._look().hidden
        # a second reload counts: the first one may leave the layer in a state that no later one survives
        temporaries = Temporaries() if handles else nullcontext()
        with temporaries:
            Reload(self._module, self._model_config).run(_copies(first))
            taken = Reload(self._module, self._model_config).run(given)
        for name, tensor in own_tensors(self._module).items():
            if name in second and name not in taken:
                tensor.detach().copy_(second[name])  # written in place by a transfer
        got = self._look()
        self._same(want, got, derived - handles)
        if any(path in before and before[path] == got.hidden.get(path) for path in handles):
            raise AdapterError("a handle to transformed weights was not made anew", found=sorted(handles)[:3])
        if handles and want.answer is None:
            raise AdapterError("the kernel hides its weights, and cannot be asked for them")
        if isinstance(temporaries, Temporaries):
            hidden = (leaf.tensor for leaf in leaves(self._module).values())
            held = [
                *own_tensors(self._module).values(),
                *given.values(),
                *(t for t in hidden if t is not None),
            ]
            with temporaries.spoiled(held):
                if self._look().answer != got.answer:
                    raise AdapterError("the kernel goes on reading memory that a reload lets go of")
        for tensor in given.values():
            tensor.fill_(0)
        keeps = self._look().answer != got.answer or self._look().tensors != got.tensors
        return Finding(Way.RELOAD, taken, after, derived, bool(handles), keeps)

    def _repeat(
        self, first: _Given, second: _Given, want: _Seen, handles: set[str], derived: frozenset[str]
    ) -> Finding:
        if handles:
            raise AdapterError("the kernel hides its weights behind handles", found=sorted(handles)[:3])
        self._untouched.process(_copies(first))
        after = {n: (tuple(t.shape), t.dtype) for n, t in own_tensors(self._module).items()}
        live = _Detached(self._module)
        for values in (first, second):
            self._untouched.process(_copies(values))
            self._untouched.copy_into(live, derived)
        got = _Seen({n: content(t) for n, t in own_tensors(live).items()}, _bits(live), want.answer)
        self._same(want, got, derived)
        changed = frozenset(name for name, given in second.items() if content(given) != got.tensors[name])
        return Finding(Way.REPEAT, changed, after, derived)

    # ------------------------------------------------------------------------------------ helpers

    def _fresh(self, given: _Given) -> _Seen:
        self._untouched.process(_copies(given))
        return self._look()

    def _look(self) -> _Seen:
        self._alive.append(dict(vars(self._module)))
        tensors: dict[str, object] = {n: content(t) for n, t in own_tensors(self._module).items()}
        answer = None if self._inputs is None else content(ask(self._module, self._inputs))
        return _Seen(tensors, _bits(self._module), answer)

    def _unchanged(self, given: _Given) -> bool:
        """Whether post-processing leaves the tensors as given, in their memory, and the kernel reads them."""
        names, others, mine = self._shapes().keys(), self._random(3), _copies(given)
        self._untouched.process(mine)
        now = own_tensors(self._module)
        if now.keys() != names or any(
            now[name].data_ptr() != tensor.data_ptr() or content(now[name]) != content(given[name])
            or now[name].stride() != tensor.stride() for name, tensor in mine.items()
        ):  # fmt: skip
            return False
        if self._inputs is None:
            return True
        before = content(ask(self._module, self._inputs))
        for name, tensor in others.items():
            mine[name].copy_(tensor)
        return before != content(ask(self._module, self._inputs))

    def _same(self, want: _Seen, got: _Seen, derived: frozenset[str]) -> None:
        differ = [
            n for n in want.tensors.keys() | got.tensors.keys() if want.tensors.get(n) != got.tensors.get(n)
        ]
        differ += [path for path in derived if want.hidden.get(path) != got.hidden.get(path)]
        if differ:
            raise AdapterError("other tensors than after a fresh load", found=", ".join(sorted(differ)[:4]))
        if want.answer != got.answer:
            raise AdapterError("the kernel computes with other weights than after a fresh load")

    def _shapes(self) -> dict[str, torch.Tensor]:
        self._untouched.restore()
        return own_tensors(self._module)

    def _random(self, seed: int) -> _Given:
        """Return random tensors for everything that the checkpoint fills."""
        generator = torch.Generator(self._device).manual_seed(seed)
        found: _Given = {}
        for name, tensor in self._shapes().items():
            if name not in self._written:
                continue
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
            found[name] = _randomised(made, generator)
        return found

    def _probe(self) -> torch.Tensor | None:
        count = width(self._module)
        if count is None:
            return None
        generator = torch.Generator().manual_seed(0)
        inputs = torch.rand(_PROBE_ROWS, count, generator=generator)
        return inputs.to(self._device, self._model_config.dtype)


_Given = dict[str, torch.Tensor]


class _Detached(nn.Module):
    """What hangs at a layer now, kept apart from the layer while that is processed again."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        kept = {k: v for k, v in vars(module).items() if k not in vars(self) and not k.startswith("_")}
        self.__dict__.update(kept)
        self._parameters = dict(module._parameters)  # noqa: SLF001 (where they hang)
        self._buffers = dict(module._buffers)  # noqa: SLF001 (as above)


def _randomised(made: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if made.is_floating_point() and made.element_size() > 1:
        return made.uniform_(0.25, 0.75, generator=generator)
    noise = torch.rand(made.shape, generator=generator, device=made.device) * 0.5 + 0.25
    return made.copy_(noise if made.is_floating_point() else noise * 100)


def _copies(given: _Given) -> _Given:
    return {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in given.items()}


def _bits(module: nn.Module) -> dict[str, object]:
    return {path: leaf.bits() for path, leaf in leaves(module).items()}


def _differ(one: _Seen, other: _Seen, path: str) -> bool:
    return one.hidden.get(path) != other.hidden.get(path)


def _text(error: BaseException) -> str:
    what = getattr(error, "what", None) or f"{type(error).__name__}: {error}"
    found = getattr(error, "found", None)
    return f"{what} ({found})" if found else str(what)


def rehearse_all(
    layers: Mapping[str, Any],
    written: Callable[[str], frozenset[str]],
    device: torch.device,
    model_config: Any,
) -> dict[str, Finding]:
    """Rehearse every layer, those of one kind once; return findings by layer name."""
    known: dict[object, Finding] = {}
    found: dict[str, Finding] = {}
    for name, module in layers.items():
        mine = written(name)
        kind = (kind_of(module), mine)
        if kind not in known:
            known[kind] = Rehearsal(name, module, mine, device, model_config).run()
        found[name] = known[kind]
    return found
