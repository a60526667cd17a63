"""Two independent checks of what was learned: Megatron-Bridge's own export, and coordinates on real memory.

The watch follows memory without weights. The first check runs the library's export as users run it, with all
of its communication, and compares values. The second sends numbers through the same conversions on real
memory, and compares where each number landed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from syncline.adapters.megatron.learn import PREFIX, values_of
from syncline.adapters.megatron.quiet import Quiet, quiet
from syncline.errors import AdapterError, LayoutError
from syncline.layout.probe import probe_exporter
from syncline.layout.written import Write

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from syncline.adapters.megatron.bridge import BridgeExport
    from syncline.adapters.megatron.trace import Held
    from syncline.adapters.megatron.trainer import MegatronTrainer
    from syncline.layout.lattice import Map
    from syncline.layout.probe import Probe


def check_values(trainer: MegatronTrainer, exported: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Compare every box that a rank holds with an export of the whole model; return how many there are.

    Args:
        trainer: of this rank.
        exported: (name, tensor) of the whole model, such as ``bridge.export_hf_weights(chunks, cpu=True)``.
            It is consumed to its end even after a difference: it may be collective.

    Raises:
        AdapterError: a box differs, or a held tensor was not exported; the tensor is named.
    """
    trainer.quiesce()
    by_name: dict[str, list[Held]] = {}
    for one in trainer.learned.held:
        by_name.setdefault(one.name, []).append(one)
    problem: AdapterError | None = None
    compared = 0
    missing = dict.fromkeys(by_name)
    for name, tensor in exported:
        missing.pop(name, None)
        for one in by_name.get(name, ()):
            compared += 1
            problem = problem or _difference(one, tensor, trainer)
    if problem is not None:
        raise problem
    for name in missing:
        raise AdapterError(
            "the exporter does not export a tensor that was learned from it",
            expected="the same names as when it was watched",
            rank=trainer.rank,
            tensor=name,
            hint="an exporter of another version, or one that depends on values",
        )
    return compared


def _difference(one: Held, tensor: torch.Tensor, trainer: MegatronTrainer) -> AdapterError | None:
    where = tuple(slice(o, o + n) for o, n in zip(one.box.offset, one.box.size, strict=True))
    found = values_of(one, trainer.live_tensor(one.live))
    expected = tensor.detach()[where].to(found.device)
    if expected.shape == found.shape and torch.equal(expected.to(found.dtype), found):
        return None
    return AdapterError(
        "what was learned disagrees with the exporter's own export",
        expected=f"{tuple(expected.shape)} of {one.box} as exported",
        found=f"{tuple(found.shape)} of {one.live}",
        rank=trainer.rank,
        tensor=one.name,
        hint="report the versions of megatron-core and megatron-bridge; nothing was published",
    )


def probe(export: BridgeExport, tensors: Mapping[str, torch.Tensor]) -> Probe:
    """Send coordinates through a bridge's conversions on real memory, this rank's shapes and sizes.

    Args:
        export: of this rank.
        tensors: live tensors by name; only their shapes and dtypes are used.
    """
    twins = {
        name: torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
        for name, tensor in tensors.items()
        if not export.unmapped(name)
    }

    def run(live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        answers = Quiet(lambda tensor, _peer: torch.full_like(tensor, -1))
        with quiet(answers):
            return dict(export.export(live, answers))

    return probe_exporter(twins, run)


def agree(held: Iterable[Held], probed: Probe) -> int:
    """Check that a watch and a probe of one exporter say the same; return how many elements they cover.

    Raises:
        LayoutError: names the first checkpoint tensor that differs.
    """
    numbers: dict[str, int] = {}
    by_name: dict[str, list[Held]] = {}
    for one in held:
        by_name.setdefault(one.name, []).append(one)
    total = 0
    for name, listed in by_name.items():
        shape = listed[0].shape
        count = int(np.prod(shape, dtype=np.int64))
        watched = np.full(count, -1, np.int64)
        landed = np.full(count, -1, np.int64)
        for one in listed:
            if one.live.startswith(PREFIX):
                _check_computed(one, probed)
                continue
            m = Write(one.name, one.shape, one.box, one.view, one.dtype, one.dtype).map
            live, place = _expanded(m)
            watched[place] = _numbered(one.live, live, numbers)
        for write in probed.writes.get(name, ()):
            place, live = _expanded(write.map)
            inside = place < count  # rows of padding lie behind the checkpoint's
            landed[place[inside]] = _numbered(write.name, live[inside], numbers)
        if (watched != landed).any():
            at = int(np.flatnonzero(watched != landed)[0])
            raise LayoutError(
                "the watch of an exporter and its probe differ",
                expected=f"probe: {int(landed[at])}",
                found=f"watch: {int(watched[at])}, at element {at} of {shape}",
                tensor=name,
            )
        total += int((watched >= 0).sum())
    return total


def _check_computed(one: Held, probed: Probe) -> None:
    """Check that a probe found something else than moved elements where the watch recorded operations."""
    if one.box not in probed.computed.get(one.name, ()):
        raise LayoutError(
            "the watch of an exporter and its probe differ",
            expected=f"probe: computed are {probed.computed.get(one.name, ())}",
            found=f"watch: {one.box} is",
            tensor=one.name,
        )


def _numbered(live: str, elements: NDArray[np.int64], numbers: dict[str, int]) -> NDArray[np.int64]:
    return elements + (numbers.setdefault(live, len(numbers)) << 40)


def _expanded(m: Map) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the elements of both sides of a map, int64[numel] each."""
    a, b = np.array([m.a], np.int64), np.array([m.b], np.int64)
    for n, step_a, step_b in m.axes:
        steps = np.arange(n, dtype=np.int64)
        a = (a[:, None] + steps * step_a).reshape(-1)
        b = (b[:, None] + steps * step_b).reshape(-1)
    return a, b


def bridge_export(trainer: MegatronTrainer, bridge: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Return Megatron-Bridge's own export of the whole model; collective."""
    return bridge.export_hf_weights(trainer.chunks, cpu=True, show_progress=False)
