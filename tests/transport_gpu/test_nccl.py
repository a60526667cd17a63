"""The two-sided transport of GPUs, with a device that is faked in host memory: see `fake`."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from syncline import faults
from syncline.errors import (
    DeadlineError,
    MemoryBudgetError,
    PeerLostError,
    PlanError,
    SynclineError,
    TransportError,
)
from syncline.transport.base import Caps, Endpoint, Limits, Refusal, Side, Staging
from syncline.transport.nccl import NcclTransport
from syncline.transport.nccl_card import Card
from tests.transport.fabric import FENCE, LIMITS, Fabric
from tests.transport.world import World
from tests.transport_gpu import fake
from tests.transport_gpu.fake import FakeDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SMALL = Staging(bucket=4096, inflight=2)
TINY = Staging(bucket=256, inflight=2)


def once(action: Callable[[], None]) -> Callable[[], None]:
    """Return what does it the first time only."""
    waiting = [action]
    return lambda: waiting.pop()() if waiting else None


@contextmanager
def fabric(
    world: World, staging: Staging = SMALL, device: Callable[[bool, int], FakeDevice] | None = None
) -> Iterator[Fabric]:
    made = Fabric("nccl", world, staging, device or (lambda _writer, _rank: FakeDevice()))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("seed", range(6))
def test_random_plans_arrive_bit_for_bit(seed: int) -> None:
    world = World.random(seed, writers=1 + seed % 3, readers=1 + seed % 2, tensors=5, largest=16)
    with fabric(world) as made:
        for step in range(2):
            got, sent = made.transfer(digest=True)
            for r, transfer in enumerate(got):
                world.check_reader(r)
                assert transfer.digests is not None
                made.check_digests(r, transfer.digests)
            for transfer in (*got, *sent):
                progress = transfer.poll()
                assert (progress.nbytes, progress.hops) == (progress.total_nbytes, progress.total_hops)
            world.change(step)
        made.transfer()
        for r in range(len(got)):
            world.check_reader(r)


def test_two_buckets_a_peer_and_no_more_after_the_first_run() -> None:
    world = World.random(3, writers=2, readers=2, tensors=8, largest=20)
    devices: list[FakeDevice] = []

    def device(_writer: bool, _rank: int) -> FakeDevice:
        devices.append(FakeDevice())
        return devices[-1]

    with fabric(world, device=device) as made:
        made.transfer()
        taken = [list(d.taken) for d in devices]
        assert all(len(t) <= 2 * 2 and max(t) <= SMALL.bucket for t in taken)
        world.change(1)
        made.transfer()
        assert [d.taken for d in devices] == taken


def test_a_slot_is_not_packed_before_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams run apart: whatever is not waited for shows as wrong bytes."""
    slow = fake.SocketCommunicator._do
    monkeypatch.setattr(fake.SocketCommunicator, "_do", lambda s, w: (time.sleep(0.002), slow(s, w)))
    world = World.random(5, writers=1, readers=1, tensors=4, largest=30)
    with fabric(world, TINY) as made:
        assert max(len(p.buckets) for p in made.programs[0]._peers) > 4  # pyright: ignore[reportAttributeAccessIssue]
        made.transfer(digest=True)
        world.check_reader(0)
    one = fake.HostSweep._one
    monkeypatch.setattr(fake.HostSweep, "_one", lambda s, t, op: (time.sleep(0.002), one(s, t, op)))
    monkeypatch.setattr(fake.SocketCommunicator, "_do", slow)
    world = World.random(5, writers=1, readers=1, tensors=4, largest=30)
    with fabric(world, TINY) as made:
        made.transfer(digest=True)
        world.check_reader(0)


def test_storages_move_and_programs_stay() -> None:
    world = World.random(8, writers=2, readers=1, tensors=6)
    with fabric(world) as made:
        made.transfer()
        world.readers[0] = world.readers[0].moved()
        made.bind_all()
        world.change(1)
        made.transfer()
        world.check_reader(0)


def test_one_gpu_for_two_ranks_is_refused() -> None:
    world = World.random(1, writers=1, readers=1)
    with (
        pytest.raises(TransportError, match="share one GPU"),
        fabric(world, device=lambda *_: FakeDevice("same")),
    ):
        pass


