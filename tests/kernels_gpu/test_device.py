"""The device kernels against the CPU reference, bit for bit; and their digests under any sharding."""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np
import pytest
import torch
from benchmarks.gpu.cases import COPY, FORMS, MoveCase, QuantiseCase

from syncline.errors import TransportError
from syncline.kernels import device as kernels
from syncline.kernels import fp8, reference
from syncline.kernels.device import DeviceSweep
from syncline.kernels.engine import Op
from syncline.kernels.lower_device import DeviceRuns

COUNT = 4


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("form", FORMS[2:])
@pytest.mark.parametrize("op", [Op.COPY, Op.COPY_DIGEST, Op.DIGEST])
def test_like_the_reference(device: torch.device, form: tuple[str, str], op: Op) -> None:
    rng = np.random.default_rng(zlib.crc32(f"{form} {op}".encode()))
    for _ in range(COUNT):
        assert MoveCase.random(rng, form).wrong(device, op) == ""


def test_read_back_and_with_few_multiprocessors(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "multiprocessors", lambda _: 4)
    rng = np.random.default_rng(8)
    for form in FORMS[2:5]:
        assert MoveCase.random(rng, form).wrong(device, Op.COPY_DIGEST, again=True) == ""
        assert MoveCase.random(rng, form).wrong(device, Op.COPY_DIGEST, sms=2) == ""


@pytest.mark.parametrize("most", [40, 40000])
def test_narrow_and_wide_tiles(device: torch.device, most: int) -> None:
    rng = np.random.default_rng(most)
    for _ in range(COUNT):
        assert MoveCase.random(rng, COPY, most).wrong(device, Op.COPY_DIGEST) == ""


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_digests_add_up_over_any_sharding(device: torch.device, itemsize: int) -> None:
    rng = np.random.default_rng(itemsize)
    height, width = int(rng.integers(20, 60)), int(rng.integers(100, 700))
    data = rng.integers(0, 256, height * width * itemsize, dtype=np.uint8)
    rows, cols = (np.unique([0, n, *rng.integers(0, n, 3)]) for n in (height, width))
    top, left = (g.reshape(-1) for g in np.meshgrid(rows[:-1], cols[:-1], indexing="ij"))
    down, across = (g.reshape(-1) for g in np.meshgrid(np.diff(rows), np.diff(cols), indexing="ij"))
    zero, corner = np.zeros(len(top), np.int64), top * width + left
    where = (zero, corner * itemsize, zero + width * itemsize)
    group = np.arange(len(top))
    runs = DeviceRuns(*("", ""), down, across, zero + itemsize, *where, *where, corner, zero + width, group)
    held = torch.from_numpy(data).to(device)
    sweep = DeviceSweep([runs], len(top), device)
    sweep.bind(column(held.data_ptr()), column(held.data_ptr()))
    got = sweep.run(Op.DIGEST)
    assert got is not None
    assert reference.combine(got.cpu().numpy().view(np.uint64)) == reference.digest_bytes(data, 0)


def test_bound_again_elsewhere_and_aligned_otherwise(device: torch.device) -> None:
    case = MoveCase.random(np.random.default_rng(5), COPY)
    want, _ = case.expected()
    sweep = DeviceSweep([case.runs], 3, device)
    with pytest.raises(TransportError, match="not bound"):
        sweep.run(Op.COPY)
    for shift in (0, 0, 3, 8):
        pad = np.zeros(shift, np.uint8)
        src = torch.from_numpy(np.concatenate([pad, case.src])).to(device)
        dst = torch.from_numpy(np.concatenate([pad, case.dst])).to(device)
        sweep.bind(column(src.data_ptr() + shift), column(dst.data_ptr() + shift))
        sweep.run(Op.COPY)
        assert np.array_equal(dst.cpu().numpy()[shift:], want)


@pytest.mark.parametrize("form", [COPY, ("float32", "bfloat16")])
def test_in_sections_as_in_one(device: torch.device, form: tuple[str, str]) -> None:
    rng = np.random.default_rng(11)
    for _ in range(COUNT):
        case = MoveCase.random(rng, form)
        parts = np.sort(rng.integers(0, 4, len(case.runs)))
        src, dst = (torch.from_numpy(b.copy()).to(device) for b in (case.src, case.dst))
        sweep = DeviceSweep([dataclasses.replace(case.runs, section=parts)], 3, device)
        sweep.bind(*(column(b.data_ptr()) for b in (src, dst)))
        want, digests = case.expected()
        sweep.begin(Op.COPY_DIGEST)
        for number in range(5):
            sweep.section(number, Op.COPY_DIGEST)
        assert np.array_equal(dst.cpu().numpy(), want)
        assert np.array_equal(sweep.digests(), digests)


def test_nothing_to_do(device: torch.device) -> None:
    sweep = DeviceSweep([], 2, device)
    sweep.bind(column(), column())
    got = sweep.run(Op.COPY_DIGEST)
    assert got is not None
    assert got.tolist() == [0, 0]
    assert sweep.launches == 0


def test_quantised_like_the_reference(device: torch.device) -> None:
    rng = np.random.default_rng(3)
    for _ in range(COUNT * 2):
        assert QuantiseCase.random(rng).wrong(device) == ""


def test_e4m3_like_torch() -> None:
    rng = np.random.default_rng(2)
    values = np.concatenate([rng.standard_normal(20000) * s for s in (1e-3, 1e-2, 1, 200)])
    values = np.clip(values, -448, 448).astype(np.float32)
    want = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(fp8.to_e4m3(values.view(np.uint32)), want)


def test_quantising_keeps_values_and_marks_what_is_broken() -> None:
    rng = np.random.default_rng(4)
    weight = torch.from_numpy(rng.standard_normal((200, 300))).to(torch.bfloat16)
    weight[150, 299], weight[:128, :128] = float("nan"), 0
    q, scale = fp8.quantise(weight.view(torch.int16).numpy().view(np.uint16))
    back = torch.from_numpy(q).view(torch.float8_e4m3fn).float()
    spread = torch.from_numpy(scale).repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    assert scale[0, 0] == 1
    assert not back[:128, :128].any()
    assert back[128:, 256:].isnan().all()
    assert np.isnan(scale[1, 2])
    good = ~back.isnan()
    assert torch.allclose((back * spread)[good], weight.float()[good], rtol=0.07, atol=0.01)
    assert back[good].abs().max() == 448
    _, coarse = fp8.quantise(weight.view(torch.int16).numpy().view(np.uint16), power_of_two=True)
    fine = np.isfinite(coarse)
    assert (np.log2(coarse[fine]) % 1 == 0).all()
    assert (coarse[fine] >= scale[fine]).all()


def test_matrices_that_are_not_aligned_are_refused() -> None:
    good = [column(0)] * 6 + [column(128), column(128)]
    fp8.Matrices(*good)
    with pytest.raises(TransportError, match="not aligned"):
        fp8.Matrices(column(1), *good[1:])
    with pytest.raises(TransportError, match="differ in length"):
        fp8.Matrices(column(0, 0), *good[1:])
