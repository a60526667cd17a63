"""The lowering by itself: what it cuts, what it leaves, and that nothing is lost. Needs no Triton."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from benchmarks.gpu.cases import FORMS, MoveCase

from syncline.errors import TransportError
from syncline.kernels import lower_device as lowering
from syncline.kernels.device import _sample
from syncline.kernels.lower_device import Cells, DeviceRuns, lower_device, signature


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


ZERO = column(0)
COLUMNS = {f.name for f in dataclasses.fields(DeviceRuns) if not f.name.endswith("dtype")} - {"section"}


def one(
    elems: int, src: int = 0, dst: int = 0, pos: int = 0, *, rows: int = 1, stride: int = 0, size: int = 2
) -> DeviceRuns:
    steps = column(stride)
    return DeviceRuns(
        *("", ""),
        column(rows),
        column(elems),
        column(size),
        ZERO,
        column(src),
        steps,
        ZERO,
        column(dst),
        steps,
        column(pos),
        column(stride // size),
        ZERO,
    )


def spans(cells: list[Cells]) -> list[tuple[int, int, int, int]]:
    """Return (source, destination, canonical byte, bytes) of every row of every run."""
    out = []
    for table in cells:
        width = table.form.dst_bytes * table.form.lanes
        step = table.form.src_bytes * table.form.lanes
        for i in range(len(table)):
            for row in range(int(table.rows[i])):
                at = [
                    int(base[i] + row * stride[i])
                    for base, stride in (
                        (table.src, table.src_stride),
                        (table.dst, table.dst_stride),
                        (table.pos, table.pos_stride),
                    )
                ]
                assert at[0] % min(step, 16) == 0
                assert at[1] % min(width, 16) == 0
                out.append((*at, int(table.cols[i]) * width))
    return out


def test_whole_cells_stay_one_run() -> None:
    (table,) = lower_device(one(4096, pos=8), ZERO, ZERO)
    assert table.form == ("u32", "u32", 4, 4, 4, True)
    assert table.cols.tolist() == [512]


def test_an_odd_byte_does_not_slow_down_the_rest() -> None:
    found = lower_device(one(5001, src=6, dst=22, pos=3), ZERO, ZERO)
    wide = [t for t in found if t.form.lanes == 4]
    assert [t.cols.sum() for t in wide] == [624]
    assert sum(n for *_, n in spans(found)) == 10002


def test_rows_are_cut_where_all_of_them_are_level() -> None:
    found = lower_device(one(100, src=4, dst=4, rows=7, stride=224), ZERO, ZERO)
    assert max(t.form.lanes for t in found) == 4
    uneven = lower_device(one(100, src=4, dst=4, rows=7, stride=222), ZERO, ZERO)
    assert {t.form.lanes * t.form.dst_bytes for t in uneven} == {2}


def test_only_the_low_bits_of_addresses_matter() -> None:
    assert signature(column(16, 33)) == signature(column(1 << 40, 49))
    assert signature(column(16)) != signature(column(18))


@pytest.mark.parametrize("form", FORMS)
def test_every_byte_once_and_at_its_place(form: tuple[str, str]) -> None:
    rng = np.random.default_rng(len(form[0]) * 31 + len(form[1]))
    for _ in range(60):
        case = MoveCase.random(rng, form, most=400)
        r = case.runs
        got = sorted(spans(lower_device(r, ZERO, ZERO)), key=lambda s: s[1])
        bytes_of = {}
        for _, dst, pos, length in got:
            for k in range(length):
                assert dst + k not in bytes_of
                bytes_of[dst + k] = pos + k
        want = {}
        for i in range(len(r)):
            for row in range(int(r.rows[i])):
                for k in range(int(r.elems[i] * r.itemsize[i])):
                    at = int(r.dst[i] + row * r.dst_stride[i]) + k
                    want[at] = int((r.pos[i] + row * r.pos_stride[i]) * r.itemsize[i]) + k
        assert bytes_of == want


@pytest.mark.parametrize("form", FORMS[2:4])
def test_sections_stay_together_and_lose_nothing(form: tuple[str, str]) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        runs = MoveCase.random(rng, form, most=400).runs
        part = np.sort(rng.integers(0, 3, len(runs)))
        found = lower_device(dataclasses.replace(runs, section=part), ZERO, ZERO)
        apart = []
        for cells in found:
            assert (np.diff(cells.section) >= 0).all()
            apart += [(n, spans([cells.take(cells.section == n)])) for n in range(3)]
        for n in range(3):
            take = {
                f.name: getattr(runs, f.name)[part == n]
                for f in dataclasses.fields(runs)
                if f.name in COLUMNS
            }
            alone = lower_device(dataclasses.replace(runs, **take), ZERO, ZERO)
            assert sorted(s for m, own in apart if m == n for s in own) == sorted(spans(alone))


def test_what_is_compiled_ahead_is_what_nearly_all_launch() -> None:
    forms = {t.form for t in lower_device(_sample(), ZERO, ZERO)}
    assert ("u32", "u32", 4, 4, 4, True) in forms
    assert ("u32", "u32", 4, 4, 4, False) in forms


def test_longer_than_the_kernels_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "MAX_EXTENT", 5)
    found = lower_device(one(13 * 8, rows=12, stride=224), ZERO, ZERO)
    assert int(max(t.rows.max() for t in found)) <= 5
    assert int(max(t.cols.max() for t in found)) <= 5
    rows = spans(found)
    assert sorted(rows) == sorted({(s, d, p, n) for s, d, p, n in rows})
    assert sum(n for *_, n in rows) == 12 * 13 * 16


def test_sixty_gigabytes_in_one_row() -> None:
    (table,) = lower_device(one(30 << 30), ZERO, ZERO)
    assert int(table.cols.sum()) * 16 == 60 << 30
    assert int(table.cols.max()) <= lowering.MAX_EXTENT
    assert int(table.tiles(2048).sum()) == (60 << 30) // (32 << 10)


def test_refusals_are_named() -> None:
    with pytest.raises(TransportError, match="no device kernel casts"):
        DeviceRuns("int8", "float32", *[column(1)] * 12)
    with pytest.raises(TransportError, match="differ in length"):
        DeviceRuns("", "", column(1, 2), *[column(1)] * 11)
    shifted = DeviceRuns("float32", "bfloat16", *[column(4)] * 4, column(2), *[column(4)] * 7)
    with pytest.raises(TransportError, match="not aligned to their own size"):
        lower_device(shifted, np.zeros(5, np.int64), np.zeros(5, np.int64))
