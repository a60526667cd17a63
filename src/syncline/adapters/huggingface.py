"""Inference with Transformers: one instance of 1..n processes that generates text and is updated in place.

Rank 0 leads: it takes prompts, pauses and resumes; the other ranks run `HuggingFaceEngine.follow` and take
part in the forward passes it starts. Updates happen between forward passes only.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from syncline import faults
from syncline.adapters.channel import Channel
from syncline.adapters.derived import Derived
from syncline.adapters.gate import Gate
from syncline.adapters.generation import Completion, greedy
from syncline.adapters.live import LiveTensors, live_names_of
from syncline.adapters.loading import load_model, load_tokenizer
from syncline.adapters.modules import local_part, ties, walk
from syncline.adapters.placed import Forwards, device_of
from syncline.adapters.transformers_names import declared_aliases, learn_names
from syncline.errors import AdapterError, DeadlineError
from syncline.layout.export import dtype_name
from syncline.memory.binding import Binding
from syncline.options import Options
from syncline.store.adapter import LiveStatus, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import torch.distributed as dist

    from syncline.adapters.loading import TensorParallel
    from syncline.layout.manifest import Manifest
    from syncline.protocol.ids import VersionKey
    from syncline.store.adapter import PauseMode

    Prompt = str | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class _Pinned:
    """Address, dtype, shape and strides of a tensor that captured graphs may hold by address."""

    pointer: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Pinned:
        return cls(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


class HuggingFaceEngine:
    """One process of an inference instance; satisfies `syncline.store.adapter.EngineAdapter`.

    Args:
        model: a Transformers model with a language-model head, whole or sharded over DTensors.
        tokenizer: its tokenizer; only rank 0 uses it.
        loader: loads a checkpoint directory into a new model, sharded as ``model``: the oracle of
            ``effective``. All ranks call it together.
        group: gloo group of the instance's processes; left out, a new one of the default group's. The
            default group itself stays the user's.
        options: deadlines.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        loader: Callable[[Path], Any] | None = None,
        group: dist.ProcessGroup | None = None,
        options: Options | None = None,
    ) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self._loader, self._options = loader, options or Options.from_environment()
        self._channel = Channel(group)
        self._tree = walk(model)
        self._names = learn_names(model, self._tree)
        self.aliases = self._names.aliases | declared_aliases(model, self._tree, self._names)
        self._live = LiveTensors(self._tree, self._names, f"rank {self.rank}")
        self._derived = Derived()
        self._addresses = self._live.addresses()
        self.device = device_of(self._live.parts(), self._live.names, f"rank {self.rank}")
        self._forwards = Forwards(self.device)
        self._binding = Binding.private(self.manifest.fingerprint, self._addresses)
        self._pinned: dict[str, _Pinned] = {}
        self._pin()
        self.version: VersionKey | None = None
        self._turn = threading.Lock()  # one command at a time
        self._gate = Gate()
        self._abort = threading.Event()

    @classmethod
    def load(
        cls,
        directory: Path | str,
        *,
        dtype: torch.dtype = torch.float32,
        tensor_parallel: TensorParallel = "auto",
        group: dist.ProcessGroup | None = None,
        options: Options | None = None,
    ) -> HuggingFaceEngine:
        """Load a checkpoint directory with Transformers and shard it over the processes of the default group.

        Args:
            directory: a Hugging Face checkpoint with tokenizer.
            dtype: of the live parameters; float32 generates the same text however it is sharded.
            tensor_parallel: ``"auto"``, the model's own plan when there is more than one process; None, whole
                in every process; or a callable that shards a loaded model (such as ``parallelize_module``).
            group: see the class.
            options: see the class.
        """

        def loader(where: Path) -> Any:
            return load_model(where, dtype, tensor_parallel)

        return cls(
            loader(Path(directory)),
            load_tokenizer(Path(directory)),
            loader=loader,
            group=group,
            options=options,
        )

    @property
    def rank(self) -> int:
        """Rank of this process in the instance; 0 leads."""
        return self._channel.rank

    @property
    def world(self) -> int:
        """Number of processes of the instance."""
        return self._channel.world

    @property
    def paused(self) -> bool:
        """Whether forward passes are held back in this process."""
        return self._gate.held

    @property
    def manifest(self) -> Manifest:
        """Views of checkpoint tensors into the live, possibly fused parameters of this process."""
        return self._live.manifest

    # ------------------------------------------------------------------------------------ live tensors

    def finish_forwards(self) -> None:
        """Return when no kernel of a forward pass, or of a derivation, runs any more."""
        self._forwards.finish()

    def binding(self) -> Binding:
        """Return where the live tensors lie; they must not have moved since start.

        Raises:
            AdapterError: a synced or derived tensor moved or changed; named.
        """
        moved = self._live.addresses() != self._addresses
        if moved.any():
            self._refuse_moved(self._live.name_of(int(moved.argmax())))
        for name, pinned in self._pinned.items():
            if _Pinned.of(self._derived.tensors[name]) != pinned:
                self._refuse_moved(name)
        return self._binding

    def derive(
        self,
        compute: Callable[[Any], Mapping[str, torch.Tensor]],
        into: Mapping[str, torch.Tensor],
        inputs: Collection[str] = (),
    ) -> None:
        """Register tensors that are computed from weights after each update.

        Args:
            compute: model -> new values by name; must not change anything. It runs once for each version (and
                once on the freshly loaded model of ``effective``).
            into: the live tensors by name, written in place: their addresses never change.
            inputs: checkpoint names it reads; if none of them was received it does not run. Empty: any.
        """
        self._derived.add(compute, into, inputs)
        self._pin()

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters, buffers and derived tensors of this process by name, a tied one once."""
        return _named_parts(self.model) | self._derived.tensors

    def live_status(self) -> dict[str, LiveStatus]:
        """List every live tensor as synced, derived or local."""
        carried = live_names_of(self._names, self._tree)
        return {name: self._status(name, part, carried) for name, part in self.live_tensors().items()}

    def _status(self, name: str, part: torch.Tensor, carried: Mapping[str, tuple[str, ...]]) -> LiveStatus:
        names = carried.get(name, ())
        status = Status.SYNCED if names else Status.LOCAL
        if name in self._derived.tensors:
            status, names = Status.DERIVED, ()
        return LiveStatus(status, names, dtype_name(part.dtype), tuple(part.shape))

    def load_fresh(self, directory: Path) -> dict[str, torch.Tensor]:
        """Load a checkpoint by Transformers' own loader, sharded as this instance; by live name.

        Collective over the instance; generation waits meanwhile.
        """
        if self._loader is None:
            raise AdapterError(
                "this engine has no loader to check against",
                expected="HuggingFaceEngine(..., loader=...)",
                hint="give a callable that loads a directory into a model sharded alike",
            )
        with self._turn, torch.no_grad():
            fresh = self._loader(Path(directory)).eval()
            return _named_parts(fresh) | self._derived.compute(fresh)

    def dump(self, path: Path | str) -> None:
        """Write the live tensors of this process as they are, under their own names, as safetensors."""
        tensors = {name: _storable(part) for name, part in self.live_tensors().items()}
        save_file(tensors, str(path), metadata={"rank": str(self.rank), "world": str(self.world)})

    def _pin(self) -> None:
        self._pinned = {name: _Pinned.of(part) for name, part in self._derived.tensors.items()}

    # ------------------------------------------------------------------------------------ update protocol

    def pause(self, mode: PauseMode, deadline: float) -> None:
        """Return when no forward pass runs in this process, and none will before `resume`.

        Rank 0 tells the others; they only wait for it, so the order in which ranks call this does not matter.

        Raises:
            DeadlineError: generation did not end within ``deadline`` seconds; the engine goes on.
        """
        faults.point("adapters.pause")
        until = time.monotonic() + deadline
        if self.rank:
            if not self._gate.wait(deadline):
                raise self._late(
                    "rank 0 to pause", deadline, "rank 0 is not paused, or follow() does not run"
                )
            return
        if (number := self._gate.enter()) is None:
            return
        if mode == "abort":
            self._abort.set()
        if not self._turn.acquire(timeout=max(0.0, until - time.monotonic())):
            self._open()
            raise self._late("the running generation to end", deadline, 'pause(mode="abort") cuts it')
        try:
            self._abort.clear()
            self._channel.send("pause", number=number)
        finally:
            self._turn.release()

    def resume(self, key: VersionKey | None) -> None:
        """Let this process take part in forward passes again."""
        faults.point("adapters.resume")
        if key is not None:
            self.version = key
        self._open()

    def after_update(self, key: VersionKey, received: Collection[str] | None = None) -> None:
        """Recompute derived tensors in place, once for each version."""
        with torch.no_grad():
            self._derived.refresh(key, self.model, received)

    def flush_caches(self) -> None:
        """Drop a static key-value cache; a dynamic one never outlives its generation."""
        for name in ("_cache", "_prefix_cache"):
            if name in vars(self.model):
                delattr(self.model, name)

    def report_version(self, key: VersionKey) -> None:
        """Set the version that completions carry from now on."""
        self.version = key

    def _open(self) -> None:
        self._abort.clear()
        self._gate.leave()

    def _late(self, what: str, deadline: float, hint: str) -> DeadlineError:
        return DeadlineError(f"waited {deadline:g} s for {what}", rank=f"rank {self.rank}", hint=hint)

    # ------------------------------------------------------------------------------------ generation

    def generate(
        self, prompts: Sequence[Prompt], max_new_tokens: int = 64, deadline: float | None = None
    ) -> list[Completion]:
        """Generate greedily, on rank 0; waits while the engine is paused.

        Args:
            prompts: texts, or chats as lists of ``{"role": ..., "content": ...}``.
            max_new_tokens: for each prompt.
            deadline: longest wait, in seconds, for the engine to be free; the update timeout if left out.

        Raises:
            DeadlineError: still paused, or another generation still runs.
            AdapterError: called on another rank than 0.
        """
        if self.rank:
            raise AdapterError(
                "only rank 0 takes prompts", found=f"rank {self.rank}", hint="call follow() here"
            )
        ids = [self._encode(prompt) for prompt in prompts]
        with self._forward(self._options.update_timeout if deadline is None else deadline):
            self._channel.send("generate", ids=ids, new=max_new_tokens, pause=self._gate.number)
            return self._generate(ids, max_new_tokens)

    def follow(self) -> None:
        """Take part in what rank 0 starts, until it calls `shutdown`; for every rank but 0.

        Raises:
            PeerLostError: rank 0 is gone.
        """
        while (command := self._channel.receive())["name"] != "shutdown":
            if command["name"] == "pause":
                self._gate.announce(command["number"])
                continue
            self._gate.passed(command["pause"])
            with self._forward(self._options.update_timeout):
                self._generate(command["ids"], command["new"])

    def shutdown(self) -> None:
        """End `follow` on the other ranks; for rank 0."""
        if self.rank == 0:
            with self._turn:
                self._channel.send("shutdown")

    @contextmanager
    def _forward(self, deadline: float) -> Iterator[None]:
        """Hold the turn while not paused."""
        until = time.monotonic() + deadline
        while True:
            if not self._gate.opened(max(0.0, until - time.monotonic())):
                raise self._late("an update to end", deadline, "the engine is paused")
            if not self._turn.acquire(timeout=max(0.0, until - time.monotonic())):
                raise self._late("another generation to end", deadline, "raise deadline=")
            if not self._gate.held:
                break
            self._turn.release()
        try:
            yield
        finally:
            self._forwards.ended()
            self._turn.release()

    def _generate(self, ids: list[list[int]], new: int) -> list[Completion]:
        return greedy(self.model, self.tokenizer, ids, new, self._channel, self._abort.is_set, self.version)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        chat = self.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)
        return list(chat["input_ids"])

    def _refuse_moved(self, name: str) -> None:
        raise AdapterError(
            "a live tensor moved",
            expected="the address it had at start: captured graphs keep addresses",
            rank=f"rank {self.rank}",
            tensor=name,
            hint="write into parameters in place; after moving a model make a new engine",
        )


def _named_parts(model: Any) -> dict[str, torch.Tensor]:
    tree = walk(model)
    second = {name for group in ties(tree.state) for name in group[1:]}
    cells = tree.state | tree.local
    return {name: local_part(cell.get()).detach() for name, cell in cells.items() if name not in second}


def _storable(part: torch.Tensor) -> torch.Tensor:
    """Return a tensor that safetensors stores as it is: contiguous, alone in its storage."""
    alone = part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes
    return part if alone else part.contiguous().clone()
