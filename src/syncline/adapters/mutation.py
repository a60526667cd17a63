"""Noticing that a trainer is about to change its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn


class MutationPoints:
    """Calls every listener ahead of each mutation of a model's parameters.

    Known points: ``optimizer.step`` of the optimizers given and, by torch's global hook, of every other torch
    optimizer that holds one of the model's parameters; ``load_state_dict`` of the model or any module in it;
    and whatever the trainer announces itself by `announce`.

    Args:
        model: the trainer's model.
        optimizers: its optimizers; wrappers with an ``optimizer`` attribute are looked through.
        parameters: returns the parameters that hang in the model now.
    """

    def __init__(
        self, model: nn.Module, optimizers: Iterable[Any], parameters: Callable[[], Iterable[object]]
    ) -> None:
        self._model, self._parameters = model, parameters
        self._optimizers = [_unwrap(optimizer) for optimizer in optimizers]
        self._listeners: dict[int, Callable[[str], None]] = {}
        self._hooks: list[Any] = []
        self._count = 0

    def listen(self, before: Callable[[str], None]) -> MutationHandle:
        """Call ``before(reason)`` ahead of every mutation until the handle is removed."""
        if not self._hooks:
            self._install()
        self._count += 1
        self._listeners[self._count] = before
        return MutationHandle(self, self._count)

    def announce(self, reason: str) -> None:
        """Call every listener."""
        for before in list(self._listeners.values()):
            before(reason)

    def forget(self, number: int) -> None:
        """Remove a listener; the last one takes the hooks with it."""
        self._listeners.pop(number, None)
        if not self._listeners:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def _install(self) -> None:
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._step))
        self._hooks.append(register_optimizer_step_pre_hook(self._any_step))
        for module in self._model.modules():
            if module._parameters or module._buffers:  # noqa: SLF001 (where tensors hang)
                self._hooks.append(module.register_load_state_dict_pre_hook(self._load))

    def _step(self, *_: object) -> None:
        self.announce("optimizer.step")

    def _any_step(self, optimizer: Any, *_: object) -> None:
        if any(optimizer is known for known in self._optimizers):
            return  # its own hook speaks
        ours = {id(parameter) for parameter in self._parameters()}
        if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            self.announce("optimizer.step")

    def _load(self, *_: object) -> None:
        self.announce("load_state_dict")


class MutationHandle:
    """One listener of `MutationPoints`."""

    def __init__(self, points: MutationPoints, number: int) -> None:
        self._points, self._number = points, number

    def remove(self) -> None:
        """Stop calling the listener; a second call does nothing."""
        self._points.forget(self._number)


def _unwrap(optimizer: Any) -> Any:
    """Return the torch optimizer behind a wrapper that never ran ``Optimizer.__init__`` (accelerate's)."""
    while "_optimizer_step_pre_hooks" not in vars(optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
