"""Remembers which layouts stood the twin check: it runs once a host for each engine build, model and layout.

The check loads a whole rank of random weights into host memory, through the engine's own loader. What it
proves does not change from start to start, so that a file says that it was proved.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from syncline.layout.written import Spec
    from syncline.verify.twin import TwinReport

logger = logging.getLogger(__name__)


def directory() -> Path:
    """Return where it is remembered: ``syncline/twins`` in ``$XDG_CACHE_HOME``, or else in ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "syncline" / "twins"


def once(
    build: Mapping[str, object], checkpoint: Mapping[str, Spec], check: Callable[[], TwinReport]
) -> bool:
    """Run a twin check unless the same one was passed before; return whether it ran.

    Args:
        build: what the outcome depends on besides the checkpoint's tensors: the engine's version, the model's
            configuration, its quantisation, the rank and the fingerprint of its layout.
        checkpoint: its tensors by name.
        check: raises if the layout is wrong. It is not remembered then.

    Raises:
        EffectiveMismatchError: as ``check`` does.
    """
    known = {**build, "syncline": version("syncline"), "checkpoint": _fingerprint(checkpoint)}
    text = json.dumps(known, sort_keys=True, default=str)
    path = directory() / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.json"
    if path.is_file():
        return False
    report = check()
    logger.info("the layout stands the twin check: %d tensors, %d elements", report.tensors, report.elements)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        logger.warning("that the layout stands the twin check cannot be remembered: %s", error)
    return True


def _fingerprint(checkpoint: Mapping[str, Spec]) -> str:
    listed = sorted((name, spec.shape, spec.dtype) for name, spec in checkpoint.items())
    return hashlib.blake2b(json.dumps(listed).encode(), digest_size=16).hexdigest()
