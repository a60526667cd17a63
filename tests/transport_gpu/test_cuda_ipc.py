"""Device memory between two processes: on one GPU, and between two where there are two."""

from __future__ import annotations

import pytest
import torch

from syncline import faults
from syncline.errors import RevokedError, SynclineError, TransportError
from syncline.memory.cuda import DeviceSegments
from syncline.memory.region import Kind, Region
from syncline.transport.base import Endpoint, Limits, Refusal, Rights, Ticket

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(180),
]

if torch.cuda.is_available():
    from benchmarks.gpu import worlds

    from syncline.transport.cuda_ipc import CudaIpcTransport
    from tests.transport.world import World


def devices() -> tuple[int, int]:
    return 0, torch.cuda.device_count() - 1


@pytest.mark.parametrize("expandable", [False, True])
def test_random_models_arrive_bit_for_bit(expandable: bool) -> None:
    wrong = worlds.pulls(4, *devices(), expandable=expandable)
    assert wrong == [""] * len(wrong)
    assert len(wrong) == 10


def test_one_gpu_shared_by_two_processes() -> None:
    wrong = worlds.pulls(4, 0, 0, seed=50)
    assert wrong == [""] * len(wrong)


def test_faults() -> None:
    """One writers' process, for what must go well after what must not."""
    writer, reader = devices()
    torch.cuda.set_device(reader)
    with worlds.process(writer) as tell:
        world = World.random(7, writers=2, readers=2, tensors=6)
        offer = tell("make", 7)
        pull = worlds.Pull(world, 0, offer, reader)
        assert pull.run() == ""

        # everything moves: the program is bound anew, and not made anew
        pull.link(tell("move"))
        assert pull.run() == ""

        # revoked while a transfer runs: the transfer says so, and the memory is drained
        def revoke() -> None:
            assert all(tell("revoke", 0.2)) is False

        with faults.arm("cuda_ipc.after_last_byte", revoke), pytest.raises((RevokedError, TransportError)):
            pull.run()
        assert all(tell("revoke", 10.0))
        with pytest.raises(RevokedError):
            pull.run()
        pull.link(tell("offer"))
        assert pull.run() == ""

        # a cancelled transfer stops before it ends well
        with faults.arm("cuda_ipc.after_last_byte", "sleep:0.3"):
            running = pull.transport.start(pull.program, worlds.FENCE, worlds.LIMITS)
            assert running.cancel(10.0).drained
            with pytest.raises(TransportError, match="cancelled"):
                running.wait(1.0)
        with faults.arm("cuda_ipc.after_last_byte", "sleep:0.3"):
            late = pull.transport.start(pull.program, worlds.FENCE, Limits(deadline=0.1))
            with pytest.raises(SynclineError, match="did not finish in time"):
                late.wait(5.0)
        assert pull.run() == ""

        # another job, another process at the same address
        end, tickets, _ = tell("offer")[0]
        stranger = CudaIpcTransport("another job", device=reader)
        with pytest.raises(TransportError, match="another transport or job"):
            stranger.link(Endpoint.from_text(end), [Ticket.decode(t) for t in tickets], 5.0)
        found = stranger.caps(Endpoint.from_text(end), Endpoint(job="j", id="x", name="x", host="h", uid=0))
        assert isinstance(found, Refusal)
        stranger.close(1.0)

        # the writer dies: what is open stays readable, and the link says so
        tell("die", answer=False)
        assert pull.run() == ""
        pull.close()
        world.close()


def test_what_is_found_wrong_is_located() -> None:
    writer, reader = devices()
    torch.cuda.set_device(reader)
    with worlds.process(writer) as tell:
        world = World.random(9, writers=2, readers=2, tensors=6)
        pull = worlds.Pull(world, 1, tell("make", 9), reader)
        assert pull.run() == ""
        hops = world.plan.reader("serve", 1)
        assert all(pull.program.locate(h) is None for h in range(len(hops)))
        hop = int(hops.nbytes.argmax())
        base = int(hops.dst_base[hop]) * int(hops.nbytes[hop] // hops.size[hop].prod())
        pull.memory.buffers[int(hops.dst_storage[hop])][base] += 1
        found = pull.program.locate(hop)
        assert found is not None
        assert found.index == tuple(hops.offset[hop][: world.plan.ndim[hops.tensor[hop]]].tolist())
        pull.close()
        world.close()


def test_segments_are_few_and_tell_memory_from_what_was_there_before() -> None:
    torch.cuda.empty_cache()
    segments = DeviceSegments(torch.cuda.current_device())
    held = [torch.empty((2 << 20) + i, dtype=torch.uint8, device="cuda") for i in range(500)]
    places = [t.data_ptr() for t in held], [t.nbytes for t in held]
    binding = segments.bind(b"f" * 16, *places)
    assert len(binding.regions) < 100
    assert (binding.addresses() == places[0]).all()
    assert segments.bind(b"f" * 16, *places) is binding
    region = next(iter(binding.regions.values()))
    assert segments.segment(region).region == region
    del held
    torch.cuda.empty_cache()
    with pytest.raises(TransportError):
        segments.segment(region)
    again = torch.empty(region.nbytes, dtype=torch.uint8, device="cuda")
    later = segments.bind(b"f" * 16, [again.data_ptr()], [again.nbytes])
    assert later.generation > binding.generation
    assert not later.same_places(binding)


def test_only_own_device_memory_is_exported(tmp_path) -> None:
    segments = DeviceSegments(torch.cuda.current_device())
    transport = CudaIpcTransport(worlds.JOB, tmp_path / "s", segments=segments)
    host = Region(5, 4096, 4096, Kind.ARENA, 1)
    with pytest.raises(TransportError, match="not this device's"):
        transport.export(transport.register(host), Rights.READ, worlds.FENCE)
    with pytest.raises(TransportError, match="to be read"):
        transport.export(transport.register(host), Rights.WRITE, worlds.FENCE)
    made_up = Region(6, 4096, 4096, Kind.CUDA, 1)
    with pytest.raises(TransportError, match="no such segment"):
        transport.export(transport.register(made_up), Rights.READ, worlds.FENCE)
    transport.close(1.0)
