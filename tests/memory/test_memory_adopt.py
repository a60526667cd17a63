"""Live parameters move into the arena and nobody who holds them notices."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from syncline import faults
from syncline.errors import AdapterError, MemoryBudgetError, TransportError
from syncline.memory.adopt import Adoption, private_binding
from syncline.memory.budget import Sources
from syncline.memory.mapped import MappedRegion
from syncline.memory.region import Kind

PRINT = b"f" * 16


def groups_of(model: nn.Module) -> list[list[torch.Tensor]]:
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    return list(by_storage.values())


class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(37, 24)
        self.body = nn.Sequential(nn.Linear(24, 51), nn.GELU(), nn.BatchNorm1d(51), nn.Linear(51, 24))
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))  # zero-dim
        self.nothing = nn.Parameter(torch.zeros(0, 24))  # zero-size
        self.turned = nn.Parameter(torch.randn(24, 24).t())  # not contiguous

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids) @ self.turned) * self.scale)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    torch.manual_seed(100 + step)
    ids = torch.randint(0, 37, (16,))
    loss = nn.functional.cross_entropy(model(ids), ids.roll(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def shm_names() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def read_region(adoption: Adoption, region: int, offset: int, nbytes: int) -> bytes:
    fd = adoption.descriptors()[region]
    return os.pread(fd, nbytes, offset)


def test_training_goes_on_bit_equal_to_an_unmoved_twin() -> None:
    model, twin = Tied(), Tied()
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin))
    for step in range(2):
        assert train(model, ours, step) == train(twin, theirs, step)
    layout = {n: (t.shape, t.stride(), t.storage_offset()) for n, t in model.state_dict().items()}
    storages = {n: t.untyped_storage().nbytes() for n, t in model.state_dict().items()}
    adoption = Adoption(groups_of(model))
    assert adoption.shared == {}
    assert model.head.weight is model.embed.weight
    assert layout == {n: (t.shape, t.stride(), t.storage_offset()) for n, t in model.state_dict().items()}
    assert storages == {n: t.untyped_storage().nbytes() for n, t in model.state_dict().items()}
    places = [t.data_ptr() for t in model.parameters()]
    for step in range(2, 5):
        assert train(model, ours, step) == train(twin, theirs, step)
    assert places == [t.data_ptr() for t in model.parameters()]
    assert adoption.moved() == []
    for (name, mine), (_, other) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        assert torch.equal(mine, other), name
    binding = adoption.binding(PRINT)
    for number, group in enumerate(groups_of(model)):
        storage = group[0].untyped_storage()
        assert not storage.nbytes() or binding.addresses()[number] == storage.data_ptr()
        got = read_region(
            adoption, int(binding.region[number]), int(binding.offset[number]), storage.nbytes()
        )
        assert got == bytes(storage.tolist())
        assert int(binding.offset[number]) % 64 == 0


def test_each_parameter_keeps_a_storage_of_its_own() -> None:
    """One storage over the arena would save the whole model with each tensor, and look like tied weights."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    adoption = Adoption(groups_of(model))
    assert len({p.untyped_storage()._cdata for p in model.parameters()}) == 4
    assert all(p.untyped_storage().nbytes() == p.numel() * 4 for p in model.parameters())
    adoption.close()


def test_a_flat_buffer_with_unknown_aliases_is_shared_in_place() -> None:
    flat = torch.arange(1000, dtype=torch.float32)
    known = nn.Parameter(flat[100:400].view(20, 15))
    plain = torch.ones(7)
    del_me = flat[500:]
    with torch.no_grad():
        unknown = flat.detach()[:50]
    adoption = Adoption([[known], [plain]])
    assert list(adoption.shared) == [0]
    with torch.no_grad():
        known += 1
        unknown -= 1
    assert flat[100] == 101
    assert flat[0] == -1
    assert del_me[0] == 500
    binding = adoption.binding(PRINT)
    assert adoption.regions[int(binding.region[0])].kind is Kind.SHARED
    assert binding.addresses().tolist() == [flat.data_ptr(), plain.data_ptr()]
    assert read_region(adoption, int(binding.region[0]), 0, 4000) == flat.numpy().tobytes()
    assert not [name for name in shm_names() if name.startswith("torch_")]
    adoption.close()


