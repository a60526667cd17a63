from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import time

import pytest

from syncline.errors import AuthError, DeadlineError, ProtocolError, SynclineError
from syncline.meta import JobDir, clean, find_endpoint
from syncline.meta.rundir import ServerState


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_directory_is_private_and_has_a_token(root):
    job = JobDir.create("job")
    assert [mode(path) for path in (root, job.path, job.sockets, job.path / "token")] == [0o700] * 3 + [0o600]
    assert len(job.token()) == 64
    assert JobDir.create("job").token() == job.token()
    assert JobDir.create("other").token() != job.token()


def test_processes_that_create_a_job_at_once_agree_on_its_token():
    tokens = []
    threads = [threading.Thread(target=lambda: tokens.append(JobDir.create("j").token())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tokens) == 8
    assert len(set(tokens)) == 1


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b", "x" * 65, "a\n"])
def test_a_name_that_is_no_directory_is_refused(name):
    with pytest.raises(ProtocolError, match="job name"):
        JobDir.create(name)


@pytest.mark.parametrize("where", ["root", "job", "sockets"])
def test_a_directory_that_others_can_write_to_is_refused(root, where):
    job = JobDir.create("job")
    {"root": root, "job": job.path, "sockets": job.sockets}[where].chmod(0o770)
    with pytest.raises(AuthError, match="written by others"):
        JobDir.create("job")


def test_a_directory_of_another_user_is_refused(monkeypatch):
    JobDir.create("job")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(AuthError, match="another user"):
        JobDir.open("job")


def test_links_are_refused(root, tmp_path):
    JobDir.create("job")
    (root / "link").symlink_to(root / "job")
    with pytest.raises(AuthError, match="not a directory"):
        JobDir.open("link")
    token = root / "job" / "token"
    token.rename(tmp_path / "elsewhere")
    token.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AuthError, match="symbolic link"):
        JobDir.open("job").token()


def test_a_token_that_others_can_read_is_refused():
    job = JobDir.create("job")
    (job.path / "token").chmod(0o640)
    with pytest.raises(AuthError, match="read by others"):
        job.token()


def test_a_missing_token_says_what_to_set(monkeypatch):
    monkeypatch.setenv("SYNCLINE_JOB_TOKEN", "t" * 20)
    job = JobDir.create("job")
    assert job.token() == b"t" * 20
    monkeypatch.delenv("SYNCLINE_JOB_TOKEN")
    with pytest.raises(AuthError, match="SYNCLINE_JOB_TOKEN"):
        job.token()


def test_the_environment_names_the_endpoint(monkeypatch):
    monkeypatch.setenv("SYNCLINE_META_ENDPOINT", "tcp://[::1]:77")
    assert find_endpoint("job") == "tcp://[::1]:77"
    monkeypatch.setenv("SYNCLINE_META_ENDPOINT", "tcp://0.0.0.0:77")
    with pytest.raises(SynclineError, match="wildcard"):
        find_endpoint("job")


def test_waiting_for_an_endpoint(root):
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=r"endpoint\.json"):
        find_endpoint("job", 0.2)
    assert time.monotonic() - began < 1
    later = threading.Timer(0.1, lambda: JobDir.create("job").publish_endpoint("tcp://127.0.0.1:9", 3))
    later.start()
    assert find_endpoint("job", 5) == "tcp://127.0.0.1:9"
    later.join()
    assert JobDir.open("job").endpoint_record().boot == 3


def test_counters_are_kept_and_damage_is_not_guessed_away():
    job = JobDir.create("job")
    assert job.load_state() == ServerState()
    job.store_state(ServerState(3, {"t": 2}, 5))
    assert job.load_state() == ServerState(3, {"t": 2}, 5)
    (job.path / "state.json").write_text("{")
    with pytest.raises(SynclineError, match="damaged"):
        job.load_state()


def test_a_second_server_is_refused_naming_the_process(process):
    peer = process("server", "job")
    peer.said()
    with pytest.raises(ProtocolError, match=f"process {peer.pid}"):
        JobDir.create("job").claim_server()
    peer.kill()
    JobDir.create("job").claim_server().release()


def test_a_forked_child_does_not_keep_its_parents_lock(process):
    peer = process("fork", "job")
    child, _ = peer.said()
    try:
        peer.kill()
        os.kill(child, 0)
        JobDir.create("job").claim_server().release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_sweep_removes_what_the_dead_left_and_nothing_else(process):
    dead, alive, other = process("sockets", "job"), process("sockets", "job"), process("sockets", "other")
    assert [peer.said() for peer in (dead, alive, other)] == [str(peer.pid) for peer in (dead, alive, other)]
    for peer in (dead, other):
        peer.kill()
    job = JobDir.open("job")
    stray = job.sockets / "stray.sock"  # bound by somebody who does not keep to the names
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(stray))
        listener.listen()
        assert job.sweep() == [f"{dead.pid}.data", f"{dead.pid}.lock"]
    left = sorted(path.name for path in job.sockets.iterdir())
    assert left == sorted([f"{alive.pid}.data", f"{alive.pid}.lock", "stray.sock"])
    assert job.sweep() == ["stray.sock"]
    assert (JobDir.open("other").sockets / f"{other.pid}.data").exists()


def test_a_hold_removes_its_sockets_and_shares_one_lock():
    job = JobDir.create("job")
    first, second = job.hold_sockets(), job.hold_sockets()
    assert first.stem == second.stem == str(os.getpid())
    first.path("a").touch()
    second.path("b").touch()
    first.release()
    first.release()
    assert sorted(path.name for path in job.sockets.iterdir()) == [f"{os.getpid()}.b", f"{os.getpid()}.lock"]
    second.release()
    assert list(job.sockets.iterdir()) == []
    with pytest.raises(ProtocolError, match="socket name"):
        job.hold_sockets().path("../x")


def test_clean_removes_dead_jobs_only(root, process):
    peers = {job: process("sockets", job) for job in ("dead", "alive")}
    peers["served"] = process("server", "served")
    for peer in peers.values():
        peer.said()
    peers["dead"].kill()
    (root / "link").symlink_to(root / "alive")
    (root / "loose").mkdir(mode=0o700)
    (root / "loose").chmod(0o777)
    report = clean()
    assert report.removed == ["dead"]
    assert report.live == {
        "alive": [f"sockets/{peers['alive'].pid}.lock", f"sockets/{peers['alive'].pid}.data"],
        "served": ["server.lock"],
    }
    assert sorted(report.refused) == ["link", "loose"]
    assert sorted(path.name for path in root.iterdir()) == ["alive", "link", "loose", "served"]


def test_clean_of_one_job_leaves_the_others(root):
    JobDir.create("a")
    JobDir.create("b")
    assert clean("a").removed == ["a"]
    assert clean("never").removed == []
    assert [path.name for path in root.iterdir()] == ["b"]


def test_a_job_with_a_waiting_member_is_not_cleaned(serve, client, root):
    server = serve()
    member = client()
    member.connect()
    server.stop()
    assert clean().live == {"job": ["members.lock"]}
    member.close()
    assert clean().removed == ["job"]
    assert list(root.iterdir()) == []


def test_clean_finishes_what_a_killed_clean_began(root):
    JobDir.create("job").path.rename(root / ".job.removing-12")
    clean()
    assert list(root.iterdir()) == []


def test_clean_refuses_a_root_that_is_not_ours(root, monkeypatch):
    JobDir.create("job")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(AuthError, match="another user"):
        clean()
