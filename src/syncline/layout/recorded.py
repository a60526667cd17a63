"""What a trace records: origins of values, and operations as nodes between them.

Values are recorded, not memory: each operation of a loader becomes a `Node` whose inputs say which elements
of which origins they were. In-place operations are nodes like others, with the changed argument as a
result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_unflatten

from syncline.layout.content import Origin

if TYPE_CHECKING:
    from torch.utils._pytree import TreeSpec

    from syncline.layout.content import Piece


@dataclass(frozen=True, slots=True, eq=False)
class Weight(Origin):
    """A checkpoint tensor, row-major: its name, shape and torch's name of its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class Before(Origin):
    """What a live tensor's storage held before the load."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Stranger(Origin):
    """A weightless tensor that is neither the checkpoint's nor the model's nor computed while tracing."""

    what: str


@dataclass(frozen=True, slots=True, eq=False)
class Constant(Origin):
    """A real tensor that the loader made: kept, contiguous, as it was when it was used."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Result(Origin):
    """One result of a node, its elements in row-major order."""

    node: Node
    index: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor argument: its layout, and the elements it held.

    Attributes:
        size: its shape.
        stride: its strides, in elements; a replayed argument has the same, so that sums run in the same
        order. dtype: its dtype. pieces: by element of the layout, from 0; none for arguments whose values
        do not matter.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def span(self) -> int:
        """Elements of memory that the layout needs."""
        if 0 in self.size:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))


@dataclass(frozen=True, slots=True)
class Scalar:
    """A Python number that ``item()`` of a one-element tensor gave."""

    value: Value


@dataclass(eq=False, slots=True, repr=False)
class Node:
    """One recorded operation.

    Attributes:
        op: the operator, callable.
        leaves: its flattened arguments: `Value`, `Scalar`, ``torch.device`` or plain.
        spec: how they unflatten to (args, kwargs).
        changed: indices of the leaves that it writes; results after those that it returns.
        random: whether it draws random numbers.
        during: the checkpoint name that was being loaded, for errors.
    """

    op: Any
    leaves: list[Any]
    spec: TreeSpec
    changed: tuple[int, ...]
    random: bool
    during: str | None
    values: tuple[Value, ...] = field(init=False)

    def __post_init__(self) -> None:
        found = (x.value if isinstance(x, Scalar) else x for x in self.leaves)
        self.values = tuple(x for x in found if isinstance(x, Value))

    def __repr__(self) -> str:
        return str(self.op)

    def run(self, build: Any, device: torch.device) -> list[torch.Tensor]:
        """Return the results: returned tensors, then the changed arguments."""
        leaves = [_argument(leaf, build, device) for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        returned = [x for x in tree_leaves(self.op(*args, **kwargs)) if isinstance(x, torch.Tensor)]
        return [*returned, *(leaves[i] for i in self.changed)]


def _argument(leaf: Any, build: Any, device: torch.device) -> Any:
    if isinstance(leaf, Value):
        return build(leaf)
    if isinstance(leaf, Scalar):
        return build(leaf.value).item()
    return device if isinstance(leaf, torch.device) else leaf
