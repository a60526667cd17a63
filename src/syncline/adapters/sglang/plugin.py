"""The plug-in that SGLang loads in each of its processes: entry point ``sglang.srt.plugins``.

It puts one hook around the scheduler's handler of weight updates. A request whose ``load_format`` is
``"syncline"`` carries one of our commands and is answered here; every other request passes through untouched.
A custom weight loader would be reached by the same request, but could not answer: its result is dropped, and
an exception in it ends the scheduler.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar

from syncline.adapters.sglang.srt import srt

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncline.adapters.sglang.host import Host

logger = logging.getLogger(__name__)

TARGET = (
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager.update_weights_from_tensor"
)


def register() -> None:
    """Register the hook; SGLang calls this in every process, and applies the hooks afterwards."""
    hooks = srt("plugins.hook_registry")
    hooks.HookRegistry.register(TARGET, handle, hooks.HookType.AROUND)


def handle(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Answer a command of syncline, or pass the request on."""
    from syncline.adapters.sglang.commands import FORMAT  # noqa: PLC0415 (only when a weight update comes)

    if request.load_format != FORMAT:
        return original(manager, request)
    payload = b"".join(bytes(part) for part in request.serialized_named_tensors)
    try:
        success, message = _host_of(manager).answer(payload)
    except Exception as error:  # an engine outlives whatever goes wrong with its updates
        logger.exception("a command of syncline failed")
        success, message = False, f"syncline failed in this engine: {type(error).__name__}: {error}"
    return srt("managers.io_struct").UpdateWeightsFromTensorReqOutput(success=success, message=message)


class _Hosts:
    """The host of each manager of this process; there is one manager in a scheduler process."""

    by_manager: ClassVar[dict[int, Host]] = {}


def _host_of(manager: Any) -> Host:
    from syncline.adapters.sglang.host import Host  # noqa: PLC0415

    found = _Hosts.by_manager.get(id(manager))
    if found is None:
        found = _Hosts.by_manager[id(manager)] = Host(manager)
    return found
