"""What every transport must do, over random plans; a third party's transport can run this class as well."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncline import faults
from syncline.errors import DeadlineError, FencedError, PlanError, RevokedError, SynclineError, TransportError
from syncline.memory.binding import Binding
from syncline.protocol.ids import Fence
from syncline.transport import gloo_stream, work
from syncline.transport.base import Caps, Limits, Refusal, Remote, Side, Staging
from syncline.transport.registry import choose
from tests.transport.fabric import FENCE, LIMITS, Fabric
from tests.transport.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = Staging(bucket=4096, inflight=2)


@contextmanager
def fabric(kind: str, world: World, staging: Staging | None = None) -> Iterator[Fabric]:
    made = Fabric(kind, world, staging)
    try:
        yield made
    finally:
        made.close()


def dense(
    shape: tuple[int, ...], *, writers: int = 2, readers: int = 2, count: int = 1, how: str = "cut"
) -> World:
    """A world of stamped tensors: every element is a number of its own."""
    names = [f"w{i}" for i in range(count)]
    size = int(np.prod(shape))
    model = {
        n: torch.arange(i * size, (i + 1) * size, dtype=torch.int64).reshape(shape)
        for i, n in enumerate(names)
    }
    dtypes = dict.fromkeys(names, "int64")
    return World.build(np.random.default_rng(3), model, dtypes, dtypes, writers, readers, how=how)


@pytest.mark.parametrize("kind", ["shm", "gloo"])
class TestConformance:
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(seed=st.integers(0, 2**32 - 1), writers=st.integers(1, 3), readers=st.integers(1, 3))
    def test_random_plans_arrive_bit_for_bit(self, kind: str, seed: int, writers: int, readers: int) -> None:
        world = World.random(seed, writers=writers, readers=readers, tensors=4, largest=20)
        with fabric(kind, world, SMALL) as made:
            got, _ = made.transfer(digest=True)
            for r, transfer in enumerate(got):
                world.check_reader(r)
                progress = transfer.poll()
                assert progress.nbytes == progress.total_nbytes
                assert progress.hops == progress.total_hops
                assert progress.done
                assert transfer.digests is not None
                made.check_digests(r, transfer.digests)

    def test_without_digests_and_again_after_a_step(self, kind: str) -> None:
        world = World.random(11, tensors=8)
        with fabric(kind, world) as made:
            for step in range(3):
                world.change(step)
                got, sent = made.transfer()
                assert all(t.digests is None for t in [*got, *sent])
                for r in range(len(world.readers)):
                    world.check_reader(r)

    def test_both_ends_digest_alike(self, kind: str) -> None:
        world = World.random(5, writers=1, readers=1, tensors=10)
        with fabric(kind, world, SMALL) as made:
            got, sent = made.transfer(digest=True)
            made.check_digests(0, got[0].digests)
            if kind == "gloo":
                assert np.array_equal(got[0].digests, sent[0].digests)
            else:
                assert sent[0].digests is None
                assert sent[0].poll().total_nbytes == 0

    def test_zero_dim_tensors(self, kind: str) -> None:
        model = {
            "f": torch.tensor(1.5),
            "b": torch.tensor(-2.0, dtype=torch.bfloat16),
            "i": torch.tensor(2**40 + 1),
            "one": torch.tensor([7.0]),
        }
        dtypes = {"f": "float32", "b": "bfloat16", "i": "int64", "one": "float32"}
        world = World.build(np.random.default_rng(0), model, dtypes, dtypes, 2, 3)
        with fabric(kind, world) as made:
            got, _ = made.transfer(digest=True)
            for r in range(3):
                world.check_reader(r)
                made.check_digests(r, got[r].digests)

    def test_several_buckets_with_stamped_contents(self, kind: str) -> None:
        world = dense((7, 1024), writers=1, readers=1)  # 3.5 buckets of 16 KiB
        staging = Staging(bucket=16384, inflight=2)
        with fabric(kind, world, staging) as made:
            made.transfer(digest=True)
            world.check_reader(0)

    def test_threads_share_the_work(self, kind: str) -> None:
        world = dense((512, 4096), writers=2, readers=1)  # 16 MiB: several kernel calls
        with fabric(kind, world) as made:
            got, _ = made.transfer(digest=True, limits=Limits(deadline=30.0, threads=2))
            world.check_reader(0)
            made.check_digests(0, got[0].digests)

    def test_many_small_tensors_from_many_writers(self, kind: str) -> None:
        world = dense((8,), writers=6, readers=1, count=1500, how="whole")
        with fabric(kind, world, SMALL) as made:
            made.transfer()
            world.check_reader(0)

    def test_a_moved_reader_is_rebound(self, kind: str) -> None:
        world = World.random(21)
        with fabric(kind, world) as made:
            moved = world.readers[0].moved()
            made.programs[0].rebind(moved.binding, made.to_writers[0])
            made.transfer()
            world.check_reader(0, moved.held)
            assert world.untouched(0)

    def test_a_program_must_be_bound(self, kind: str) -> None:
        world = World.random(22)
        with fabric(kind, world) as made:
            hops = world.plan.reader("serve", 0)
            program = made.readers[0].compile(world.plan, hops, Side.DESTINATION)
            with pytest.raises(TransportError, match="not bound"):
                made.readers[0].start(program, made.fence, LIMITS)
            with pytest.raises(TransportError, match=r"writer|linked"):
                program.rebind(world.readers[0].binding, {})
            assert world.untouched(0)

    def test_memory_registered_anew_refuses_old_programs(self, kind: str) -> None:
        world = World.random(23)
        with fabric(kind, world) as made:
            region = world.readers[0].region
            made.readers[0].register(region)
            made.readers[0].register(replace(region, generation=region.generation + 1))
            with pytest.raises(TransportError, match="replaced"):
                made.readers[0].start(made.programs[0], made.fence, LIMITS)
            with pytest.raises(TransportError, match="anew"):
                made.readers[0].register(region)
            assert world.untouched(0)

    def test_addresses_outside_a_region_are_refused(self, kind: str) -> None:
        world = World.random(24)
        with fabric(kind, world) as made:
            binding = made.world.writers[0].binding
            short = {1: replace(binding.regions[1], nbytes=8)}
            wrong = replace(binding, regions=short)
            if kind == "shm":
                remote = dict(made.to_writers[0])
                remote[0] = replace(remote[0], binding=replace(remote[0].binding, regions=short))
                with pytest.raises(TransportError, match="outside"):
                    made.programs[0].rebind(world.readers[0].binding, remote)
            else:
                with pytest.raises(TransportError, match="outside"):
                    made.sources[0, 0].rebind(wrong, made.to_readers[0])
            assert world.untouched(0)

    def test_cancel_midway_then_again(self, kind: str) -> None:
        world = dense((512, 4096), writers=1, readers=1)
        step = "shm.before_part" if kind == "shm" else "gloo.before_install"
        with fabric(kind, world, Staging(bucket=1 << 20)) as made:
            seen = threading.Event()

            def slow() -> None:
                seen.set()
                time.sleep(0.05)

            with faults.arm(step, slow):
                got, sent = made.start()
                assert seen.wait(10)
                assert got[0].cancel(10.0).drained
            with pytest.raises(TransportError, match="cancelled"):
                got[0].wait(1.0)
            assert got[0].poll().nbytes < world.plan.reader("serve", 0).nbytes.sum()
            before = [h.buffer.clone() for h in world.readers[0].held]
            time.sleep(0.05)
            assert all(torch.equal(a, h.buffer) for a, h in zip(before, world.readers[0].held, strict=True))
            if kind == "gloo":
                with pytest.raises(SynclineError):
                    sent[0].wait(10.0)
                made.link_all()
                made.bind_all()
            made.transfer()
            world.check_reader(0)

    def test_a_failure_in_the_middle_is_raised_and_a_retry_works(self, kind: str) -> None:
        world = dense((512, 4096), writers=1, readers=1)
        step = "shm.before_part" if kind == "shm" else "gloo.before_install"
        with fabric(kind, world, Staging(bucket=1 << 20)) as made:
            calls = []

            def fail() -> None:
                calls.append(1)
                if len(calls) == 2:
                    raise TransportError("an operation failed")

            with faults.arm(step, fail):
                got, _ = made.start()
                with pytest.raises(TransportError, match="an operation failed"):
                    got[0].wait(10.0)
            if kind == "gloo":
                made.link_all()
                made.bind_all()
            made.transfer()
            world.check_reader(0)

    def test_a_transfer_that_moves_nothing_is_no_success(
        self, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world = dense((64, 64), writers=1, readers=1)
        with fabric(kind, world) as made:
            monkeypatch.setattr(work, "run", lambda *_args, **_kw: None)
            monkeypatch.setattr(gloo_stream.Stream, "_receive_all", lambda *_args: iter(()))
            monkeypatch.setattr(gloo_stream.Stream, "_send_all", lambda *_args: iter(()))
            got, _ = made.start()
            with pytest.raises(TransportError, match="without having moved every byte"):
                got[0].wait(10.0)

    def test_a_deadline_ends_a_transfer(self, kind: str) -> None:
        world = dense((1024, 4096), writers=1, readers=1)
        step = "shm.before_part" if kind == "shm" else "gloo.before_install"
        with fabric(kind, world, Staging(bucket=1 << 20)) as made, faults.arm(step, "sleep:0.2"):
            got, _ = made.start(limits=Limits(deadline=0.3))
            started = time.monotonic()
            with pytest.raises((DeadlineError, TransportError)):
                got[0].wait(10.0)
            assert time.monotonic() - started < 5

    def test_progress_grows_while_it_runs(self, kind: str) -> None:
        world = dense((1024, 4096), writers=1, readers=1)
        step = "shm.before_part" if kind == "shm" else "gloo.before_install"
        with fabric(kind, world, Staging(bucket=1 << 20)) as made, faults.arm(step, "sleep:0.02"):
            got, _ = made.start()
            seen = set()
            while not got[0].poll().done:
                seen.add(got[0].poll().nbytes)
                time.sleep(0.002)
            got[0].wait(1.0)
            assert len(seen) > 2

    def test_one_run_at_a_time(self, kind: str) -> None:
        world = dense((256, 4096), writers=1, readers=1)
        step = "shm.before_part" if kind == "shm" else "gloo.before_install"
        with fabric(kind, world, Staging(bucket=1 << 20)) as made, faults.arm(step, "sleep:0.1"):
            got, sent = made.start()
            with pytest.raises(TransportError, match="running"):
                made.readers[0].start(made.programs[0], made.fence, LIMITS)
            with pytest.raises(TransportError, match="running"):
                made.programs[0].rebind(world.readers[0].binding, made.to_writers[0])
            for transfer in [*got, *sent]:
                transfer.wait(10.0)

    def test_foreign_jobs_are_refused(self, kind: str) -> None:
        world = World.random(31)
        with fabric(kind, world) as made:
            foreign = Fence("other", 1, 1, 1, 9)
            writer, memory = made.writers[0], world.writers[0]
            ticket = writer.export(writer.register(memory.region, memory.fd), 1, foreign)
            with pytest.raises(TransportError, match=r"job|tickets"):
                made.readers[0].link(made.writer_ends[0], [ticket], 2.0)

    def test_nothing_grows_over_transfers(self, kind: str) -> None:
        world = World.random(41, tensors=4, largest=12)
        with fabric(kind, world) as made:

            def private() -> int:
                lines = Path("/proc/self/status").read_text().splitlines()
                return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

            def counts() -> tuple[int, int, int]:
                gc.collect()
                with Path("/proc/self/maps").open() as maps:
                    segments = sum("memfd" in line for line in maps)
                return len(list(Path("/proc/self/fd").iterdir())), segments, threading.active_count()

            for _ in range(20):
                made.transfer(digest=True)
            before, memory = counts(), private()
            for step in range(180):
                made.link_all() if kind == "shm" and step % 10 == 0 else None
                made.transfer(digest=step % 2 == 0)
            time.sleep(0.1)
            assert counts() == before
            assert private() - memory < 8 << 10  # KiB

    def test_capabilities(self, kind: str) -> None:
        world = World.random(51)
        with fabric(kind, world) as made:
            found = made.readers[0].caps(made.writer_ends[0], made.reader_ends[0])
            assert isinstance(found, Caps)
            assert found.revocable
            transport, caps = choose([made.readers[0]], made.writer_ends[0], made.reader_ends[0])
            assert transport is made.readers[0]
            assert caps == found

    def test_two_hosts_do_not_share_memory(self, kind: str) -> None:
        world = World.random(52)
        with fabric(kind, world) as made:
            away = msgspec.structs.replace(made.writer_ends[0], host="elsewhere")
            assert isinstance(made.readers[0].caps(away, made.reader_ends[0]), Refusal)
            with pytest.raises(TransportError, match=r"elsewhere|hosts"):
                choose([made.readers[0]], away, made.reader_ends[0])


class TestBuckets:
    @pytest.mark.parametrize("bucket", [256, 1024, 4096 + 16, 1 << 20])
    def test_the_result_does_not_depend_on_the_bucket(self, bucket: int) -> None:
        world = World.random(61, tensors=8, largest=24)
        with fabric("gloo", world, Staging(bucket=bucket, inflight=3)) as made:
            got, _ = made.transfer(digest=True)
            for r in range(len(world.readers)):
                world.check_reader(r)
                made.check_digests(r, got[r].digests)

    def test_sides_that_plan_apart_refuse_each_other_and_stay_usable(self) -> None:
        world, other = dense((64, 8), writers=1, readers=1), dense((64, 16), writers=1, readers=1)
        with fabric("gloo", world) as made:
            hops = other.plan.writer(0, "serve")
            wrong = made.writers[0].compile(other.plan, hops, Side.SOURCE)
            wrong.rebind(other.writers[0].binding, made.to_readers[0])
            sent = made.writers[0].start(wrong, made.fence, LIMITS)
            got = made.readers[0].start(made.programs[0], made.fence, LIMITS)
            for transfer in (got, sent):
                with pytest.raises(PlanError, match="plan_id"):
                    transfer.wait(10.0)
            assert world.untouched(0)
            made.transfer()  # the same link: both ends stopped in step
            world.check_reader(0)
            other.close()

    def test_sides_of_two_updates_refuse_each_other(self) -> None:
        world = dense((64, 8), writers=1, readers=1)
        with fabric("gloo", world) as made:
            sent = made.writers[0].start(made.sources[0, 0], FENCE.at(8), LIMITS)
            got = made.readers[0].start(made.programs[0], FENCE.at(9), LIMITS)
            for transfer in (got, sent):
                with pytest.raises(PlanError, match="fence"):
                    transfer.wait(10.0)
            assert world.untouched(0)

    def test_sides_of_different_staging_refuse_each_other(self) -> None:
        world = dense((64, 8), writers=1, readers=1)
        with fabric("gloo", world) as made:
            hops = world.plan.writer(0, "serve")
            other = made.writers[0].compile(world.plan, hops, Side.SOURCE, Staging(bucket=512))
            other.rebind(world.writers[0].binding, made.to_readers[0])
            sent = made.writers[0].start(other, made.fence, LIMITS)
            got = made.readers[0].start(made.programs[0], made.fence, LIMITS)
            for transfer in (got, sent):
                with pytest.raises(PlanError, match="bucket"):
                    transfer.wait(10.0)

    def test_a_peer_that_never_starts(self) -> None:
        world = dense((64, 8), writers=1, readers=1)
        with fabric("gloo", world) as made:
            got = made.readers[0].start(made.programs[0], made.fence, Limits(deadline=0.5))
            with pytest.raises(DeadlineError, match="writer 0"):
                got.wait(10.0)
            assert world.untouched(0)


class TestLocate:
    @pytest.mark.parametrize("seed", range(6))
    def test_the_first_difference_is_named(self, seed: int) -> None:
        world = World.random(70 + seed, writers=2, readers=1, tensors=6)
        with fabric("shm", world) as made:
            made.transfer()
            hops = world.plan.reader("serve", 0)
            program = made.programs[0]
            assert all(program.locate(h) is None for h in range(len(hops)))
            rng = np.random.default_rng(seed)
            held = world.readers[0].held[int(rng.integers(len(world.readers[0].held)))]
            index = tuple(int(rng.integers(n)) for n in held.view.shape)
            held.view[index] = held.view[index] == 0  # 0 or 1, whatever was there
            found = [program.locate(h) for h in range(len(hops))]
            found = [f for f in found if f is not None]
            assert len(found) == 1
            assert found[0].tensor == held.shard.name
            assert found[0].index == tuple(o + i for o, i in zip(held.shard.box.offset, index, strict=True))


class TestRevocation:
    def test_an_older_generation_is_refused(self) -> None:
        world = World.random(81, writers=1, readers=1)
        with fabric("shm", world) as made:
            made.transfer()
            memory = world.writers[0]
            newer = replace(memory.region, generation=memory.region.generation + 1)
            registration = made.writers[0].register(newer, memory.fd)
            ticket = made.writers[0].export(registration, 1, made.fence)
            made.readers[0].link(made.writer_ends[0], [ticket], 5.0)
            with pytest.raises(RevokedError, match="generation"):
                made.readers[0].start(made.programs[0], made.fence, LIMITS)
            with pytest.raises(RevokedError):
                made.programs[0].rebind(world.readers[0].binding, made.to_writers[0])
            bound = replace(memory.binding, generation=2, regions={newer.id: newer})
            link = made.to_writers[0][0].link
            remote = {0: Remote(link, Binding.from_wire(bound.to_wire()))}
            made.programs[0].rebind(world.readers[0].binding, remote)
            made.readers[0].start(made.programs[0], made.fence, LIMITS).wait(10.0)
            world.check_reader(0)

    def test_a_revoked_ticket_drains_and_then_refuses(self) -> None:
        world = World.random(82, writers=1, readers=2)
        with fabric("shm", world) as made:
            made.transfer()
            ticket = made.tickets(0)[0]
            assert made.writers[0].revoke(ticket, 5.0).drained
            assert all(r[0].link.regions == 0 for r in made.to_writers)
            with pytest.raises(RevokedError):
                made.readers[0].start(made.programs[0], made.fence, LIMITS)
            with pytest.raises(RevokedError):
                made.readers[1].link(made.writer_ends[0], [ticket], 5.0)

    def test_a_region_mapped_anew_needs_a_rebind(self) -> None:
        world = World.random(84, writers=1, readers=1)
        with fabric("shm", world) as made:
            assert made.writers[0].revoke(made.tickets(0)[0], 5.0).drained
            link = made.to_writers[0][0].link
            assert made.readers[0].link(made.writer_ends[0], made.tickets(0), 5.0) is link
            (use,) = made.programs[0]._bound.uses
            use.pointers[1] = 4096  # where it was mapped before, say
            with pytest.raises(RevokedError, match="anew"):
                made.readers[0].start(made.programs[0], made.fence, LIMITS)
            made.bind_all()
            made.transfer()
            world.check_reader(0)

    def test_a_transfer_notices_that_it_was_revoked(self) -> None:
        world = dense((512, 4096), writers=1, readers=1)
        with fabric("shm", world) as made:
            seen = threading.Event()

            def slow() -> None:
                seen.set()
                time.sleep(0.1)

            ticket = made.tickets(0)[0]
            with faults.arm("shm.before_part", slow):
                got, _ = made.start()
                assert seen.wait(10)
                assert made.writers[0].revoke(ticket, 10.0).drained
            with pytest.raises(RevokedError, match="torn"):
                got[0].wait(10.0)

    def test_a_reader_that_does_not_let_go_is_named(self) -> None:
        world = dense((512, 4096), writers=1, readers=1)
        with fabric("shm", world) as made:
            release = threading.Event()
            entered = threading.Event()

            def stuck() -> None:
                entered.set()
                release.wait(20)

            with faults.arm("shm.before_part", stuck):
                got, _ = made.start()
                assert entered.wait(10)
                found = made.writers[0].revoke(made.tickets(0)[0], 0.3)
                assert not found.drained
                assert str(os.getpid()) in found.peers[0]
                release.set()
                with pytest.raises(RevokedError):
                    got[0].wait(10.0)

    def test_an_older_epoch_is_fenced(self) -> None:

        world = World.random(83, writers=1, readers=1)
        with fabric("shm", world) as made:
            ticket = made.tickets(0)[0]
            old = msgspec.structs.replace(
                ticket, generation=99, fence=msgspec.structs.replace(ticket.fence, epoch=0)
            )
            with pytest.raises(FencedError, match="epoch"):
                made.readers[0].link(made.writer_ends[0], [old], 5.0)
            lying = msgspec.structs.replace(ticket, nbytes=ticket.nbytes + 1, generation=ticket.generation)
            made.to_writers[0][0].link.close()
            with pytest.raises(TransportError, match="lies"):
                made.readers[0].link(made.writer_ends[0], [lying], 5.0)
