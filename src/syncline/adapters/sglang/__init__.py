"""SGLang engines as readers: `SGLangInstance` for their user, a plug-in and an adapter in their schedulers.

Importing this package imports neither SGLang nor the store: SGLang does so in each of its processes, for the
plug-in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from syncline.adapters.sglang.instance import SGLangInstance

__all__ = ["SGLangInstance"]


def __getattr__(name: str) -> Any:
    """Import `SGLangInstance` when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from syncline.adapters.sglang import instance  # noqa: PLC0415 (see above)

    return getattr(instance, name)
