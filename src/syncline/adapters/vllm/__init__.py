"""Inference with vLLM: its weight-transfer engine ``syncline``, and the way to drive it from outside.

``register`` is the entry point of the group ``vllm.general_plugins``: vLLM calls it in every process. Turned
on by ``--weight-transfer-config '{"backend": "syncline"}'``; nothing of vLLM is patched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncline.adapters.vllm.scan import make_llvm_scannable
from syncline.adapters.vllm.upstream import upstream

if TYPE_CHECKING:
    from syncline.adapters.vllm.instance import VLLMInstance as VLLMInstance

__all__ = ["BACKEND", "VLLMInstance", "register"]

BACKEND = "syncline"


def register() -> None:
    """Register the weight-transfer engine with vLLM; a second call does nothing."""
    make_llvm_scannable()
    factory = upstream("distributed.weight_transfer.factory").WeightTransferEngineFactory
    if BACKEND not in factory._registry:  # noqa: SLF001 (the factory itself only raises on a second one)
        factory.register_engine(BACKEND, "syncline.adapters.vllm.engine", "SynclineTransferEngine")


def __getattr__(name: str) -> Any:
    if name == "VLLMInstance":
        from syncline.adapters.vllm.instance import VLLMInstance  # noqa: PLC0415 (msgspec, zmq: when it is used)

        return VLLMInstance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