def test_a_flat_buffer_whose_aliases_are_all_named_moves_into_the_arena() -> None:
    flat = torch.arange(1000, dtype=torch.float32)
    first, second = nn.Parameter(flat[:400].view(20, 20)), nn.Parameter(flat[400:])
    adoption = Adoption([[first, second, flat]])
    assert adoption.shared == {}
    with torch.no_grad():
        first.fill_(5)
        second.fill_(7)
    assert flat[:400].eq(5).all()
    assert flat[400:].eq(7).all()
    adoption.close()


def test_the_hidden_base_of_a_view_is_a_known_alias() -> None:
    def view_without_a_name_for_its_base() -> torch.Tensor:
        return torch.arange(64.0)[16:48]

    tensor = view_without_a_name_for_its_base()
    adoption = Adoption([[tensor]])
    assert adoption.shared == {}
    assert torch.equal(tensor, torch.arange(16.0, 48.0))
    assert tensor._base is not None
    assert tensor._base.data_ptr() == tensor.data_ptr() - 64
    adoption.close()


def test_a_kept_storage_object_counts_as_an_unknown_user() -> None:
    tensor = torch.arange(64.0)
    storage = tensor.untyped_storage()
    adoption = Adoption([[tensor]])
    assert list(adoption.shared) == [0]
    assert storage.data_ptr() == tensor.data_ptr()
    adoption.close()


def test_a_numpy_view_is_never_left_dangling() -> None:
    tensor = torch.arange(64.0)
    array = tensor.numpy()
    with pytest.raises(AdapterError, match="lent to"):
        Adoption([[tensor]])
    assert array.ctypes.data == tensor.data_ptr()
    borrowed = torch.from_numpy(np.arange(64.0))  # numpy owns it, and nobody else looks at it
    adoption = Adoption([[borrowed]])
    assert adoption.shared == {}
    assert torch.equal(borrowed, torch.arange(64, dtype=torch.float64))
    adoption.close()


def test_parameters_that_moved_come_back_into_their_slots() -> None:
    model = Tied()
    adoption = Adoption(groups_of(model))
    before = adoption.binding(PRINT)
    assert not adoption.readopt()
    fresh = torch.randn(37, 24)
    model.head.weight.data = fresh.clone()
    model.turned.data = torch.full((24, 24), 3.0)  # another stride as well
    assert len(adoption.moved()) == 2
    assert adoption.readopt()
    assert adoption.readopt() is False
    after = adoption.binding(PRINT)
    assert after.generation == before.generation + 1
    assert after.addresses().tolist() == before.addresses().tolist()
    assert torch.equal(model.embed.weight, fresh)
    assert model.turned.stride() == (1, 24)
    assert model.turned.eq(3).all()


def test_new_parameter_objects_are_brought_back_by_naming_them() -> None:
    model = nn.Linear(8, 8)
    adoption = Adoption(groups_of(model))
    model.weight = nn.Parameter(torch.ones(8, 8))
    assert adoption.readopt([[model.weight], [model.bias]])
    assert model.weight.data_ptr() == adoption.binding(PRINT).addresses()[0]
    assert model.weight.eq(1).all()


@pytest.mark.parametrize("change", [lambda p: p.data.double(), lambda p: torch.ones(8, 9)])
def test_a_parameter_that_changed_dtype_or_shape_is_refused(change) -> None:
    model = nn.Linear(8, 8)
    adoption = Adoption(groups_of(model), names=["weight", "bias"])
    model.weight = nn.Parameter(change(model.weight))
    with pytest.raises(AdapterError, match="weight") as caught:
        adoption.readopt([[model.weight], [model.bias]])
    assert caught.value.tensor == "weight"
    assert adoption.generation == 1