def test_other_versions_are_refused() -> None:
    world = World.random(1, writers=1, readers=1)

    def device(writer: bool, _rank: int) -> FakeDevice:
        return FakeDevice(version=22703 if writer else 22501)

    with pytest.raises(TransportError, match="another version of NCCL"), fabric(world, device=device):
        pass


def test_capabilities_are_read_off_the_cards() -> None:
    ends = [
        Endpoint(
            job="j",
            id=str(n),
            name=f"n{n}",
            host=f"h{n}",
            uid=0,
            addresses={"nccl": Card(device=f"d{n}", version=v).encode()} if v else {},
        )
        for n, v in enumerate((22703, 22703, 22501, 0))
    ]
    transport = NcclTransport("j", lambda _name: None, device=FakeDevice())  # pyright: ignore[reportArgumentType]
    assert isinstance(transport.caps(ends[0], ends[1]), Caps)
    for other in ends[2:]:
        assert isinstance(transport.caps(ends[0], other), Refusal)
    same = transport.caps(ends[0], ends[0])
    assert isinstance(same, Refusal)
    assert "share one GPU" in same.reason
    with pytest.raises(TransportError, match="not a device's card"):
        Card.decode("nonsense")


def test_no_room_for_buckets_is_said_at_the_start() -> None:
    world = World.random(2, writers=1, readers=1, tensors=6)
    with fabric(world, device=lambda *_: FakeDevice(room=64)) as made, pytest.raises(MemoryBudgetError):
        made.start()


def test_a_peer_that_vanishes_is_noticed_and_nothing_hangs() -> None:
    world = World.random(4, writers=1, readers=1, tensors=4, largest=30)
    with fabric(world, TINY) as made:
        seen: list[BaseException] = []

        def vanish() -> None:
            threading.Thread(target=made.to_readers[0][0].link.break_off, args=("gone",)).start()  # pyright: ignore[reportAttributeAccessIssue]
            time.sleep(0.3)

        with faults.arm("nccl.before_bucket", once(vanish)):
            got, sent = made.start()
            for transfer in (*got, *sent):
                try:
                    transfer.wait(20.0)
                except SynclineError as error:
                    seen.append(error)
        assert len(seen) == 2
        assert all(isinstance(e, PeerLostError | TransportError) for e in seen)
        assert not isinstance(seen[0], DeadlineError)
        made.link_all()
        made.bind_all()
        world.change(1)
        made.transfer()
        world.check_reader(0)


def test_a_deadline_ends_both_sides() -> None:
    world = World.random(4, writers=1, readers=1, tensors=4, largest=30)
    with fabric(world, TINY) as made:
        program, reader = made.programs[0], made.readers[0]
        running = reader.start(program, made.fence, Limits(deadline=0.3))  # nobody sends
        with pytest.raises(DeadlineError):
            running.wait(10.0)
        assert running.poll().done
        with pytest.raises(PeerLostError):
            reader.start(program, made.fence, LIMITS)


def test_another_update_at_the_other_end_is_refused() -> None:
    world = World.random(6, writers=1, readers=1, tensors=4)
    with fabric(world) as made:
        sent = made.writers[0].start(made.sources[0, 0], FENCE.at(99), LIMITS)
        got = made.readers[0].start(made.programs[0], made.fence, LIMITS)
        for transfer in (sent, got):
            with pytest.raises(PlanError, match="do not mean the same transfer"):
                transfer.wait(10.0)


def test_programs_of_another_transport_are_refused() -> None:
    world = World.random(6, writers=1, readers=1, tensors=4)
    plain = Fabric("gloo", world)
    with fabric(World.random(6, writers=1, readers=1, tensors=4)) as made:
        with pytest.raises(TransportError, match="another transport"):
            made.readers[0].start(plain.programs[0], FENCE)
        program = made.readers[0].compile(world.plan, world.plan.reader("serve", 0), Side.DESTINATION)
        program.rebind(world.readers[0].binding, plain.to_writers[0])
        with pytest.raises(TransportError, match="a link of this transport"):
            made.readers[0].start(program, FENCE)
    plain.close()
