"""Noticing that a live model's tensors are not where, or what, they were when its layout was learned."""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

from syncline.adapters.vllm import twin as twins
from syncline.errors import AdapterError

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True)
class _Pinned:
    pointer: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Pinned:
        return cls(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


class Pins:
    """Every parameter and buffer of a model as it was.

    Args:
        model: the live model.
        who: the process, for errors.
    """

    def __init__(self, model: nn.Module, who: str) -> None:
        self._model, self._who = model, who
        self._pinned = {name: _Pinned.of(tensor) for name, tensor in twins.tensors(model).items()}
        self._seen = _Seen(model)

    def check(self) -> None:
        """Compare; cheap as long as the model holds the very objects that it held.

        Raises:
            AdapterError: a tensor moved, or changed its dtype, shape or strides; named.
        """
        if self._seen.same():
            return
        for name, tensor in twins.tensors(self._model).items():
            pinned, now = self._pinned.get(name), _Pinned.of(tensor)
            if pinned != now:
                raise AdapterError(
                    "a live tensor moved",
                    expected=pinned,
                    found=now,
                    rank=self._who,
                    tensor=name,
                    hint="captured graphs keep addresses: nothing but syncline may replace parameters",
                )
        self._seen = _Seen(self._model)


class _Seen:
    """What hangs at every module: objects by place, and where tensors lie.

    Objects keep their shape and dtype unless their data is exchanged, and then they lie elsewhere.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[dict[str, Any], tuple[object, ...]]] = []
        self._tensors: list[torch.Tensor] = []
        for module in model.modules():
            hung = (module._parameters, module._buffers, module._modules)  # noqa: SLF001 (where they hang)
            self._held += [(registry, tuple(registry.values())) for registry in hung]
            self._tensors += [t for registry in hung[:2] for t in registry.values() if t is not None]
        self._pointers = [tensor.data_ptr() for tensor in self._tensors]

    def same(self) -> bool:
        for registry, held in self._held:
            if len(registry) != len(held) or not all(map(is_, registry.values(), held)):
                return False
        return [tensor.data_ptr() for tensor in self._tensors] == self._pointers
