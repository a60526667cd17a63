"""Megatron-Core trainers: tensor, pipeline (virtual stages too), expert and data parallelism, as they are."""

from __future__ import annotations

import fnmatch
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from syncline.adapters.megatron import halo, quantise, state
from syncline.adapters.megatron.bridge import BridgeExport, as_bridge
from syncline.adapters.megatron.exchange import agree, exchange
from syncline.adapters.megatron.learn import PREFIX, Learned, by_bridge, by_exporter
from syncline.adapters.megatron.live import HeldTensors
from syncline.adapters.megatron.neighbours import Neighbours
from syncline.adapters.megatron.owners import Claim, Claims, check
from syncline.adapters.modules import Cell, Tree
from syncline.adapters.mutation import MutationPoints
from syncline.adapters.trainer import LiveTrainer
from syncline.errors import AdapterError, SynclineError, from_wire, to_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from syncline.adapters.megatron.quantise import BlockFP8
    from syncline.adapters.megatron.whole import Exporter


class MegatronTrainer(LiveTrainer):
    """One Megatron process; satisfies `syncline.store.adapter.TrainerAdapter`. Making one is collective.

    Each rank learns which boxes of which checkpoint tensors its live parameters are, by watching the
    conversions of Megatron-Bridge (or an exporter of yours) on weightless tensors of its own shapes. Nothing
    is gathered, and nothing is copied, but what has to be computed (`computed`).

    Args:
        chunks: the model chunks of this process in their order, one without virtual pipeline stages; wrapped
            (data parallelism, mixed precision) or not.
        optimizers: Megatron's or torch's; their steps close the read window.
        bridge: an ``AutoBridge`` of Megatron-Bridge, or the Hugging Face configuration of the model.
        exporter: instead: a function from whole Megatron tensors, by the names they have without any
            parallelism, to checkpoint tensors by name.
        vocabulary: rows of the checkpoint's embedding. Megatron pads it; padding is not published. The
            configuration's, if left out.
        fp8: checkpoint tensors that are published as fp8 payload and scales, quantised here before every
            version.
        local: fnmatch patterns of live names that the checkpoint does not carry.
        rank: of this process among the trainers; the default group's if left out.
        world: number of trainer processes; the default group's if left out.
        quiesce: called before each version opens, after parameters were gathered and before anything is
            computed from them.
        group: the process group of all trainers; the default one if left out.

    Raises:
        AdapterError: a parameter that no mapping knows, that is quantised or offloaded; a mapping that
            communicates; two owners of one layer or expert. Named, on every rank.
        CoverageError: elements of a checkpoint tensor that nobody owns.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module] | nn.Module,
        optimizers: Any = (),
        *,
        bridge: Any = None,
        exporter: Exporter | None = None,
        vocabulary: int | None = None,
        fp8: BlockFP8 | None = None,
        local: Sequence[str] = (),
        rank: int | None = None,
        world: int | None = None,
        quiesce: Callable[[], None] | None = None,
        group: Any = None,
    ) -> None:
        super().__init__(quiesce)
        if (bridge is None) == (exporter is None):
            raise AdapterError("a Megatron trainer needs a bridge or an exporter", expected="one of them")
        grouped = dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank(group) if grouped else 0
        self.world = world if world is not None else dist.get_world_size(group) if grouped else 1
        self.chunks: list[nn.Module] = [chunks] if isinstance(chunks, torch.nn.Module) else list(chunks)
        self._bridge, self._exporter, self._group = bridge, exporter, group
        self._vocabulary, self._local, self._fp8 = vocabulary, tuple(local), fp8
        self._who = f"writer {self.rank}"
        self._quantiser: quantise.Quantiser | None = None
        self.learned = self._agreed()
        for name, tensor in self.learned.made.items():
            self._tree.state[PREFIX + name] = Cell(self.learned.made, name)
            tensor.requires_grad_(False)
        listed = optimizers if isinstance(optimizers, list | tuple) else (optimizers,)
        root = torch.nn.ModuleList(self.chunks)
        self._points = MutationPoints(root, state.torch_optimizers(listed), self._parameters)
        self._stale = True
        self._watch_forward()

    @property
    def aliases(self) -> dict[str, str]:
        """Second names of tied tensors -> the name that is published."""
        return self.learned.aliases

    @property
    def computed(self) -> dict[str, tuple[str, ...]]:
        """Checkpoint tensors that are computed before each version -> the operations, in order."""
        return {name: replay.ops for replay in self.learned.replays for name in replay.live}

    @property
    def casts(self) -> dict[str, str]:
        """Checkpoint tensors that the exporter converts -> to which dtype; they travel as they are held."""
        return self.learned.casts

    @cached_property
    def _tree(self) -> Tree:
        return state.walk_chunks(self.chunks)

    @cached_property
    def _live(self) -> HeldTensors:
        return HeldTensors(self._tree, self.learned.held, self._who)

    def live_tensor(self, name: str) -> torch.Tensor:
        """Return the live tensor of that name as it hangs in the model now."""
        return self._tree.state[name].get()

    def quiesce(self) -> None:
        """Finish what is still open after a step: gathers that overlap with the next forward pass above all.

        With a distributed optimizer and ``overlap_param_gather``, a rank's parameters are those of the last
        step only in its own part until they are gathered. The gather is collective over data parallelism:
        every rank publishes after the same step.
        """
        with torch.no_grad():
            for wrapper in self._gathering():
                wrapper.start_param_sync(force_sync=True)
            state.restore_buffers(self.chunks)
            super().quiesce()
            self._compute()
        self._stale = False

    def _gathering(self) -> list[Any]:
        """Return the wrappers that gather parameters while the next forward pass runs."""
        every: list[Any] = [one for chunk in self.chunks for one in state.wrappers(chunk)]
        return [
            one for one in every
            if getattr(getattr(one, "ddp_config", None), "overlap_param_gather", False)
        ]  # fmt: skip

    def _compute(self) -> None:
        if self.learned.replays:
            live = {name: self._tree.state[name].get() for r in self.learned.replays for name in r.inputs}
            for replay in self.learned.replays:
                replay.run(live, self.learned.made)
        if self._quantiser is not None:
            self._quantiser.run(self.live_tensor)

    def _note(self, _reason: str) -> None:
        self._stale = True

    def _watch_forward(self) -> None:
        """Announce a gather in a forward pass that comes before parameters were synchronised."""

        def before(*_: object) -> None:
            if self._stale:
                self._points.announce("gather in forward")

        wrappers = self._gathering()
        if wrappers:
            self._points.listen(self._note)
        for wrapper in wrappers:
            wrapper.register_forward_pre_hook(before)

    # ---------------------------------------------------------------------------------------- learning

    def _agreed(self) -> Learned:
        """Learn what this rank holds, and compare with all others; an error is raised on all of them."""
        problem: SynclineError | None = None
        learned: Learned | None = None
        mine = Claims(self.rank, 0, 0, ())
        try:
            learned = self._learn()
            if self._fp8 is not None:
                quantise.check(learned, self._fp8, self._who)
            mine = self._claims(learned)
        except SynclineError as error:
            problem = error
        except Exception as error:  # of an exporter's own: the other ranks must hear of it, too
            problem = AdapterError(
                "what this rank holds cannot be learned",
                found=f"{type(error).__name__}: {error}",
                rank=self._who,
            )
            problem.__cause__ = error
        if problem is not None:
            mine = Claims(self.rank, 0, 0, (), {}, to_wire(problem))
        everyone = [Claims.decode(data) for data in exchange(mine.encode(), self._group)]
        if problem is not None:
            raise problem
        for other in everyone:
            if other.error is not None:
                raise from_wire(other.error)
        if learned is None:
            raise AdapterError("a rank learned nothing", rank=self._who)
        try:
            check(everyone, learned.names)  # names differ: a rank knows of its peers' tensors, not of all
        except SynclineError as error:
            problem = error
        agree(problem, self._group)
        return learned if self._fp8 is None else self._quantising(learned, self._fp8, everyone)

    def _quantising(self, learned: Learned, wanted: BlockFP8, everyone: Sequence[Claims]) -> Learned:
        """Return what this rank holds once it quantises; collective where blocks are shared."""
        shared, neighbours = None, None
        if wanted.halo == "exchange":
            at = dist.get_rank(self._group) if dist.is_initialized() else 0
            shared = halo.plan(everyone, wanted.wants, at)
            neighbours = Neighbours(shared, at, self._group, wanted.timeout)
        planned = quantise.plan(learned, wanted, self.live_tensor, shared)
        self._quantiser = quantise.Quantiser(planned, power_of_two=wanted.power_of_two, neighbours=neighbours)
        return planned

    def _learn(self) -> Learned:
        tensors = self._tensors()
        wanted = {n: t for n, t in tensors.items() if not self._is_local(n)}
        if self._exporter is not None:
            models = [state.bare(chunk) for chunk in self.chunks]
            learned = by_exporter(self._exporter, models, wanted, self._vocabulary, self._group)
        else:
            bridge = as_bridge(self._bridge)
            vocabulary = self._vocabulary or _vocabulary(bridge)
            learned = by_bridge(BridgeExport(bridge, self.chunks, wanted), wanted, vocabulary)
        for name, tensor in wanted.items():
            if name not in learned.used:
                raise AdapterError(
                    "a live tensor that the checkpoint's exporter does not know",
                    expected="a mapping for every parameter and persistent buffer",
                    found=tuple(tensor.shape),
                    rank=self._who,
                    tensor=name,
                    hint="teach the exporter its name, or declare it: MegatronTrainer(..., local=[pattern])",
                )
        return learned

    def _tensors(self) -> dict[str, torch.Tensor]:
        problem: SynclineError | None = None
        found: dict[str, torch.Tensor] = {}
        try:
            state.restore_buffers(self.chunks)
            found = state.live_tensors(self._tree, self._who)
        except SynclineError as error:
            problem = error
        if self._exporter is not None:  # what follows is collective: no rank may leave the others in it
            agree(problem, self._group)
        elif problem is not None:
            raise problem
        return found

    def _is_local(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._local)

    def _claims(self, learned: Learned) -> Claims:
        stage, expert_rank = state.coordinates()
        grouped: dict[str, Claim] = {}
        for one in learned.held:
            tensor = None if one.live.startswith(PREFIX) else self._tree.state[one.live].get()
            expert = tensor is not None and getattr(tensor, "allreduce", True) is False
            kind = "shared" if one.name in learned.shared else "expert" if expert else "dense"
            before = grouped.get(one.name)
            boxes = (*(before.boxes if before else ()), (one.box.offset, one.box.size))
            grouped[one.name] = Claim(one.name, one.shape, boxes, kind)
        how = repr(self._fp8) if self._fp8 is not None and self._fp8.halo == "exchange" else ""
        return Claims(self.rank, stage, expert_rank, tuple(grouped.values()), learned.aliases, quantised=how)


def _vocabulary(bridge: Any) -> int | None:
    source = bridge.hf_pretrained
    config = getattr(source, "config", source)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "vocab_size", None)