def test_what_cannot_be_adopted_is_refused_before_anything_moves() -> None:
    good = torch.ones(100)
    place = good.data_ptr()
    for bad in (
        [[good], [torch.ones(3, device="meta")]],
        [[good], [torch.ones(3).to_sparse()]],
        [[good], [torch.ones(3), torch.ones(3)]],
        [[good], []],
        [[good], [good[1:]]],
    ):
        with pytest.raises(AdapterError):
            Adoption(bad)
        assert good.data_ptr() == place


def fake_system(tmp_path, available: int) -> Sources:
    (tmp_path / "self").mkdir(exist_ok=True)
    (tmp_path / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available >> 10} kB\n")
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    return Sources(proc=tmp_path, cgroup=tmp_path / "none", shm=tmp_path)


def test_needs_only_its_largest_tensor_and_says_so_before_moving_any(tmp_path) -> None:
    tensors = [torch.ones(256, 1024) for _ in range(8)]  # 1 MiB each
    places = [t.data_ptr() for t in tensors]
    with pytest.raises(MemoryBudgetError, match="1048576 bytes needed"):
        Adoption([[t] for t in tensors], sources=fake_system(tmp_path, (1 << 20) - 1024))
    assert places == [t.data_ptr() for t in tensors]
    adoption = Adoption([[t] for t in tensors], sources=fake_system(tmp_path, 1 << 20))
    assert all(t.eq(1).all() for t in tensors)
    adoption.close()


def test_a_failure_half_way_leaves_every_tensor_valid() -> None:
    tensors = [torch.full((1000,), float(i)) for i in range(6)]
    seen = []

    def third() -> None:
        seen.append(1)
        if len(seen) == 4:
            raise MemoryBudgetError("no more")

    with faults.arm("memory.before_move", third), pytest.raises(MemoryBudgetError):
        Adoption([[t] for t in tensors])
    gc.collect()
    assert all(t.eq(i).all() for i, t in enumerate(tensors))
    with torch.no_grad():
        for t in tensors:
            t.add_(1)


def test_tensors_outlive_the_adoption() -> None:
    tensor = torch.arange(5000.0)
    adoption = Adoption([[tensor]])
    fd = adoption.arena.fd
    adoption.close()
    del adoption
    gc.collect()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    tensor.add_(1)
    assert torch.equal(tensor, torch.arange(1.0, 5001.0))


def test_a_private_binding_names_the_storages_where_they_are() -> None:
    model = Tied()
    groups = groups_of(model)
    binding = private_binding(PRINT, groups)
    assert binding.addresses().tolist() == [g[0].untyped_storage().data_ptr() for g in groups]
    with pytest.raises(TransportError, match="private"):
        binding.to_wire()


def test_readers_map_what_is_handed_out_and_cannot_write_it() -> None:
    tensor = torch.arange(5000, dtype=torch.int64)
    adoption = Adoption([[tensor]])
    fd = adoption.descriptors()[0]
    with pytest.raises(OSError, match=r"Permission|Bad file"):
        os.pwrite(fd, b"x", 0)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(again, 0)
    os.close(again)
    with MappedRegion(fd, adoption.arena.region) as mapped:
        view = np.frombuffer((np.ctypeslib.ctypes.c_int64 * 5000).from_address(mapped.address), np.int64)
        assert view[4999] == 4999
        tensor[4999] = -7
        assert view[4999] == -7
        del view
    adoption.close()


def child(code: str, **popen) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        **popen,
    )


def test_five_thousand_parameters_need_a_handful_of_descriptors() -> None:
    done = child(
        """
        import os, resource, torch
        torch.set_num_threads(1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        from syncline.memory.adopt import Adoption
        tensors = [torch.full((40 + i % 9,), float(i)) for i in range(5000)]
        before = len(os.listdir("/proc/self/fd"))
        adoption = Adoption([[t] for t in tensors])
        print(len(os.listdir("/proc/self/fd")) - before, len(adoption.shared))
        print(all(t.eq(i).all() for i, t in enumerate(tensors)))
        """
    )
    assert done.stdout.split() == ["2", "0", "True"], done.stderr


