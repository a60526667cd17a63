"""Tables cut into slices, run by threads, with progress and cancellation."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import TransportError
from syncline.kernels import engine, host, locate, reference
from syncline.kernels.engine import Control, Op, Sweep
from syncline.kernels.table import Table


def matrix_table(
    src: np.ndarray, dst: np.ndarray, rows: int, elems: int, itemsize: int, runs: int = 1
) -> Table:
    """Runs of rows side by side: run i takes columns [i * elems, (i + 1) * elems) of a matrix of u8 rows."""
    i = np.arange(runs, dtype=np.int64)
    width = elems * runs
    same = np.full(runs, width * itemsize)
    return Table(
        dst=dst.ctypes.data + i * elems * itemsize,
        src=src.ctypes.data + i * elems * itemsize,
        rows=np.full(runs, rows),
        elems=np.full(runs, elems),
        dst_stride=same,
        src_stride=same,
        pos=i * elems,
        pos_stride=np.full(runs, width),
        itemsize=np.full(runs, itemsize, np.uint8),
        group=i.astype(np.int32),
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 40),
    st.integers(0, 500),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 4),
    st.integers(1, 9000),
    st.integers(1, 20000),
    st.integers(1, 3),
)
def test_any_cut_into_runs_slices_and_threads_does_the_same(
    rows: int, elems: int, itemsize: int, runs: int, run_bytes: int, slice_bytes: int, threads: int
) -> None:
    src = np.random.default_rng(rows).integers(0, 256, rows * elems * runs * itemsize, dtype=np.uint8)
    dst = np.zeros_like(src)
    table = matrix_table(src, dst, rows, elems, itemsize, runs)
    whole = Sweep(table, groups=runs).run(Op.DIGEST)
    cut = table.split(run_bytes)
    single = (cut.rows == 1) & (cut.elems == 1)
    assert int(cut.nbytes().sum()) == len(src)
    assert np.all((cut.nbytes() <= run_bytes) | single)
    near = table.by_source(run_bytes)
    assert np.all(np.diff(near.src) >= 0)
    assert np.array_equal(Sweep(near, groups=runs).run(Op.DIGEST), whole)
    control = Control()
    sweep = Sweep(cut, groups=runs, slice_bytes=slice_bytes)
    got = sweep.run(Op.COPY_DIGEST, control, threads)
    assert np.array_equal(src, dst)
    assert np.array_equal(got, whole)
    assert control.nbytes == sweep.nbytes == len(src)
    assert reference.combine(whole) == reference.digest_bytes(src, 0)


def test_a_cancelled_sweep_stops_between_slices_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    src = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    dst = np.zeros_like(src)
    table = matrix_table(src, dst, 1, 1 << 20, 1).split(1 << 16)
    control, original = Control(), host.copy_runs

    def copy_then_cancel(*columns: object) -> None:
        original(*columns)
        control.cancel()

    monkeypatch.setattr(engine.host, "copy_runs", copy_then_cancel)
    assert Sweep(table, slice_bytes=1 << 16).run(Op.COPY, control) is None
    assert control.cancelled
    assert control.nbytes == 1 << 16
    assert np.array_equal(dst[: 1 << 16], src[: 1 << 16])
    assert not dst[1 << 16 :].any()


def test_cancelling_after_the_last_slice_changes_nothing() -> None:
    src = np.arange(64, dtype=np.uint8)
    dst = np.zeros_like(src)
    control = Control()
    assert Sweep(matrix_table(src, dst, 1, 64, 1), groups=1).run(Op.COPY, control) is not None
    control.cancel()
    assert np.array_equal(src, dst)


def test_an_error_in_a_thread_stops_all_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    src = np.zeros(1 << 20, np.uint8)
    table = matrix_table(src, src.copy(), 1, 1 << 20, 1).split(1 << 12)
    calls: list[str] = []

    def fail(*_: object) -> None:
        calls.append(threading.current_thread().name)
        raise TransportError("broken")

    monkeypatch.setattr(engine.host, "copy_runs", fail)
    with pytest.raises(TransportError, match="broken"):
        Sweep(table, slice_bytes=1 << 12).run(Op.COPY, threads=3)
    assert len(calls) <= 3
    assert not [t for t in threading.enumerate() if t.name == "syncline-copy"]


@pytest.mark.parametrize("op", list(Op))
def test_tables_that_cast(op: Op) -> None:
    values = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    bits = values.view(np.uint32)
    out = np.zeros(len(bits), np.uint16)
    one = {"rows": 1, "elems": len(bits), "dst_stride": 0, "src_stride": 0, "pos": 5, "pos_stride": 0}
    columns = {name: np.array([v], np.int64) for name, v in one.items()}
    table = Table(
        dst=np.array([out.ctypes.data]),
        src=np.array([bits.ctypes.data]),
        itemsize=np.full(1, 2, np.uint8),
        group=np.zeros(1, np.int32),
        dst_dtype="bfloat16",
        src_dtype="float32",
        src_itemsize=4,
        **columns,
    ).split(10_000)
    got = Sweep(table, groups=1, slice_bytes=20_000).run(op, threads=2)
    want = reference.cast(bits, "float32", "bfloat16")
    assert np.array_equal(out, want if op is not Op.DIGEST else np.zeros_like(out))
    assert int(got[0]) == (0 if op is Op.COPY else reference.digest_elements(want, 5))


def test_a_table_of_ragged_columns_is_refused() -> None:
    src = np.zeros(64, np.uint8)
    good = matrix_table(src, src, 1, 8, 1, runs=2)
    columns = vars(good)
    with pytest.raises(TransportError, match="length"):
        Table(**(columns | {"pos": np.zeros(1, np.int64)}))
    with pytest.raises(TransportError, match="size of its source"):
        Table(**(columns | {"src_dtype": "float32", "dst_dtype": "bfloat16"}))


def test_the_second_pass_names_element_position_and_block() -> None:
    src = np.random.default_rng(0).integers(0, 256, 40 * 3 * 1000 * 2, dtype=np.uint8)
    dst = src.copy()
    table = matrix_table(src, dst, 40, 1000, 2, runs=3)
    assert locate.first_difference(table) is None
    element = 17 * 3000 + 1000 + 321  # row 17, second run, element 321
    dst[2 * element + 1] ^= 0x10
    found = locate.first_difference(table)
    assert found is not None
    assert (found.run, found.row, found.elem) == (1, 17, 321)
    assert found.position == element
    assert found.block == element * 2 // 16384
    assert found.expected == src[2 * element : 2 * element + 2].tobytes().hex() != found.found
