"""Bindings on the wire, budgets from fabricated limits, and mappings of regions that lie."""

from __future__ import annotations

import fcntl
import gc
import os
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ManifestError, MemoryBudgetError, TransportError
from syncline.kernels import host, reference
from syncline.memory import Binding, Kind, Region, budget
from syncline.memory.arena import SEALS, Arena
from syncline.memory.budget import Sources, Use, require_memory
from syncline.memory.mapped import MappedRegion

PRINT = bytes(range(16))
GIB = 1 << 30


def example(storages: int = 5) -> Binding:
    regions = {0: Region(0, 0x1000, 1 << 40, Kind.ARENA), 7: Region(7, 0x2000, 640, Kind.SHARED, 3)}
    region = np.zeros(storages, np.int32)
    region[-1] = 7
    offset = np.arange(storages, dtype=np.int64) * 128
    return Binding(PRINT, 9, region, offset, regions)


def test_addresses_are_the_regions_plus_the_offsets() -> None:
    assert example().addresses().tolist() == [0x1000, 0x1080, 0x1100, 0x1180, 0x2000 + 512]


def test_a_binding_crosses_the_wire_without_its_pointers() -> None:
    sent = example()
    got = Binding.from_wire(sent.to_wire())
    assert (got.fingerprint, got.generation) == (PRINT, 9)
    assert [r.ptr for r in got.regions.values()] == [0, 0]
    assert got.regions[7] == Region(7, 0, 640, Kind.SHARED, 3)
    with pytest.raises(TransportError, match="not mapped"):
        got.addresses()
    here = got.relocated({0: 0x9000, 7: 0x8000})
    assert here.addresses().tolist() == [0x9000, 0x9080, 0x9100, 0x9180, 0x8000 + 512]
    assert {r.kind for r in here.regions.values()} == {Kind.MAPPED}
    assert sent.same_places(Binding(PRINT, 10, sent.region, sent.offset, sent.regions))
    assert not sent.same_places(got)


def test_twenty_thousand_private_storages_are_bound_in_milliseconds() -> None:
    addresses = np.arange(20_000) * 64 + 4096
    times = []
    for _ in range(9):
        start = time.perf_counter()
        found = Binding.private(PRINT, addresses, 3).addresses()
        times.append(time.perf_counter() - start)
    assert np.array_equal(found, addresses)
    assert min(times) < 0.01


@pytest.mark.parametrize(
    "lie",
    [
        {0: 2},
        {0: "x"},
        {4: b"123"},
        {5: b"12345678"},
        {3: []},
        {3: [[0, 1 << 40, 9, 0], [7, 640, 2, 0]]},
        {3: [[0, -5, 1, 0], [7, 640, 2, 0]]},
        {3: [[0, 1 << 40, 1, 0], [7, 511, 2, 0]]},
        {5: np.array([-1, 0, 0, 0, 0], "<i8").tobytes()},
    ],
)
def test_a_binding_that_lies_is_refused(lie: dict) -> None:
    fields = msgspec.msgpack.decode(example().to_wire())
    for place, value in lie.items():
        fields[place] = value
    with pytest.raises(ManifestError):
        Binding.from_wire(msgspec.msgpack.encode(fields))


@given(st.binary(max_size=200))
def test_any_bytes_decode_to_a_binding_or_a_manifest_error(blob: bytes) -> None:
    try:
        Binding.from_wire(blob)
    except ManifestError:
        return


def test_ragged_columns_and_unknown_regions_are_refused() -> None:
    with pytest.raises(ManifestError, match="one region and one offset"):
        Binding(PRINT, 0, np.zeros(2), np.zeros(3))
    with pytest.raises(TransportError, match="does not describe"):
        Binding(PRINT, 0, np.array([3]), np.array([0]), {}).addresses()