def test_memory_while_moving_grows_by_the_largest_tensor_only() -> None:
    done = child(
        """
        import os, threading, torch
        torch.set_num_threads(1)
        from syncline import faults
        from syncline.memory.adopt import Adoption
        def resident():
            fields = dict(l.split(":", 1) for l in open("/proc/self/status") if l.startswith("Rss"))
            return sum(int(v.split()[0]) for v in fields.values()) / 1024
        sizes = [24] + [6] * 12 + [1] * 40 + [24]   # MiB: below and above glibc's thresholds
        tensors = [torch.ones(m << 18) for m in sizes]
        Adoption([[torch.ones(9)]])
        start, peak = resident(), 0
        def look():
            global peak
            peak = max(peak, resident())
        with faults.arm("memory.before_move", look):
            adoption = Adoption([[t] for t in tensors])
        peak = max(peak, resident())
        print(peak - start, resident() - start)
        """
    )
    peak, after = (float(v) for v in done.stdout.split())
    assert peak < 24 + 64 + 8  # the largest tensor, and what is freed between two trims
    assert after < 8


@pytest.mark.parametrize("point", ["memory.before_move", "memory.before_share"])
def test_nothing_is_left_after_kill_9(point: str) -> None:
    before = shm_names()
    done = child(
        """
        import torch
        from syncline.memory.adopt import Adoption
        flat = torch.ones(1 << 20)
        view = flat[5:]
        adoption = Adoption([[torch.ones(1 << 20)], [flat]])
        print("not killed")
        """,
        env={**os.environ, "SYNCLINE_FAULTS": f"{point}=kill"},
    )
    assert done.returncode == -9
    assert shm_names() <= before


def test_a_small_shm_is_an_error_and_never_a_sigbus() -> None:
    """A real 16 MiB tmpfs over /dev/shm, in a mount namespace of the child's own; the model has 64 MiB."""
    script = """
        import torch
        torch.set_num_threads(1)
        from syncline.errors import MemoryBudgetError
        from syncline.memory.adopt import Adoption
        flat = torch.ones(16 << 20)
        hidden = flat[1:]
        place = flat.data_ptr()
        try:
            Adoption([[flat]])
        except MemoryBudgetError as error:
            print(error.expected, "|", error.found, "|", flat.data_ptr() == place)
        del hidden
        adoption = Adoption([[flat]])   # a memfd does not live on /dev/shm
        print(adoption.shared, flat.eq(1).all().item())
    """
    mount = 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"'
    done = subprocess.run(
        [
            "/usr/bin/env",
            "unshare",
            "-m",
            "sh",
            "-c",
            mount,
            "sh",
            sys.executable,
            "-c",
            textwrap.dedent(script),
        ],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("needs the right to make a mount namespace")
    lines = done.stdout.splitlines()
    assert lines[0] == "67108864 bytes needed | 16777216 bytes free, limited by the size of /dev/shm | True"
    assert lines[1] == "{} True"
    assert done.returncode == 0


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupted_move_leaves_the_weights_whole(at: int) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(10 << 20))  # 40 MiB: three parts
    before, seen = weight.detach().clone(), 0

    def stop() -> None:
        nonlocal seen
        seen += 1
        if seen == at:
            raise KeyboardInterrupt

    with faults.arm("memory.before_discard", stop), pytest.raises(KeyboardInterrupt):
        Adoption([[weight]])
    assert seen == at
    assert torch.equal(weight, before)


def test_a_large_tensor_moves_in_much_less_than_its_own_memory() -> None:
    script = """
        import resource, torch
        from pathlib import Path
        from syncline.memory.adopt import Adoption
        weight = torch.nn.Parameter(torch.ones(64 << 20))  # 256 MiB
        small = torch.nn.Parameter(torch.ones(1 << 20))
        Adoption([[small]])
        def field(name):
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith(name))
        Path("/proc/self/clear_refs").write_text("5")
        before = field("VmRSS:")
        kept = Adoption([[weight]])
        assert float(weight.sum()) == 64 << 20
        print((field("VmHWM:") - before) >> 10)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert int(ran.stdout) < 64
