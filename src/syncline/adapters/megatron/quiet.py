"""A world without communication, in which a trainer's own conversions run while they are watched.

Conversions gather from tensor-parallel and expert-parallel peers before they cut and join. While they are
watched, a gather is answered at once: this rank's own part where it belongs, stand-ins for what its peers
would have sent. Whatever else would communicate is refused by name.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from syncline.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_NAMES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "recv",
    "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send", "send_object_list",
)  # fmt: skip
_OPERATORS = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})
_patching = threading.Lock()


@dataclass(frozen=True, slots=True)
class Group:
    """A process group of which only its size and this process's rank in it are true.

    Attributes:
        n: its size.
        i: this process's rank in it.
        axis: what it is called in messages, such as ``tensor``.
    """

    n: int
    i: int
    axis: str

    def size(self) -> int:
        """Return the number of processes, as a process group does."""
        return self.n

    def rank(self) -> int:
        """Return this process's rank, as a process group does."""
        return self.i

    def __getattr__(self, name: str) -> Any:
        raise AdapterError(
            "a mapping communicates while it is probed",
            expected="nothing of a process group but its size and rank",
            found=f"{name!r} of the {self.axis} group",
            hint="gather by torch.distributed.all_gather, or declare the tensor by an exporter of your own",
        )

    @classmethod
    def like(cls, group: Any, axis: str) -> Group:
        """Return a group of the size of another one; of one process if there is none."""
        return cls(1, 0, axis) if group is None else cls(group.size(), group.rank(), axis)


class Quiet:
    """What communication is answered with while conversions are watched.

    Args:
        stand_in: returns a tensor like the given one in place of a peer's: ``stand_in(tensor, peer)``.
        objects: whether a gather of objects is answered by this process's own alone, empty ones for others.
    """

    def __init__(
        self, stand_in: Callable[[torch.Tensor, str], torch.Tensor], *, objects: bool = False
    ) -> None:
        self.current: str | None = None
        self._stand_in, self._objects = stand_in, objects

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer, or refuse, one call of ``torch.distributed``."""
        if name == "all_gather" and not kwargs.get("async_op"):
            return self._gather(*args, **kwargs)
        if name == "all_gather_object" and self._objects:
            return _own_object(*args, **kwargs)
        raise self.refused(f"torch.distributed.{name}")

    def _gather(self, into: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, **_: Any) -> None:
        """Answer a gather in the caller's list: watched tensors are not written, they are put there."""
        mine, axis = group.rank(), getattr(group, "axis", "process")
        into[:] = [
            tensor if i == mine else self._stand_in(tensor, f"rank {i} of the {axis} group")
            for i in range(len(into))
        ]

    def refused(self, what: str) -> AdapterError:
        """Return the error of a call that cannot be answered."""
        return AdapterError(
            "a mapping communicates while it is probed",
            expected="gathers by torch.distributed.all_gather, and nothing else",
            found=what,
            tensor=self.current,
            hint="what a rank holds must follow from its own shapes, sizes and ranks",
        )


def _own_object(into: list[Any], mine: Any, group: Any = None, **_: Any) -> None:
    at = dist.get_rank(group) if group is None else group.rank()
    into[:] = [mine if i == at else type(mine)() for i in range(len(into))]


class _NoOperators(TorchDispatchMode):
    """Refuses collectives that went past ``torch.distributed``'s functions."""

    def __init__(self, quiet: Quiet) -> None:
        super().__init__()
        self._quiet = quiet

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "namespace", "") in _OPERATORS:
            raise self._quiet.refused(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def quiet(answers: Quiet) -> Iterator[Quiet]:
    """Let no communication of this thread out; other threads communicate as before."""
    mine = threading.get_ident()

    def wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != mine:
                return original(*args, **kwargs)
            return answers.call(name, args, kwargs)

        return call

    with _patching, ExitStack() as stack:
        for module in (dist, distributed_c10d):
            for name in _NAMES:
                original = getattr(module, name, None)
                if original is not None:
                    setattr(module, name, wrapped(name, original))
                    stack.callback(setattr, module, name, original)
        stack.enter_context(_NoOperators(answers))
        yield answers
