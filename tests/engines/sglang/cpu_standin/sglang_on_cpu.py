"""What SGLang needs, beyond its own options, to run multi-head latent attention on a CPU without kernels.

SGLang has no rule of its own for this pair and falls back to one that stores the compressed cache and then
reads it as if it were expanded. Its absorbed form works, and is the one that reads the derived weights.
"""

from __future__ import annotations


def register() -> None:
    """Choose the absorbed form for the backend ``torch_native``, through SGLang's own registry."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import (  # noqa: PLC0415
        AttentionBackendRegistry,
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register("torch_native", lambda _attention, _batch: AttnForwardMethod.MLA)
