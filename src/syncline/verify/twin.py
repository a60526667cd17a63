"""The twin check: random bytes through an engine's own loader, against what a traced layout would install.

A digest proves that bytes arrived and says nothing about where they belong. The engine's own loader does:
what it makes of random checkpoint tensors must be, bit for bit, what the traced boxes and replays make of
them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from syncline import faults
from syncline.errors import EffectiveMismatchError
from syncline.layout.dtype import Float, dtype, itemsize
from syncline.layout.export import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from syncline.layout.loader import Loader
    from syncline.layout.replay import Replay
    from syncline.layout.written import LoaderTrace, Spec, Write

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20
GROUP_BYTES = 1 << 28  # of live tensors that nobody grouped, compared together


@dataclass(frozen=True, slots=True)
class TwinReport:
    """What a twin check compared.

    Attributes:
        tensors: live tensors, all of them bit-equal.
        elements: their elements.
        written: elements that stand for copies of checkpoint elements.
        replayed: elements that replays wrote.
        untouched: elements that neither wrote, and that the loader left alone.
        groups: in how many groups the memory for what was expected was needed.
    """

    tensors: int
    elements: int
    written: int
    replayed: int
    untouched: int
    groups: int


def twin_check(
    trace: LoaderTrace,
    twin: Mapping[str, torch.Tensor],
    load: Loader,
    checkpoint: Mapping[str, Spec],
    seed: int = 0,
    *,
    state: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    groups: Sequence[Sequence[str]] | None = None,
) -> TwinReport:
    """Load random tensors by the engine's own loader and compare every live tensor with the trace's.

    Extra memory is that of one group: what is expected of its live tensors, and the checkpoint tensors of
    one of them at a time.

    Args:
        trace: of the same loader, model and parallel layout.
        twin: a real twin's tensors on the CPU; their contents are destroyed.
        load: its loader; gets (name, tensor with contents), made one by one.
        checkpoint: the checkpoint's tensors.
        seed: of the random contents.
        state: returns the twin's tensors after loading, where the loader replaces them.
        groups: live names compared together, such as a layer's; those of a trace's ``live`` that are in none
            form groups of `GROUP_BYTES`, in their own order.

    Raises:
        EffectiveMismatchError: a live tensor differs: in layout, or in the first element that is named along
            with its checkpoint name.
    """
    faults.point("verify.twin_check")
    with torch.no_grad():
        for name, tensor in twin.items():
            if name in trace.live:
                _random_into(tensor.detach(), seed, f"live {name}")
        load((name, random_tensor(spec, seed, name)) for name, spec in checkpoint.items())
        after = dict(twin if state is None else state())
        check = _Check(trace, checkpoint, after, seed)
        listed = _groups(trace, groups)
        for group in listed:
            check.group(group)
    return TwinReport(
        len(trace.live), check.elements, check.written, check.replayed, check.untouched, len(listed)
    )


def random_tensor(spec: Spec, seed: int, name: str) -> torch.Tensor:
    """Return a tensor of random bits, every element finite; the same for the same seed, name and spec."""
    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    _random_into(tensor, seed, name)
    return tensor


def _random_into(tensor: torch.Tensor, seed: int, name: str) -> None:
    state = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    source = np.random.default_rng(int.from_bytes(state, "little"))
    kind = tensor.dtype
    flat = tensor.view(-1) if tensor.is_contiguous() else torch.empty(tensor.numel(), dtype=kind)
    for low in range(0, flat.numel(), _CHUNK):
        part = flat[low : low + _CHUNK]
        raw = torch.from_numpy(
            np.frombuffer(source.bytes(part.numel() * part.element_size()), np.uint8).copy()
        )
        part.view(torch.uint8).copy_(raw)
        _make_finite(part)
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))


def _make_finite(flat: torch.Tensor) -> None:
    """Change the bits that make no finite value: of floats the exponent, of booleans all but one."""
    if flat.dtype == torch.bool:
        flat.view(torch.uint8).bitwise_and_(1)
        return
    if flat.is_complex():
        _make_finite(torch.view_as_real(flat).view(-1))
        return
    values = dtype(dtype_name(flat.dtype)).values
    if not isinstance(values, Float) or flat.dtype == torch.float4_e2m1fn_x2:
        return
    width = 8 * flat.element_size()
    bits = flat.view(_BITS[flat.element_size()])
    if flat.dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        bits.masked_fill_(bits == 0x80, 0)
        return
    if flat.dtype == torch.float8_e8m0fnu:
        bits.masked_fill_(bits == 0xFF, 0x7F)
        return
    mantissa = values.precision - 1
    exponent = ((1 << (width - 1 - mantissa)) - 1) << mantissa
    clear = 1 << (width - 2)
    if values.infinite:
        special = (bits & exponent) == exponent
    else:  # e4m3fn: only all ones is NaN
        special = (bits & ((1 << (width - 1)) - 1)) == (1 << (width - 1)) - 1
    bits.copy_(torch.where(special, bits & ~clear, bits))


def _groups(trace: LoaderTrace, given: Sequence[Sequence[str]] | None) -> list[list[str]]:
    """Return groups of live names that cover all of them: the given ones, the rest by size."""
    found = [[name for name in group if name in trace.live] for group in given or ()]
    listed = {name for group in found for name in group}
    group: list[str] = []
    room = GROUP_BYTES
    for name, spec in trace.live.items():
        if name in listed:
            continue
        size = torch.Size(spec.shape).numel() * itemsize(spec.dtype)
        if group and size > room:
            found.append(group)
            group, room = [], GROUP_BYTES
        group.append(name)
        room -= size
    return [group for group in [*found, group] if group]


class _Check:
    """Compares group by group and counts."""

    def __init__(
        self,
        trace: LoaderTrace,
        checkpoint: Mapping[str, Spec],
        after: Mapping[str, torch.Tensor],
        seed: int,
    ) -> None:
        self._trace, self._checkpoint, self._after, self._seed = trace, checkpoint, after, seed
        self._replays: dict[str, list[Replay]] = {}
        for replay in trace.replays:
            for name in replay.live:
                self._replays.setdefault(name, []).append(replay)
        self.elements = self.written = self.replayed = self.untouched = 0

    def group(self, names: Iterable[str]) -> None:
        """Compare the live tensors of one group."""
        replays: dict[int, Replay] = {}
        expected: dict[str, torch.Tensor] = {}
        for name in names:
            expected[name] = self._expected(name)
            replays |= {id(replay): replay for replay in self._replays.get(name, ())}
        for replay in replays.values():
            outside = {n: self._blank(n) for n in replay.live if n not in expected}
            inputs = {n: random_tensor(self._checkpoint[n], self._seed, n) for n in replay.inputs}
            replay.run(inputs, expected | outside)
            self.replayed += sum(o.view.numel for o in replay.outputs if o.live in expected)
        for name, tensor in expected.items():
            self._compare(name, self._after[name].detach(), tensor)

    def _blank(self, name: str) -> torch.Tensor:
        spec = self._trace.live[name]
        return torch.empty_strided(spec.shape, spec.stride, dtype=getattr(torch, spec.dtype))

    def _expected(self, name: str) -> torch.Tensor:
        spec, found = self._trace.live[name], self._after.get(name)
        layout = (
            None if found is None else (tuple(found.shape), tuple(found.stride()), dtype_name(found.dtype))
        )
        if layout != (spec.shape, spec.stride, spec.dtype):
            raise EffectiveMismatchError(
                f"the live tensor {name!r} of the twin is not laid out as the traced one",
                expected=spec,
                found=layout or "no such tensor",
            )
        tensor = self._blank(name)
        _random_into(tensor, self._seed, f"live {name}")
        writes = self._trace.writes.get(name, ())
        for source in dict.fromkeys(write.name for write in writes):
            values = random_tensor(self._checkpoint[source], self._seed, source)
            for write in writes:
                if write.name == source:
                    install(tensor, write, values)
        self.elements += tensor.numel()
        self.written += sum(write.box.numel for write in writes)
        self.untouched += sum(box.numel for box in self._trace.holes.get(name, ()))
        return tensor

    def _compare(self, name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        a, b = found.reshape(-1), expected.reshape(-1)
        bits = _BITS[found.element_size()]
        for low in range(0, a.numel(), _CHUNK):
            differs = a[low : low + _CHUNK].view(bits) != b[low : low + _CHUNK].view(bits)
            if differs.any():
                at = low + int(differs.nonzero()[0])
                raise self._mismatch(name, at, a[at], b[at])

    def _mismatch(
        self, name: str, at: int, found: torch.Tensor, expected: torch.Tensor
    ) -> EffectiveMismatchError:
        spec = self._trace.live[name]
        index = tuple(int(i) for i in np.unravel_index(at, spec.shape)) if spec.shape else ()
        place = sum(i * s for i, s in zip(index, spec.stride, strict=True))
        source = next((w.name for w in self._trace.writes.get(name, ()) if w.map.holds(place)), None)
        replayed = next((r for r in self._replays.get(name, ()) if r.inputs), None)
        origin = source or (", ".join(replayed.inputs) if replayed is not None else None)
        return EffectiveMismatchError(
            f"the live tensor {name!r} of the twin is not what the traced layout installs",
            expected=f"{expected.item()} at {list(index)}, from {origin or 'nothing: a hole'}",
            found=found.item(),
            tensor=origin,
            hint="the loader depends on values, writes past torch, or is not the one that was traced",
        )


def install(tensor: torch.Tensor, write: Write, values: torch.Tensor) -> None:
    """Copy a write's box of a whole checkpoint tensor into a live tensor, by plain strided views."""
    m = write.map
    size = [axis.n for axis in m.axes]
    kind = getattr(torch, write.dst_dtype)
    into = tensor if tensor.dtype == kind else tensor.view(kind)
    flat = values.contiguous().view(-1)
    into.as_strided(size, [axis.a for axis in m.axes], tensor.storage_offset() + m.a).copy_(
        flat.as_strided(size, [axis.b for axis in m.axes], flat.storage_offset() + m.b)
    )
