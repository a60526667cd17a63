"""A custom weight loader of SGLang's own kind that loads nothing: it checks, in each rank, what was learned.

It sends coordinates through SGLang's own loader on a twin in real memory (the coordinate probe), compares
where they land with what the adapter's trace says, and writes what it saw as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

    from syncline.adapters.sglang.adapter import SGLangAdapter


def run(_model: nn.Module, named: list[tuple[str, Any]]) -> None:
    """Write ``probe-<rank>.json`` into the directory that the first tensor's name is."""
    from syncline.adapters.sglang.plugin import _Hosts  # noqa: PLC0415 (only in an engine that joined)

    (host,) = _Hosts.by_manager.values()
    adapter = host._adapted()
    seen = {"probed": probe(adapter), "checked": check(adapter)}
    (Path(named[0][0]) / f"probe-{adapter.rank}.json").write_text(json.dumps(seen))


def probe(adapter: SGLangAdapter) -> int:
    """Return how many live tensors are filled as the trace says."""
    from syncline.adapters.sglang import twin  # noqa: PLC0415 (in SGLang's process)
    from syncline.layout.probe import compare, probe_loader  # noqa: PLC0415

    trace = adapter.learned.trace
    with torch.inference_mode(mode=False), torch.no_grad():
        load, state = twin.real(adapter._runner, adapter.learned)
        probed = probe_loader(state(), load, adapter._checkpoint, state=state)
    compare(trace, probed)
    filled = trace.writes.keys() | {name for replay in trace.replays if replay.inputs for name in replay.live}
    return len(filled & (probed.writes.keys() | probed.computed.keys()))


def check(adapter: SGLangAdapter) -> int:
    """Return how many live tensors the twin check compared."""
    from syncline.adapters.sglang import twin  # noqa: PLC0415 (in SGLang's process)

    return twin.check(adapter._runner, adapter.learned, adapter._checkpoint).tensors