class System:
    """A fabricated machine: procfs, cgroup mounts and a shm directory, under one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sources = Sources(proc=root / "proc", cgroup=root / "cgroup", shm=root / "shm")
        (root / "shm").mkdir()
        self.write("proc/meminfo", f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB\n")
        self.write("proc/self/cgroup", "0::/\n")

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def free(self, kind: Use = Use.PRIVATE) -> int:
        free = budget.free_memory(kind, self.sources)
        assert free is not None
        return free.nbytes


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_the_machine_limits_where_no_cgroup_does(system: System) -> None:
    assert system.free() == 32 * GIB


def test_cgroup_v2_counts_clean_file_cache_and_every_ancestor(system: System) -> None:
    system.write("proc/self/cgroup", "0::/job/rank0\n")
    system.write("cgroup/job/rank0/memory.max", "max")
    system.write("cgroup/job/rank0/memory.current", 5 * GIB)
    system.write("cgroup/job/memory.max", 10 * GIB)
    system.write("cgroup/job/memory.current", 9 * GIB)
    assert system.free() == GIB
    stat = {"anon": 5, "inactive_file": 2 * GIB, "active_file": GIB, "shmem": 4 * GIB, "file_dirty": GIB}
    system.write("cgroup/job/memory.stat", "\n".join(f"{k} {v}" for k, v in stat.items()))
    assert system.free() == 3 * GIB
    system.write("cgroup/job/rank0/memory.max", 6 * GIB)
    assert system.free() == GIB


def test_cgroup_v1_and_paths_of_the_host_that_do_not_exist_here(system: System) -> None:
    system.write("proc/self/cgroup", "5:cpu:/x\n4:memory:/docker/abc\n0::/\n")
    system.write("cgroup/memory/memory.limit_in_bytes", 8 * GIB)
    system.write("cgroup/memory/memory.usage_in_bytes", 6 * GIB)
    system.write(
        "cgroup/memory/memory.stat", f"total_inactive_file {GIB}\ninactive_file 5\ntotal_shmem {GIB}"
    )
    assert system.free() == 3 * GIB
    system.write("cgroup/memory/memory.limit_in_bytes", 0x7FFFFFFFFFFFF000)
    assert system.free() == 32 * GIB


def test_shm_is_bounded_by_its_tmpfs_and_a_memfd_is_not(system: System) -> None:
    bytes_free = os.statvfs(system.sources.shm).f_bavail * os.statvfs(system.sources.shm).f_frsize
    system.write("proc/meminfo", f"MemAvailable: {bytes_free >> 9} kB")  # twice as much
    assert system.free(Use.MEMFD) == bytes_free >> 9 << 10
    assert abs(system.free(Use.SHM) - bytes_free) < GIB  # others write to the same disk


def test_the_error_says_what_for_how_much_and_why(system: System) -> None:
    require_memory(32 * GIB, "the arena", Use.MEMFD, system.sources)
    with pytest.raises(MemoryBudgetError) as caught:
        require_memory(32 * GIB + 1, "the arena", Use.MEMFD, system.sources)
    assert "the arena" in caught.value.what
    assert caught.value.expected == f"{32 * GIB + 1} bytes needed"
    assert caught.value.found == f"{32 * GIB} bytes free, limited by MemAvailable of the machine"


def test_a_system_that_states_no_limit_refuses_nothing(tmp_path: Path) -> None:
    nowhere = Sources(proc=tmp_path / "a", cgroup=tmp_path / "b", shm=tmp_path / "c")
    assert budget.free_memory(Use.SHM, nowhere) is None
    require_memory(1 << 60, "anything", Use.SHM, nowhere)


def test_the_real_system_states_a_limit() -> None:
    free = budget.free_memory(Use.SHM)
    assert free is not None
    assert 0 < free.nbytes < 1 << 50


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def maps() -> int:
    return sum("memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_mappings_go_with_close_and_keep_no_descriptor() -> None:
    gc.collect()  # what other tests left must not go in the middle of this one
    with Arena(8192) as arena:
        arena.storage(4096, 16).fill_(7)
        before, fds = maps(), descriptors()
        mapped = MappedRegion(arena.fd, arena.region)
        assert (maps(), descriptors()) == (before + 1, fds)
        assert mapped.region == Region(0, mapped.address, 8192, Kind.MAPPED)
        copy = np.zeros(16, np.uint8)
        one = [np.array([v], np.int64) for v in (copy.ctypes.data, mapped.address + 4096, 1, 16, 0, 0)]
        host.copy_runs(*one)
        assert copy.tolist() == [7] * 16
        mapped.close()
        mapped.close()
        assert maps() == before
        with pytest.raises(TransportError, match="no longer mapped"):
            _ = mapped.address
        forgotten = MappedRegion(arena.fd, arena.region)
        assert maps() == before + 1
        del forgotten
        gc.collect()
        assert maps() == before


def test_regions_that_lie_are_not_mapped(tmp_path: Path) -> None:
    before = maps()
    with Arena(8192) as arena:
        for nbytes in (8193, 1 << 40, 0, -1):
            with pytest.raises(TransportError, match="lies about its size"):
                MappedRegion(arena.fd, Region(0, 0, nbytes, Kind.ARENA))
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 8192)
    region = Region(0, 0, 8192, Kind.ARENA)
    with pytest.raises(TransportError, match="could still shrink"):
        MappedRegion(loose, region)
    fcntl.fcntl(loose, fcntl.F_ADD_SEALS, SEALS & ~fcntl.F_SEAL_SEAL)
    with pytest.raises(TransportError, match="could still shrink"):
        MappedRegion(loose, region)
    os.close(loose)
    read_end, write_end = os.pipe()
    with pytest.raises(TransportError, match="not shared memory"):
        MappedRegion(read_end, region)
    os.close(read_end)
    os.close(write_end)
    with pytest.raises(TransportError):
        MappedRegion(loose, region)  # closed
    assert maps() == before


def test_an_arena_refuses_slots_outside_it_and_use_after_close() -> None:
    arena = Arena(100)
    assert arena.nbytes == 4096
    for offset, nbytes in ((4090, 7), (-1, 2), (1 << 40, 0)):
        with pytest.raises(Exception, match="outside its arena"):
            arena.storage(offset, nbytes)
    arena.close()
    arena.close()
    for use in (lambda: arena.fd, lambda: arena.storage(0, 1), lambda: arena.reserve(0, 1)):
        with pytest.raises(Exception, match="is closed"):
            use()


def test_the_last_page_of_a_region_beyond_four_gibibytes_arrives() -> None:
    """Sparse on both sides: only the pages touched exist, addresses and sizes are what is tested."""
    nbytes = (4 << 30) + (1 << 20)
    source, target = Arena(nbytes), Arena(nbytes)
    tail = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
    page = np.frombuffer(source.storage(nbytes - 4096, 4096).numpy(), np.uint8)
    page[:] = tail
    with MappedRegion(source.fd, source.region) as mapped:
        run = (target.address, mapped.address, 2, 4096, nbytes - 4096, nbytes - 4096)  # first and last page
        columns = [np.array([v], np.int64) for v in run]
        where = (np.array([0]), np.array([(nbytes - 4096) // 2]))
        got = host.copy_digest_runs(
            *columns[:3],
            columns[3] // 2,
            *columns[4:],
            *where,
            2,
            np.zeros(1, np.int32),
            np.zeros(1, np.uint64),
        )
    assert target.storage(nbytes - 4096, 4096).tolist() == tail.tolist()
    assert int(got[0]) == reference.digest_bytes(tail, nbytes - 4096)
    assert target.storage(nbytes - 8192, 4096).count_nonzero() == 0
    source.close()
    target.close()
